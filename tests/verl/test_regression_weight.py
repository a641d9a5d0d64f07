"""α, the weight of the pull, where it adapts: what it goes by, and what a checkpoint keeps of it."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verl.actor import ACTOR, Actor, as_batch, nested, policy_loss, rollout, trolled
from troll.verl.regression_weight import WEIGHT_STATE, RegressionWeight

WEIGHT, SEEN = "trust_region/regression_weight", "trust_region/regression_kl"

PROXIMAL: dict[str, Any] = {"pull": "proximal", "kl_bound": float("inf")}


def rollouts(actor: Actor, number: int = 2) -> list[dict[str, Any]]:
    return [dict(actor.update(actor.score(as_batch(rollout(seed=seed))))) for seed in range(1, 1 + number)]


@pytest.mark.parametrize("pull", [PROXIMAL, {}], ids=["proximal", "projection"])
def test_weight_adapts_to_last_update_of_rollout(pull: dict[str, Any]) -> None:
    """Once a rollout, by the mean KL of all tokens of its last update."""
    fixed = rollouts(trolled().reset(**pull), 1)[0]
    assert WEIGHT not in fixed and SEEN not in fixed
    kl = fixed["trust_region/regression"]
    assert kl[0] < kl[-1]
    for target, factor in ((kl[-1] * 1.52, 0.5), (kl[-1] * 1.48, 1), (kl[-1] / 1.48, 1), (kl[-1] / 1.52, 2)):
        first, second = rollouts(trolled().reset(regression_target=target, **pull))
        assert first["trust_region/regression"] == kl
        assert first[WEIGHT] == [1.0] * 3 and second[WEIGHT] == [factor] * 3
        assert first[SEEN] == [pytest.approx(kl[-1], rel=1e-6)] and len(second[SEEN]) == 1


def test_loss_takes_adapted_weight() -> None:
    adaptive = trolled().reset(regression_target=1.0, **PROXIMAL)
    adaptive.engine.regression_weight.value = 6.0
    rollouts(adaptive, 1)
    found = adaptive.parameters()
    fixed = trolled().reset(regression_weight=6.0, **PROXIMAL)
    rollouts(fixed, 1)
    assert all(torch.equal(value, found[name]) for name, value in fixed.parameters().items())


@pytest.mark.parametrize("reason", ["skipped", "no token counts"])
def test_weight_stays_after_update_that_says_nothing(reason: str) -> None:
    actor = trolled().reset(regression_target=1e-6)
    scored = actor.score(as_batch(rollout()))
    hook: AbstractContextManager[Any] = nullcontext()
    if reason == "skipped":
        hook = actor.final_norm.register_forward_hook(lambda _, __, hidden: hidden * torch.nan)
    else:
        scored["response_mask"] = nested(torch.zeros_like(sample.mask) for sample in rollout())
    with hook:
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


def test_only_adaptive_weight_is_saved_and_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trolled()
    adaptive, fixed = RegressionWeight(0.1, target=0.03), RegressionWeight(5.0, target=None)
    adaptive.adapt(9.0)
    fixed.save(tmp_path)
    assert not list(tmp_path.iterdir())
    other = RegressionWeight(3.0, target=0.03)
    other.adapt(9.0)
    other.load(tmp_path)
    assert other.value == 3.0
    assert caplog.messages == [f"{tmp_path} has no {WEIGHT_STATE}: regression_weight starts anew"]
    adaptive.save(tmp_path)
    for weight, wanted in ((other, 0.2), (fixed, 5.0)):
        weight.load(tmp_path)
        assert weight.value == wanted


def test_weight_is_part_of_extra_contents(tmp_path: Path) -> None:
    """As the learning rate's schedule is."""
    contents = f"{ACTOR}.checkpoint.load_contents=[model,optimizer]"
    actor = trolled(True, contents, *policy_loss("regression_target=1e-6"))
    actor.engine.regression_weight.value = 4.0
    actor.engine.save_checkpoint(str(tmp_path), global_step=1)
    assert (tmp_path / WEIGHT_STATE).is_file()
    actor.reset().engine.load_checkpoint(str(tmp_path), del_local_after_load=False)
    assert actor.engine.regression_weight.value == 1.0
