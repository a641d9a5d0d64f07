"""Truncated sampling: ratio, trust region and pull on the tokens that the sampler kept, against dense float64."""

import math
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.tolerance import within
from tests.troll.trl import dense, tiny
from tests.troll.trl.engine import Engine, RolloutFunc, train_around_both
from tests.troll.trl.surrogates.contract import assert_equal_truncated_policies_have_ratio_one
from tests.troll.trust_region import reference
from troll.trl import TrollConfig

SAMPLERS: dict[str, dict[str, Any]] = {
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 5},
    "min-p": {"min_p": 0.1},
    "all three": {"top_k": 9, "top_p": 0.9, "min_p": 0.02},
}


def kept_tokens(old: Tensor, args: TrollConfig) -> list[list[list[int]]]:
    """The tokens that the sampler keeps of (B, T, V) old logits, which have the temperature in them."""
    return [
        [reference.kept_set(row.numpy(), args.top_k, args.top_p, args.min_p or 0.0) for row in rows] for rows in old
    ]


def restricted_log_probs(logits: Tensor, kept: list[list[list[int]]], inputs: dict[str, Any]) -> list[list[Tensor]]:
    """log p(o)/p(S) of the scored tokens of each sequence."""
    return [
        [logits[b, t][kept[b][t]].log_softmax(-1)[kept[b][t].index(token)] for t, token in row]
        for b, row in enumerate(dense.scored(inputs))
    ]


@pytest.mark.parametrize(("sampler", "pull"), [*((each, "projection") for each in SAMPLERS), ("top-p", "proximal")])
def test_loss_is_the_dense_one_on_the_kept_tokens(make, sampler, pull):
    moved = dense.Moved(make, kl_bound=0.02, pull=pull, temperature=0.8, support_top_k=4, **SAMPLERS[sampler])
    projected = 0
    for inputs, old in moved.batches:
        rows = dense.tokens(moved.logits(inputs), old, inputs, moved.args, kept_tokens(old, moved.args))
        moved.assert_loss(inputs, dense.loss(rows, inputs, moved.args), tiny.LOG_PROB_ERROR)
        projected += sum(one.multiplier > 0 for row in rows for one in row)
    assert projected > 0
    assert float(moved.trainer.monitor.tally.totals["projected_fraction"][0]) == projected


def test_clip_takes_the_kept_tokens_ratio_by_a_switch(make):
    settings = SAMPLERS["all three"]
    moved = dense.Moved(make, surrogate="clip", truncated_ratio=True, loss_type="bnpo", **settings)
    for inputs, old in moved.batches:
        kept = kept_tokens(old, moved.args)
        policies = [restricted_log_probs(logits, kept, inputs) for logits in (moved.logits(inputs), old)]
        values = []
        for new_row, old_row, advantage in zip(*policies, inputs["advantages"].double(), strict=True):
            ratio = (torch.stack(new_row) - torch.stack(old_row)).exp()
            values.append(-torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
        moved.assert_loss(inputs, torch.cat(values).mean(), tiny.LOG_PROB_ERROR)


@pytest.mark.parametrize("surrogate", ["troll", "kl_penalty", "clip"])
def test_equal_truncated_policies_have_ratio_one(make, surrogate):
    assert_equal_truncated_policies_have_ratio_one(make, surrogate)


@pytest.mark.parametrize("surrogate", ["troll", "clip"])
def test_reference_kl_is_of_the_whole_policies(make, surrogate):
    settings = {"surrogate": surrogate, "truncated_ratio": True, "use_bias_correction_kl": False, "top_p": 0.8}
    moved = dense.Moved(make, beta=0.5, **settings)
    inputs, _ = moved.batches[0]
    loss, found = tiny.loss_and_gradients(moved.trainer, inputs)
    moved.trainer.beta = 0.0
    plain, plain_found = tiny.loss_and_gradients(moved.trainer, inputs)
    log_ratio = inputs["ref_per_token_logps"].double() - dense.completion_log_probs(moved.model, inputs)
    kl = 0.5 * (log_ratio.exp() - log_ratio - 1)
    rows = [list(row[mask]) for row, mask in zip(kl, dense.scored_mask(inputs), strict=True)]
    expected = dense.aggregate(rows, inputs, moved.args)
    expected.backward()
    assert loss - plain == pytest.approx(expected.item(), rel=1e-4, abs=2e-6)
    differences = {name: found[name] - plain_found[name] for name in found}
    tiny.assert_same_gradients(differences, tiny.gradients(moved.model), tolerance=10 * tiny.LOG_PROB_ERROR)


def test_penalty_is_the_pull_without_a_bound(make):
    """Proximal, with the projection out of reach: the kept set's mass included."""
    found = []
    for settings in ({"surrogate": "kl_penalty"}, {"pull": "proximal", "kl_bound": math.inf}):
        moved = dense.Moved(make, top_p=0.8, **settings)
        found.append(tiny.loss_and_gradients(moved.trainer, moved.batches[0][0]))
    (loss, one), (other_loss, other) = found
    assert loss == pytest.approx(other_loss, rel=1e-6)
    tiny.assert_same_gradients(one, other)


def test_off_policy_mask_compares_the_truncated_policies(make):
    moved = dense.Moved(make, off_policy_mask_threshold=0.1, top_p=0.8)
    inputs, old = moved.batches[0]
    kept = kept_tokens(old, moved.args)
    with mock.patch.object(moved.trainer, "get_off_policy_mask", wraps=moved.trainer.get_off_policy_mask) as mask:
        tiny.loss_and_gradients(moved.trainer, inputs)
    seen = mask.call_args.kwargs
    found = (seen["sampling_per_token_logps"] - seen["per_token_logps"])[dense.scored_mask(inputs)]
    with torch.no_grad():
        new = moved.logits(inputs)
    of_tokens = [chain.from_iterable(restricted_log_probs(logits, kept, inputs)) for logits in (old, new)]
    expected = torch.stack([*of_tokens[0]]) - torch.stack([*of_tokens[1]])
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=within(tiny.LOG_PROB_ERROR))


