"""Diagnostics in the trainer: when they are due, what they say of full logits, and that they change nothing."""

import math
import warnings
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig

import troll
from tests.tolerance import within
from tests.troll.trl import dense, tiny
from troll.huggingface.policies import scatter
from troll.trl import sampling
from troll.trust_region.diagnostics import coverage, old_to_new_kl, ratio_report, sequence_report

PREFIX = "trust_region/diagnostics/"


def diagnostics(trainer: Any) -> list[tuple[int, dict[str, float]]]:
    """Step and values of every log that has some."""
    logs = [
        (entry["step"], {name.removeprefix(PREFIX): entry[name] for name in entry if name.startswith(PREFIX)})
        for entry in trainer.state.log_history
    ]
    return [(step, values) for step, values in logs if values]


@pytest.mark.parametrize(
    ("every", "steps", "settings"),
    [
        (0, [], {"max_steps": 1}),
        (3, [3, 6], {}),
        # Three micro-batches a rollout, two an update: rollouts begin in the middle of every second update.
        (2, [2, 4, 6], {"surrogate": "clip", "gradient_accumulation_steps": 2, "steps_per_generation": 3}),
    ],
)
def test_diagnostics_are_logged_when_they_are_due(make, every, steps, settings):
    trainer = make(**{"diagnostics_steps": every, "max_steps": 6, **settings})
    trainer.train()
    assert [step for step, _ in diagnostics(trainer)] == steps


def test_the_tail_is_measured_in_every_update_that_is_due(make):
    trainer = make(diagnostics_steps=1, support_top_k=4)
    trainer.train()
    gaps = [values["tail_gap"] for _, values in diagnostics(trainer)]
    # Old and new policy are equal in the first of two updates of a rollout.
    assert max(gaps[0], gaps[2]) < within(1e-9)
    assert min(gaps[1], gaps[3]) > 1e-6


def test_virtual_tokens_do_not_shift_the_probe(make):
    peft = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trainer = make(diagnostics_steps=1, peft_config=peft)
    tiny.rollout(trainer)
    probe = trainer.diagnostics._probe
    ids = probe.input_ids[0].roll(-1)[probe.positions]
    log_probs = probe.old_logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    known = torch.cat([batch["old_per_token_logps"].flatten() for batch in trainer._buffered_inputs])
    assert float((known - log_probs.unsqueeze(-1)).abs().amin(-1).max()) < within(1e-5)


@pytest.mark.parametrize("surrogate", ["troll", "clip"])
def test_diagnostics_change_nothing(make, surrogate):
    results = []
    for every in (0, 2):
        trainer = make(surrogate=surrogate, diagnostics_steps=every, epsilon=0.2, max_steps=2)
        trainer.train()
        results.append((tiny.logged(trainer, "loss"), tiny.parameters(trainer.model)))
    (losses, weights), (other_losses, other_weights) = results
    if surrogate == "troll":  # the others read policies by another head, which rounds otherwise
        assert losses == other_losses
        torch.testing.assert_close(weights, other_weights, rtol=0, atol=0)
    assert losses == pytest.approx(other_losses, abs=1e-5)
    torch.testing.assert_close(weights, other_weights, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("surrogate", ["troll", "clip"])
def test_diagnostics_are_those_of_full_logits(make, surrogate):
    trainer = make(surrogate=surrogate, diagnostics_steps=1, support_top_k=6, kl_bound=0.01)
    inputs = tiny.rollout(trainer)[0]
    probed = trainer.diagnostics._probe
    with torch.no_grad():
        old = dense.completion_logits(trainer.model, inputs, 1.0)
        tiny.move(trainer.model, 0.1)
        new = dense.completion_logits(trainer.model, inputs, 1.0)
    tiny.loss_and_gradients(trainer, inputs)
    metrics = {name.removeprefix(PREFIX): value for name, value in trainer.diagnostics.metrics().items()}
    assert trainer.diagnostics.metrics() == {}
    assert ("solver_evaluations" in metrics) == (surrogate == "troll")

    mask = dense.scored_mask(inputs)
    policy = troll.capture(old[mask], inputs["completion_ids"][mask], top_k=6, mass_threshold=1e-5)
    kl = old_to_new_kl(troll.log_probs_at(new[mask], policy.token_ids), policy)
    log_probs = (x.log_softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1) for x in (new, old))
    log_ratio, advantages = next(log_probs) - next(log_probs), inputs["advantages"].unsqueeze(-1).expand(mask.shape)
    expected = sequence_report(scatter(kl, mask), log_ratio, mask) + coverage(policy, mask[mask])
    expected += ratio_report(log_ratio[mask], advantages[mask], mask[mask])
    for name, value in expected.values().items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4, abs=1e-6), name

    # The chain rule, on the probed tokens.
    with torch.no_grad():
        moved = trainer.diagnostics.full_logits(probed.input_ids, probed.attention_mask, probed.positions).double()
    first, ids = probed.old_logits.double(), probed.old.token_ids
    whole = (moved.softmax(-1) * (moved.log_softmax(-1) - first.log_softmax(-1))).sum(-1)
    gap = whole - troll.sparse_kl(troll.log_probs_at(moved, ids), troll.log_probs_at(first, ids))
    assert metrics["tail_gap"] == pytest.approx(float(gap.mean()), rel=1e-3, abs=1e-7)
    assert 0 < metrics["tail_gap"] <= metrics["tail_gap_max"] <= metrics["tail_gap_bound_max"]


