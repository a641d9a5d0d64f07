"""What holds for every surrogate, the trainer's own ones and those that are registered later."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.tolerance import within
from tests.troll.trl import dense, tiny
from tests.troll.trl.surrogates.scored import pair, scored_tokens, settings
from troll.trl import TrollConfig
from troll.trl.surrogates import SURROGATES, settings_read

#: The surrogates of `troll.trl`, whatever else is registered in this process.
OWN = ("troll", "regression", "kl_penalty", "clip", "cispo", "sapo", "vespo", "none")
#: Those that are losses of TRL with a name of their own.
LOSSES = ("cispo", "sapo", "vespo")

#: Of each surrogate, what the tables of docs/surrogates.md say about its settings.
ROWS: dict[str, str] = {
    surrogate: row_settings
    for names, row_settings in re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \|[^|]*\|([^|]*)\|",
        (Path(__file__).parents[4] / "docs" / "surrogates.md").read_text(),
        re.M,
    )
    for surrogate in re.findall(r"\w+", names)
}


def assert_defaults_are_those_of_the_page(args: TrollConfig) -> None:
    read, said = settings_read(args), ROWS[args.surrogate]
    if args.surrogate.startswith("dppo"):  # two defaults of one setting
        total_variation, kl = re.findall(r"([\d.]+) \((?:TV|KL)\)", said)
        assert read["surrogate_kwargs.threshold"] == float(total_variation if args.surrogate == "dppo_tv" else kl)
        said = said.partition(";")[2]
    defaults = re.findall(r"`(\w+)` (`\w+`|none|[\d.]+)", said)
    assert bool(defaults) == (args.surrogate not in ("regression", "none"))  # of which one has those of another
    for name, value in defaults:
        found = read[name if name in read else f"surrogate_kwargs.{name}"]
        assert value == ("none" if found is None else f"`{found}`" if isinstance(found, str) else f"{found:g}"), name


def assert_refuses_losses(config: Callable[..., TrollConfig], surrogate: str) -> None:
    """Other surrogates' losses, and what belongs to TRL's clip, with what works."""
    for loss_type in LOSSES:
        message = f"'{loss_type}' does not go with surrogate '{surrogate}': set surrogate='{loss_type}' and leave"
        with pytest.raises(ValueError, match=message):
            config(loss_type=loss_type, surrogate=surrogate)
    if surrogate == "clip":
        return
    message = f"'luspo' does not go with surrogate '{surrogate}': use one of grpo, bnpo, dr_grpo, dapo, or surrogate="
    with pytest.raises(ValueError, match=message):
        config(loss_type="luspo", surrogate=surrogate)
    with pytest.raises(ValueError, match=f"delta is a part of TRL's clip, which surrogate '{surrogate}' does not use"):
        config(delta=4.0, surrogate=surrogate)


def assert_terms_of_no_token_are_empty(name: str) -> None:
    """As in a micro-batch whose completions are all masked."""
    new, old, sampled = (each[:0] for each in pair())
    surrogate: Any = SURROGATES[name]
    tokens = scored_tokens(new, old, sampled, advantages=torch.zeros(0, dtype=torch.float64), top_k=9)
    terms = surrogate.apply(tokens, settings(), surrogate.own())
    made = [value for value in (terms.log_ratio, terms.keep, terms.penalty) if value is not None]
    assert made and all(value.shape == (0,) for value in made)


def assert_on_policy_is_the_identity(make: tiny.Maker, surrogate: str, **own: Any) -> None:
    """vLLM's importance correction has TRL score on-policy rollouts too, where every surrogate is the identity."""
    trainer = make(surrogate=surrogate, steps_per_generation=1, surrogate_kwargs=own, diagnostics_steps=1)
    (inputs,) = tiny.rollout(trainer)
    with torch.no_grad():
        old = dense.completion_log_probs(trainer.model, inputs).float()
    loss, gradients = tiny.loss_and_gradients(trainer, inputs | {"old_per_token_logps": old})
    expected, expected_gradients = tiny.loss_and_gradients(trainer, inputs)
    assert loss == pytest.approx(expected, abs=1e-6)
    tiny.assert_same_gradients(gradients, expected_gradients, 2e-5)


def assert_same_rollouts(make: tiny.Maker, *surrogates: str) -> None:
    rollouts = {name: tiny.rollout(make(surrogate=name)) for name in surrogates}
    for name, buffered in rollouts.items():
        for ours, reference in zip(buffered, rollouts[surrogates[0]], strict=True):
            assert ours["completion_ids"].tolist() == reference["completion_ids"].tolist(), name
            assert ours["advantages"].tolist() == reference["advantages"].tolist(), name


def assert_measured_when_diagnostics_are_due(make: tiny.Maker, surrogate: str) -> None:
    """Of a surrogate that does not project."""
    trainer = make(surrogate=surrogate, diagnostics_steps=2, logging_steps=2)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "trust_region/kl_before_mean" in entry]
    assert [entry["step"] for entry in logs] == [2, 4]
    for entry in logs:
        assert entry["trust_region/kl_before_mean"] == entry["trust_region/kl_after_mean"] > 0
        assert entry["trust_region/projected_fraction"] == 0
        assert "trust_region/kl_bound" not in entry


def assert_equal_truncated_policies_have_ratio_one(make: tiny.Maker, surrogate: str) -> None:
    trainer = make(surrogate=surrogate, truncated_ratio=True, top_p=0.8)
    inputs = tiny.rollout(trainer)[0]
    terms = trainer.surrogate.terms and mock.Mock(wraps=trainer.surrogate.terms)
    trainer.surrogate = replace(trainer.surrogate, terms=terms)
    tiny.loss_and_gradients(trainer, inputs)
    if terms is not None:
        (tokens, *_), _ = terms.call_args
        assert float(tokens.log_ratio.detach().abs().max()) <= within(tiny.LOG_PROB_ERROR)
    assert float(trainer.monitor.tally.maxima["kl_before_max"]) <= within(1e-6)
    old = make.model()
    raw = dense.completion_log_probs(old, inputs)[dense.scored_mask(inputs)]
    kept = inputs["old_per_token_logps"][dense.scored_mask(inputs)]
    assert bool((kept >= raw - within(tiny.LOG_PROB_ERROR)).all()) and float((kept - raw).mean()) > 0.05


def assert_is_formula(make: tiny.Maker, of_sequence: Callable[..., list[Tensor]], **given: Any) -> None:
    """The loss and its gradients, after the network has moved, are those of a formula on full logits.

    `of_sequence` takes the new and the old log-probabilities (t, V) of a completion's tokens, their ids, the advantage
    and the configuration, and returns the loss of each.
    """
    moved = dense.Moved(make, **given)
    inputs, old = moved.batches[0]
    policies = (logits.log_softmax(-1) for logits in (moved.logits(inputs), old))
    parts = *policies, inputs["completion_ids"], inputs["advantages"].tolist(), dense.scored_mask(inputs)
    rows = [
        of_sequence(new[at], old[at], ids[at].tolist(), advantage, moved.args)
        for new, old, ids, advantage, at in zip(*parts, strict=True)
    ]
    moved.assert_loss(inputs, dense.aggregate(rows, inputs, moved.args), rel=1e-5)