def test_training_logs_the_kept_mass_and_no_added_tokens(make):
    trainer = make(top_p=0.8)
    trainer.train()
    masses = tiny.logged(trainer, "trust_region/kept_mass")
    assert len(masses) == 4 and all(0.5 < mass < 1 for mass in masses)
    assert all(0 < mass < 0.2 for mass in tiny.logged(trainer, "trust_region/tail_mass"))  # what the sampler cut
    # Sampling in batches may round a token over the edge of the kept set; not several.
    assert max(tiny.logged(trainer, "sampling/added_fraction")) <= 0.05


def test_tokens_of_the_environment_are_not_added_tokens(make):
    """A function's rollout. Every second token is the environment's, and any token may be outside the top 5."""
    trainer = make(top_k=5)
    prompts = trainer.processing_class([row["prompt"] for row in trainer.train_dataset.select(range(8))])["input_ids"]
    generator = torch.Generator().manual_seed(0)
    completions = torch.randint(7, 40, (8, 6), generator=generator).tolist()
    masks = [[1, 0] * 3] * 8
    ids = {"prompt_ids": prompts, "completion_ids": completions}
    trainer.rollout_func = lambda prompts, trainer: {**ids, "logprobs": None, "env_mask": masks}
    added = []
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = trainer.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        kept = logits.topk(5).indices.tolist()
        added += [completion[t] not in kept[t] for t in (0, 2, 4)]
    tiny.rolled_out(trainer)
    assert trainer._metrics["train"]["sampling/added_fraction"] == pytest.approx([sum(added) / len(added)])


@pytest.mark.parametrize(("top_k", "impossible"), [(3, -math.inf), (3, -9999.0), (8, -math.inf)])
def test_engine_reports_the_kept_tokens_as_the_anchor(make, top_k, impossible):
    # Without the pull: an engine does not say what mass its kept tokens had.
    settings: dict[str, Any] = {"top_k": top_k, "support_top_k": 8, "kl_bound": 0.02, "regression_weight": 0.0}
    logs = train_around_both(
        lambda anchor: make(
            rollout_func=RolloutFunc(Engine(top_k=top_k, impossible=impossible)),
            anchor=anchor,
            vllm_importance_sampling_correction=False,
            **settings,
        )
    )
    assert all(log["trust_region/support_size"] == top_k for log in logs)


def test_engine_that_keeps_more_than_it_reports_is_refused(make):
    trainer = make(rollout_func=RolloutFunc(Engine(top_k=20)), anchor="rollout", top_k=20, support_top_k=8)
    with pytest.raises(ValueError, match="log_probs must be all that the sampler could draw, at most top_k=8"):
        trainer.train()
    assert trainer.state.global_step == 0