def test_much_mass_outside_the_support_is_warned_about_once(make, recwarn):
    warnings.simplefilter("always")  # a second one, too
    narrow, wide = make(support_top_k=2), make(max_steps=1)
    narrow.train()
    assert sum("Raise support_top_k to 8" in str(warning.message) for warning in recwarn) == 1
    assert tiny.logged(narrow, "trust_region/tail_mass")[0] > 0.1
    with tiny.no_warnings_about("outside the"):
        wide.train()
    assert max(tiny.logged(wide, "trust_region/tail_mass")) < 0.1


#: Cut-off completions are masked.
ALL_MASKED: dict[str, Any] = {
    "mask_truncated_completions": True,
    "max_completion_length": 4,
    "diagnostics_steps": 1,
    "max_steps": 2,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"constraint": "sequence", "eval_strategy": "steps", "eval_steps": 1},
        {"surrogate": "clip", "advantage_estimator": "reinforce_plus_plus"},
        {"surrogate": "kl_penalty", "beta": 0.1, "kl_in_reward": True, "advantage_estimator": "rloo"},
    ],
    ids=str,
)
def test_no_metric_is_nan_where_all_completions_are_masked(make, settings, monkeypatch):
    assert_no_nan_where_all_are_masked(make, monkeypatch, **settings)


def assert_no_nan_where_all_are_masked(make: tiny.Maker, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    monkeypatch.setattr(sampling, "refuse_changes", lambda trainer: None)  # made below
    trainer = make(**ALL_MASKED, **settings, eval_dataset=tiny.make_dataset(4))
    trainer.generation_config.suppress_tokens = tiny.COMMON["eos_token_id"]
    trainer.train()
    assert tiny.logged(trainer, "completions/clipped_ratio") == [1.0]
    found = [(name, value) for entry in trainer.state.log_history for name, value in entry.items()]
    assert not any(math.isnan(value) for _, value in found if isinstance(value, float))
    assert not any(name.startswith("critic/value") for name, _ in found)  # of no token


def test_no_metric_is_nan_where_nothing_is_judged(make):
    assert_no_nan_where_nothing_is_judged(make)


def assert_no_nan_where_nothing_is_judged(make: tiny.Maker, **settings: Any) -> None:
    nothing: dict[str, Any] = {"reward_funcs": lambda completions, **_: [None] * len(completions)}
    trainer = make(diagnostics_steps=1, **nothing, **settings)
    trainer.train()
    found = [value for entry in trainer.state.log_history for value in entry.values() if isinstance(value, float)]
    assert not any(math.isnan(value) for value in found)
