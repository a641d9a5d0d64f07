"""α, the weight of the pull, where it adapts: what it goes by, and what a checkpoint keeps of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verl.actor import ACTOR, Actor, as_batch, nested, policy_loss, rollout, trolled
from troll.verl.regression_weight import WEIGHT_STATE, RegressionWeight

WEIGHT, SEEN = "trust_region/regression_weight", "trust_region/regression_kl"

PROXIMAL: dict[str, Any] = {"pull": "proximal", "kl_bound": float("inf")}


def rollouts(actor: Actor, number: int = 2) -> list[dict[str, Any]]:
    """The metrics of the updates of so many rollouts."""
    return [dict(actor.update(actor.score(as_batch(rollout(seed=seed))))) for seed in range(1, 1 + number)]


@pytest.mark.parametrize("pull", [PROXIMAL, {}], ids=["proximal", "projection"])
def test_weight_adapts_to_last_update_of_rollout(pull: dict[str, Any]) -> None:
    """Once a rollout, by the mean KL of all tokens of its fourth update."""
    fixed = rollouts(trolled().reset(**pull), 1)[0]
    assert WEIGHT not in fixed and SEEN not in fixed
    kl = fixed["trust_region/regression"]
    assert kl[0] < kl[-1]
    for target, factor in ((kl[-1] * 1.52, 0.5), (kl[-1] * 1.48, 1), (kl[-1] / 1.48, 1), (kl[-1] / 1.52, 2)):
        first, second = rollouts(trolled().reset(regression_target=target, **pull))
        assert first["trust_region/regression"] == kl
        assert first[WEIGHT] == [1.0] * 4 and second[WEIGHT] == [factor] * 4
        assert first[SEEN] == [pytest.approx(kl[-1], rel=1e-6)] and len(second[SEEN]) == 1


def test_loss_takes_adapted_weight() -> None:
    adaptive = trolled().reset(regression_target=1.0, **PROXIMAL)
    adaptive.engine.regression_weight.value = 6.0
    rollouts(adaptive, 1)
    found = adaptive.parameters()
    fixed = trolled().reset(regression_weight=6.0, **PROXIMAL)
    rollouts(fixed, 1)
    assert all(torch.equal(value, found[name]) for name, value in fixed.parameters().items())


def test_weight_stays_after_skipped_update() -> None:
    actor = trolled().reset(regression_target=1e-6)
    scored = actor.score(as_batch(rollout()))
    with actor.final_norm.register_forward_hook(lambda _, __, hidden: hidden * torch.nan):
        metrics = actor.update(scored)
    assert SEEN not in metrics and actor.engine.regression_weight.value == 1.0


def test_weight_stays_where_no_token_counts() -> None:
    actor = trolled().reset(regression_target=1e-6)
    scored = actor.score(as_batch(rollout()))
    scored["response_mask"] = nested(torch.zeros_like(sample.mask) for sample in rollout())
    assert SEEN not in actor.update(scored)
    assert actor.engine.regression_weight.value == 1.0


@pytest.mark.parametrize(("kl", "limit"), [(9.0, 3.0 * 1024), (0.0, 3.0 / 1024)])
def test_target_out_of_reach_takes_weight_to_limit_and_warns_once(
    kl: float, limit: float, caplog: pytest.LogCaptureFixture
) -> None:
    trolled()  # makes this process one of a group
    weight = RegressionWeight(3.0, target=0.03)
    for number in range(1, 41):
        weight.adapt(kl)
        assert len(caplog.messages) == (number > 10)
    assert weight.value == limit
    assert caplog.messages[0].startswith(f"regression_weight stays at {limit:g}, the limit of its range")


def test_restored_weight_is_exactly_that_of_checkpoint(tmp_path: Path) -> None:
    trolled()
    weight, other = RegressionWeight(0.1, target=0.03), RegressionWeight(3.0, target=0.03)
    weight.adapt(9.0)
    weight.save(tmp_path)
    other.load(tmp_path)
    assert other.value == weight.value == 0.2


def test_fixed_weight_is_not_saved_and_not_restored(tmp_path: Path) -> None:
    trolled()
    RegressionWeight(3.0, target=None).save(tmp_path)
    assert not list(tmp_path.iterdir())
    RegressionWeight(3.0, target=0.03).save(tmp_path)
    fixed = RegressionWeight(5.0, target=None)
    fixed.load(tmp_path)
    assert fixed.value == 5.0


def test_checkpoint_without_weight_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trolled()
    weight = RegressionWeight(3.0, target=0.03)
    weight.adapt(9.0)
    with caplog.at_level(logging.WARNING):
        weight.load(tmp_path)
    assert weight.value == 3.0
    assert caplog.messages == [f"{tmp_path} has no {WEIGHT_STATE}: regression_weight starts anew"]


def test_weight_is_part_of_extra_contents(tmp_path: Path) -> None:
    """As the learning rate's schedule is."""
    contents = f"{ACTOR}.checkpoint.load_contents=[model,optimizer]"
    actor = trolled(True, contents, *policy_loss("regression_target=1e-6"))
    actor.engine.regression_weight.value = 4.0
    actor.engine.save_checkpoint(str(tmp_path), global_step=1)
    assert (tmp_path / WEIGHT_STATE).is_file()
    actor.reset().engine.load_checkpoint(str(tmp_path), del_local_after_load=False)
    assert actor.engine.regression_weight.value == 1.0
