"""Rollouts of an older policy: what sampled them, what the old policy is, and how a run goes on."""

import copy
from typing import Any

import pytest
import torch

from tests.tolerance import within
from tests.troll.trl import tiny
from tests.troll.trl.engine import Engine, RolloutFunc
from tests.troll.trl.resuming import interrupted, resumed_exactly
from tests.troll.trl.tiny import move, rolled_out, same_policies
from troll.trl import seam
from troll.trl.old_policy import OLD_POLICY

SAMPLED = ("prompt_ids", "completion_ids", "completion_mask", "advantages")


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], *, policies: bool) -> None:
    """The same completions, bit by bit; and where asked for, the same old policies, or else others."""
    for name in SAMPLED:
        assert torch.equal(ours[name], theirs[name]), name
    assert torch.equal(ours["old_per_token_logps"], theirs["old_per_token_logps"]) == policies
    assert same_policies(ours[OLD_POLICY], theirs[OLD_POLICY]) == [policies] * len(ours[OLD_POLICY])


@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_a_rollout_is_sampled_with_weights_of_two_rollouts_ago(make, anchor):
    plain, trainer = make(), make(anchor=anchor, rollout_delay=2)
    weights: list[Any] = []
    for rollout in range(5):
        now = copy.deepcopy(trainer.model.state_dict())
        weights.append(now)
        ours = rolled_out(trainer, seed=rollout)
        assert all(torch.equal(weight, now[name]) for name, weight in trainer.model.state_dict().items())
        plain.model.load_state_dict(weights[max(0, rollout - 2)])
        assert_same(ours, rolled_out(plain, seed=rollout), policies=anchor == "rollout" or rollout == 0)
        if anchor == "old":  # what the network now says of these completions
            plain.model.load_state_dict(now)
            with torch.no_grad():
                scores = seam.score(plain, plain.model, ours)
            scored = ours["completion_mask"].bool()
            found, expected = ours["old_per_token_logps"][scored], scores.log_probs[scored]
            torch.testing.assert_close(found, expected, rtol=0, atol=within(tiny.LOG_PROB_ERROR))
        move(trainer.model, 0.05, seed=rollout)
    assert trainer._metrics["train"]["sampling/rollouts_behind"] == [0, 1, 2, 2, 2]


def test_the_clip_takes_its_ratio_to_the_older_policy(make):
    """A surrogate that reads no distributions."""
    plain, trainer = make(surrogate="clip"), make(surrogate="clip", anchor="rollout", rollout_delay=1)
    rolled_out(trainer)
    move(trainer.model, 0.05)
    ours, theirs = rolled_out(trainer), rolled_out(plain)
    assert torch.equal(ours["old_per_token_logps"], theirs["old_per_token_logps"])
    assert torch.equal(ours["completion_ids"], theirs["completion_ids"])


def test_the_weights_come_back_after_an_error(make, monkeypatch):
    trainer = make(rollout_delay=1)
    rolled_out(trainer)
    move(trainer.model, 0.05)
    before = copy.deepcopy(trainer.model.state_dict())
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rolled_out(trainer)
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())
    assert "_generate" not in vars(trainer)


@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_it_goes_with_resampling(make, anchor):
    """All rounds are sampled with the older weights, which score them too where they are the anchor."""
    settings: dict[str, Any] = {"reward_funcs": lambda completion_ids, **_: [1.0] * len(completion_ids)}
    plain = make(resampling_rounds=1, **settings)
    trainer = make(resampling_rounds=1, rollout_delay=1, anchor=anchor, **settings)
    seen: list[torch.Tensor] = []
    head = trainer.model.get_output_embeddings().weight
    trainer.model.register_forward_pre_hook(lambda *_: seen.append(head.detach().clone()))
    rolled_out(trainer)
    older = head.detach().clone()
    move(trainer.model, 0.05)
    seen.clear()
    assert_same(rolled_out(trainer), rolled_out(plain), policies=anchor == "rollout")
    generated = [torch.equal(weight, older) for weight in seen]
    assert generated == sorted(generated, reverse=True) and sum(generated) > trainer.max_completion_length
    assert generated[-1] == (anchor == "rollout"), "scoring is not part of generation"


def test_a_resumed_run_goes_on_exactly(make, tmp_path):
    runs = interrupted(make, tmp_path, rollout_delay=1, anchor="rollout", ddp_backend=None)
    assert resumed_exactly(runs)[0]["sampling/rollouts_behind"] == 1
    settings: dict[str, Any] = {"max_steps": 6, "output_dir": str(tmp_path), "anchor": "rollout"}
    with pytest.raises(ValueError, match="a run with rollout_delay=1, and this one has 3: resume with the same value"):
        make(rollout_delay=3, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_rollout_function_is_refused(make):
    with pytest.raises(ValueError, match=r"transformers.* generation: leave it out, or leave out the rollout"):
        make(rollout_delay=1, rollout_func=RolloutFunc(Engine()))
