"""Rewards that speak of tokens: from what they say to the advantages, the gradient and the log."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.troll.trl import tiny
from tests.troll.trl.test_ungraded import SETTINGS as UNGRADED
from tests.troll.trl.test_ungraded import Sometimes, stuck
from troll_lab.trl.token_rewards import Judged, all_worths, places_of_token_rewards, token_worths

NAN = math.nan


class Odd:
    """1 for every completion of at least two tokens, else 0; of the former, odd tokens are worth nothing."""

    __name__ = "odd"

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(len(ids) > 1) for ids in completion_ids]

    def of_tokens(self, completion_ids: list[list[int]], rewards: list[float], **columns: Any) -> Any:
        self.asked.append({"completion_ids": completion_ids, "rewards": rewards, **columns})
        return [said(ids) for ids in completion_ids]


def said(ids: list[int]) -> list[float] | None:
    """What it says of a completion."""
    return [float(token % 2 == 0) for token in ids] if len(ids) > 1 else None


def work(mode: str, make: tiny.Maker, folder: Path) -> dict[str, Any]:
    """A rollout of three groups, of which the middle one lies on both processes."""
    settings: dict[str, Any] = {"per_device_train_batch_size": 3, "ddp_backend": "gloo", "resampling_rounds": 1}
    settings |= {"advantage_estimator": "rloo_tokens", "max_completion_length": 32}
    trainer = make(reward_funcs=Odd(), **settings)
    rollout = tiny.rolled_out(trainer)
    return {"rollout": tiny.tensors(rollout), "metrics": dict(trainer._metrics["train"])}


def advantages_of(worths: torch.Tensor, size: int = 4) -> torch.Tensor:
    """Leave-one-out, position by position."""
    groups = worths.view(-1, size, worths.shape[1])
    return ((groups - groups.mean(1, keepdim=True)) * size / (size - 1)).view_as(worths)


def test_what_is_said_replaces_a_reward_to_the_end():
    rewards = torch.tensor([[1.0, 2.0], [1.0, NAN], [NAN, NAN], [3.0, 4.0]])
    told = {(0, 0): torch.tensor([0.5, -1.0]), (0, 1): torch.tensor([0.0, 0.0, 0.0])}
    worths = all_worths(rewards, torch.tensor([1.0, 10.0]), told, 3)
    expected = torch.tensor([[20.5, 19, 21], [0, 0, 0], [NAN] * 3, [43] * 3])
    torch.testing.assert_close(worths, expected, equal_nan=True)


def test_only_what_was_judged_is_asked_about():
    odd = Odd()
    judged = Judged([{"prompt": "p", "answer": i} for i in range(3)], list("abc"), [[4, 5], [6], [7, 8, 9]])
    rewards = torch.tensor([[1.0], [NAN], [1.0]])
    told = token_worths([odd], [0], rewards, judged, "a tokenizer")
    assert {key: worths.tolist() for key, worths in told.items()} == {(0, 0): [1, 0], (0, 2): [0, 1, 0]}
    assert odd.asked == [
        {
            "completion_ids": [[4, 5], [7, 8, 9]],
            "completions": ["a", "c"],
            "prompts": ["p", "p"],
            "answer": [0, 2],
            "rewards": [1.0, 1.0],
            "tokenizer": "a tokenizer",
        }
    ]
    assert token_worths([odd], [0], rewards.fill_(NAN), judged, None) == {} and len(odd.asked) == 1


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([[1.0, 2.0]], "1 for 2 completions$"),
        ([[1.0, 2.0], [1.0]], "2 for 2 completions, 1 for 2 tokens$"),
    ],
)
def test_another_number_of_completions_or_tokens_is_refused(returned, message):
    class Wrong(Odd):
        def of_tokens(self, *_: Any, **__: Any) -> Any:
            return returned

    judged = Judged([{}, {}], ["a", "b"], [[4, 5], [6, 7]])
    with pytest.raises(ValueError, match=f"of_tokens of reward 'odd' must return None or a number .*, got {message}"):
        token_worths([Wrong()], [0], torch.ones(2, 1), judged, None)


def test_a_reward_of_weight_zero_is_not_asked():
    assert places_of_token_rewards([Odd(), tiny.reward, Odd()], torch.tensor([0.0, 1.0, 2.0])) == [2]


def expected_worths(ids: list[list[int]], width: int, *more: float) -> torch.Tensor:
    """Those of `Odd`, and of a reward that speaks of whole completions, in float64."""
    worths = torch.empty((len(ids), width), dtype=torch.float64)
    for row, own in enumerate(ids):
        reward = float(len(own) > 1)
        worths[row] = reward
        worths[row, : len(own)] = torch.tensor(said(own) or [reward] * len(own))
    return worths + (torch.tensor(more, dtype=torch.float64).unsqueeze(1) if more else 0)


def test_advantages_of_completions_of_different_lengths(make):
    odd = Odd()
    trainer = make(reward_funcs=[odd, tiny.reward], advantage_estimator="rloo_tokens")
    rollout = tiny.rolled_out(trainer)
    ids, mask = tiny.unpadded(rollout), rollout["completion_mask"]
    assert len({len(each) for each in ids}) > 1 and len(odd.asked) == 1
    expected = advantages_of(expected_worths(ids, mask.shape[1], *tiny.reward(ids))) * mask
    torch.testing.assert_close(rollout["advantages"].double(), expected, rtol=1e-4, atol=1e-5)
    means = (expected.sum(1) / mask.sum(1)).tolist()
    assert list(trainer._logs["advantages"]) == pytest.approx(means, abs=1e-5)


def test_groups_with_different_tokens_are_not_equal(make):
    trainer = make(reward_funcs=Odd(), advantage_estimator="rloo_tokens", train_dataset=tiny.make_dataset(32))
    rollout = tiny.rolled_out(trainer)
    metrics = trainer._metrics["train"]
    silent = (rollout["advantages"] == 0).view(-1, 4, rollout["advantages"].shape[1]).flatten(1).all(1)
    assert metrics["token_rewards/equal_groups"] == [float(silent.float().mean())]
    assert metrics["token_rewards/equal_groups"][0] < metrics["frac_reward_zero_std"][0]


def test_without_a_reward_that_speaks_it_is_rloo(make):
    tokens, whole = (tiny.rolled_out(make(advantage_estimator=name)) for name in ("rloo_tokens", "rloo"))
    expected = whole["advantages"].unsqueeze(1) * whole["completion_mask"]
    torch.testing.assert_close(tokens["advantages"], expected)


def test_what_could_not_be_judged_is_in_no_baseline(make):
    odd = Odd()
    trainer = make(**{**UNGRADED, "reward_funcs": [Sometimes(), odd], "advantage_estimator": "rloo_tokens"})
    with pytest.warns(UserWarning, match="could not be judged"):
        rollout = tiny.rolled_out(trainer)
    rows = torch.tensor([stuck(text) for text in trainer._logs["completion"]])
    assert rows.any() and not rows.all()
    ids = tiny.unpadded(rollout)
    assert odd.asked[0]["completion_ids"] == [own for own, out in zip(ids, rows.tolist(), strict=True) if not out]
    assert not rollout["advantages"][rows].any() and rollout["advantages"].isfinite().all()


def test_two_processes_share_groups_and_positions(left_by_two):
    ours = left_by_two("ddp", "token rewards")
    masks = [result["rollout"]["completion_mask"] for result in ours]
    assert masks[0].shape[1] != masks[1].shape[1]
    ids = [own for result in ours for own in tiny.unpadded(result["rollout"])]
    expected = advantages_of(expected_worths(ids, max(mask.shape[1] for mask in masks)))
    for result, own, mask in zip(ours, expected.chunk(2), masks, strict=True):
        found = result["rollout"]["advantages"]
        torch.testing.assert_close(found.double(), own[:, : mask.shape[1]] * mask, rtol=0, atol=1e-6)
    assert ours[0]["metrics"]["token_rewards/equal_groups"] == ours[1]["metrics"]["token_rewards/equal_groups"]


def test_other_estimators_refuse_rewards_that_speak(make):
    funcs = {"reward_funcs": [tiny.reward, Odd()], "advantage_estimator": "group"}
    with pytest.raises(ValueError, match=r"'odd' has of_tokens, .* 'group' cannot use: .* rloo_tokens, which needs"):
        make(**funcs)
    make(**funcs, reward_weights=[1.0, 0.0])


def test_columns_with_the_names_of_what_is_passed_are_refused(make):
    rows = tiny.make_dataset().add_column("rewards", [0] * 16)
    with pytest.raises(ValueError, match="cannot have a column named 'rewards'"):
        make(reward_funcs=Odd(), advantage_estimator="rloo_tokens", train_dataset=rows)
