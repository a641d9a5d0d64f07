"""Old policies that are missing, damaged or of another rollout, and logits that are no numbers: no update is made."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from tests.troll.verl.actor import Actor, as_batch, captured, nested, rollout, trolled
from tests.troll.verl.reference import check_left_out
from tests.troll.verl.worker import left_out
from troll import PackedPolicy, capture
from troll.verl.records import to_record


def records(scored: TensorDict) -> list[Tensor]:
    return [record.clone() for record in captured(trolled().engine, scored)]


def truncated(scored: TensorDict) -> list[Tensor]:
    first, *others = records(scored)
    return [first[:-3], *others]


def of_other_lengths(scored: TensorDict) -> list[Tensor]:
    other = trolled(True, "data.train_batch_size=32")
    return captured(other.engine, other.score(as_batch(rollout(seed=9))))


def of_another_vocabulary(scored: TensorDict) -> list[Tensor]:
    generator, found = torch.Generator().manual_seed(0), []
    for response in scored["responses"].unbind():
        logits = torch.randn(len(response), 120, generator=generator)
        policy = capture(logits, response, top_k=12, mass_threshold=1e-3)
        found.append(to_record(PackedPolicy.of(policy)))
    return found


def of_another_capture(scored: TensorDict) -> list[Tensor]:
    others = records(scored)[1:]
    actor = trolled(True, "data.train_batch_size=32").reset(top_k=5)
    return [captured(actor.engine, actor.score(as_batch(rollout())))[0], *others]


def exchanged(scored: TensorDict) -> list[Tensor]:
    """Two sequences of a micro-batch with each other's record; both together have as many tokens as before."""
    first, second, *others = records(scored)
    return [second, first, *others]


DAMAGE: list[tuple[Callable[[TensorDict], list[Tensor]], str]] = [
    (truncated, r"record 0 must have \d+ words .* got \d+: it was damaged"),
    (of_other_lengths, r"of other tokens \(\d+\) than its responses \(\d+\): they are not of the same"),
    (of_another_vocabulary, "must have the old policy's 120 tokens, got 99"),
    (of_another_capture, "records must share one top_k"),
    (exchanged, "of other tokens .* they are not of the same rollout"),
]


def check_refused(actor: Actor, batch: TensorDict, message: str) -> None:
    before = actor.parameters()
    with pytest.raises(ValueError, match=message):
        actor.update(batch)
    assert not actor.steps and not actor.engine.optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in actor.parameters().items())


@pytest.mark.parametrize(("damaged", "message"), DAMAGE, ids=[damage[0].__name__ for damage in DAMAGE])
@pytest.mark.parametrize("packed", [True, False])
def test_damaged_old_policies_are_refused(
    damaged: Callable[[TensorDict], list[Tensor]], message: str, packed: bool
) -> None:
    """As an inference engine's reach an update: captured ones do not leave their process."""
    scored = trolled().score(as_batch(rollout()))
    scored["old_policies"] = nested(damaged(scored))
    check_refused(trolled(packed).reset(anchor="rollout", bypass_mode=True), scored, message)


def test_missing_old_policies_are_refused() -> None:
    actor = trolled()
    actor.score(as_batch(rollout(seed=2)))
    other = trolled(True, "data.train_batch_size=32")
    scored = other.score(as_batch(rollout()))
    check_refused(actor, scored, "2 of 2 sequences .* have no old policy in this process")


def test_padded_rollouts_of_the_legacy_trainer_are_refused() -> None:
    actor = trolled()
    scored = actor.score(as_batch(rollout()))
    for name in ("prompts", "responses"):
        scored[name] = scored[name].to_padded_tensor(0)
    check_refused(actor, scored, "must be nested tensors, as verl's v1 trainer makes them")


@pytest.mark.parametrize("reads_head", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_updates_on_what_is_no_number_are_left_out(
    value: float, reads_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As verl leaves them out where gradients are not finite."""
    actor = trolled()
    monkeypatch.setitem(vars(actor.engine), "reads_head", reads_head)
    check_left_out(left_out(actor, rollout(), value))


def test_a_run_goes_on_after_a_refused_update() -> None:
    """The caller's choice; nothing of the refused one is left."""
    actor = trolled()
    scored = actor.score(as_batch(rollout()))
    damaged = scored.copy()
    damaged["old_policies"] = nested(truncated(scored))
    actor.engine.trust_region = dataclasses.replace(actor.engine.trust_region, anchor="rollout", bypass_mode=True)
    with pytest.raises(ValueError, match="record 0"):
        actor.update(damaged)
    actor.reset().update(scored)
    after = actor.parameters()
    other = trolled()
    other.update(other.score(as_batch(rollout())))
    assert all(torch.equal(value, after[name]) for name, value in other.parameters().items())
