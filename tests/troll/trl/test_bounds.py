"""What bounds an update in the trainer: shared multipliers, and an ε that a callback sets."""

from typing import Any

import pytest
from transformers import TrainerCallback

from tests.tolerance import within
from tests.troll.trl import dense
from tests.troll.trl.tiny import logged


def moved(make: Any, **settings: Any) -> dense.Moved:
    return dense.Moved(make, loss_type="grpo", kl_bound=0.01, **settings)


def assert_as_in_float64(trained: dense.Moved, inputs: dict[str, Any]) -> list[list[float]]:
    """Loss and gradients are those of the reference. Returns KL after the projection, by sequence."""
    rows = dense.tokens(trained.logits(inputs), trained.batches[0][1], inputs, trained.args)
    trained.assert_loss(inputs, dense.loss(rows, inputs, trained.args), 1e-4)
    return [[one.kl_after for one in row] for row in rows]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tokens_share_a_multiplier(make, reduction):
    trained = moved(make, constraint="sequence", constraint_reduction=reduction)
    kl = assert_as_in_float64(trained, trained.batches[0][0])
    shared = [sum(row) / len(row) if reduction == "mean" else sum(row) for row in kl]
    assert max(shared) == pytest.approx(0.01, rel=1e-6)
    assert reduction == "sum" or max(max(row) for row in kl) > 0.01


def test_tool_tokens_have_no_say_in_a_shared_bound(make):
    trained = moved(make, change=dense.with_tools, constraint="sequence")
    assert_as_in_float64(trained, trained.batches[0][0])


class Sets(TrainerCallback):
    """Sets ε at an event: before update n, counted from 0, to `BOUNDS[n]`."""

    trainer: Any

    def __init__(self, event: str) -> None:
        setattr(self, event, self._set)

    def _set(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step < len(BOUNDS):
            self.trainer.kl_bound = BOUNDS[state.global_step]


BOUNDS = [0.1, 0.01, 0.08, 0.03]


@pytest.mark.parametrize(
    ("event", "added", "accumulation"),
    [("on_step_begin", False, 2), ("on_step_end", True, 1), ("on_log", False, 1)],
    ids=["begin, before the trainer's own", "end, after it", "log"],
)
def test_a_callback_sets_the_bound_of_the_next_update(make, event, added, accumulation):
    callback = Sets(event)
    given: dict[str, Any] = {} if added else {"callbacks": [callback]}
    passes = {"gradient_accumulation_steps": accumulation, "steps_per_generation": 2 * accumulation}
    trainer = callback.trainer = make(kl_bound=BOUNDS[0], learning_rate=0.02, **passes, **given)
    if added:
        trainer.add_callback(callback)
    trainer.train()
    assert logged(trainer, "trust_region/kl_bound") == BOUNDS
    largest = logged(trainer, "trust_region/kl_after_max")
    assert largest[1::2] == pytest.approx(BOUNDS[1::2], rel=within(1e-3)), "the second updates of two rollouts"


def test_a_bound_that_was_set_is_checked_where_it_is_used(make):
    trainer = make(max_steps=2)
    trainer.kl_bound = 0.0
    with pytest.raises(ValueError, match="kl_bound must be above 0, got 0"):
        trainer.train()
