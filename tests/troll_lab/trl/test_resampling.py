"""Groups with equal rewards sampled again: which are kept, what is made of them, and what the log says."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from tests.tolerance import within
from tests.troll.trl import tiny
from tests.troll.trl.engine import Engine, RolloutFunc, take_the_place_of_vllm
from tests.troll.trl.resuming import interrupted, resumed_exactly
from troll.huggingface.policies import capture
from troll.trl.old_policy import OLD_POLICY
from troll_lab.trl import LabTrainer
from troll_lab.trl.resampling import draw, equal_groups

#: Three groups, of which the middle one lies on both of two processes.
SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 6, "resampling_rounds": 4, "kl_bound": 0.01}
GROUP = tiny.DEFAULTS["num_generations"]
NAN = math.nan


def dataset(size: int = 16) -> Dataset:
    """Problems of which every second is solved always."""
    return tiny.make_dataset(size).add_column("solved", [i % 2 == 0 for i in range(size)])


def reward(completion_ids: Sequence[list[int]], solved: Sequence[bool], log_extra: Any, **_: Any) -> list[float]:
    """1 where the problem is solved always; else `tiny.reward`, which differs. Logs the completion's length."""
    log_extra("length", [len(ids) for ids in completion_ids])
    return [1.0 if always else each for always, each in zip(solved, tiny.reward(list(completion_ids)), strict=True)]


def work(mode: str, make: tiny.Maker, folder: Path) -> dict[str, Any]:
    """A rollout with its metrics, and a run that is resumed."""
    trainer = make(reward_funcs=reward, train_dataset=dataset(), **tiny.halved(SETTINGS))
    rollout = tiny.rolled_out(trainer)
    logs = {name: list(trainer._logs[name]) for name in ("prompt", "advantages")}
    logs |= {"length": list(trainer._logs["extra"]["length"])}
    metrics = dict(trainer._metrics["train"])
    both = {"resampling_rounds": 4, "rollout_delay": 1, "num_generations": 2}
    resumed = interrupted(make, folder / "run", reward_funcs=reward, train_dataset=dataset(), **both)
    return {"rollout": tiny.tensors(rollout), "metrics": metrics, "logs": logs, "interrupted": resumed}


def make_one(make: tiny.Maker, **settings: Any) -> LabTrainer:
    return make(**{"reward_funcs": reward, "train_dataset": dataset(), **SETTINGS, **settings})


def texts(rollout: dict[str, Any], name: str) -> list[str]:
    """Prompts or completions of a rollout, as characters."""
    return ["".join(tiny.VOCABULARY[token] for token in ids) for ids in tiny.unpadded(rollout, name)]


def rewards_of(rollout: dict[str, Any]) -> torch.Tensor:
    """Computed again from the texts of a rollout, (N,)."""
    solved = {row["prompt"]: row["solved"] for row in dataset()}
    flags = [solved[prompt] for prompt in texts(rollout, "prompt")]
    return torch.tensor(reward(tiny.unpadded(rollout), flags, lambda *_: None))


@pytest.mark.parametrize(
    ("group", "equal"),
    [
        ([1.0, 1.0, 1.0], True),
        ([1.0, 1.0, 1.0 + 2**-23], False),
        ([0.0, NAN, 0.0], True),
        ([0.0, NAN, 1.0], False),
        ([NAN, NAN, 1.0], True),
        ([NAN, NAN, NAN], True),
        ([-math.inf, -math.inf, -math.inf], True),
        ([-math.inf, 0.0, 0.0], False),
    ],
)
def test_equal_groups(group, equal):
    assert equal_groups(torch.tensor([0.0, 1.0, 2.0, *group]), 3).tolist() == [False, equal]


def test_no_number_is_drawn_again_before_all_have_been():
    drawn = draw(5, 13, "a")
    assert [sorted(drawn[:5]), sorted(drawn[5:10])] == [list(range(5))] * 2
    assert len(drawn) == 13 and len(set(drawn[10:])) == 3
    assert draw(5, 13, "a") == drawn != draw(5, 13, "b")


@dataclass
class Both:
    """A rollout in which groups were sampled again, and the same one without that, with their trainers."""

    trainer: LabTrainer
    rollout: dict[str, Any]
    plain: LabTrainer
    plain_rollout: dict[str, Any]

    @property
    def metrics(self) -> dict[str, list[float]]:
        return self.trainer._metrics["train"]


@pytest.fixture(scope="module")
def both(model_path: Any, tmp_path_factory: pytest.TempPathFactory) -> Both:
    make = tiny.Maker(model_path, tmp_path_factory.mktemp("both"), LabTrainer)
    trainer, plain = make_one(make), make_one(make, resampling_rounds=0)
    return Both(trainer, tiny.rolled_out(trainer), plain, tiny.rolled_out(plain))


def test_groups_with_equal_rewards_are_replaced(both):
    plain, rollout = both.plain_rollout, both.rollout
    equal = [len(set(rewards)) == 1 for rewards in rewards_of(plain).view(-1, GROUP).tolist()]
    assert any(equal) and not all(equal), "nothing to replace, or to keep"
    for row, was_equal in enumerate(equal):
        own = slice(row * GROUP, (row + 1) * GROUP)
        before, after = ([tiny.unpadded(r, name)[own] for name in ("prompt", "completion")] for r in (plain, rollout))
        assert (before == after) == (not was_equal)
        assert len(set(texts(rollout, "prompt")[own])) == 1
    rewards = rewards_of(rollout).view(-1, GROUP)
    assert (rewards.std(1) > 0).all()
    torch.testing.assert_close(rollout["advantages"], tiny.group_advantages(rewards))
    assert rollout["num_items_in_batch"] == rollout["completion_mask"].sum()
    assert both.metrics["resampling/equal_groups_left"] == [0]


def test_the_old_policy_is_that_of_the_merged_rows(both):
    rollout = both.rollout
    lengths = rollout["completion_mask"].sum(1)
    assert len(lengths.unique()) > 1 and len(rollout["prompt_mask"].sum(1).unique()) > 1
    rows = zip(rollout[OLD_POLICY], tiny.unpadded(rollout, "prompt"), tiny.unpadded(rollout), strict=True)
    for row, (policy, prompt, completion) in enumerate(rows):
        ids = torch.tensor([prompt + completion])
        labels = torch.tensor([[-100] * len(prompt) + completion])
        fresh = capture(both.trainer.model, ids, labels)[:, len(prompt) - 1 :]
        captured = policy.unpack()[: len(completion)]
        assert torch.equal(captured.token_ids[:, :4], fresh.token_ids[0, :, :4])
        for ours, theirs in (
            (captured.log_prob, fresh.log_prob[0]),
            (rollout["old_per_token_logps"][row, : len(completion)], fresh.log_prob[0]),
            (captured.tail_log_prob, fresh.tail_log_prob[0]),
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=within(tiny.LOG_PROB_ERROR))


def test_what_cannot_be_replaced_stays(make):
    """Every problem is solved: two rounds find nothing, and the rollout is that of no rounds."""
    always = {"train_dataset": dataset().remove_columns("solved").add_column("solved", [True] * 16)}
    plain = tiny.rolled_out(make_one(make, resampling_rounds=0, **always))
    trainer = make_one(make, resampling_rounds=2, **always)
    rollout = tiny.rolled_out(trainer)
    for name in ("prompt_ids", "completion_ids", "advantages", "old_per_token_logps"):
        assert torch.equal(rollout[name], plain[name]), name
    metrics = trainer._metrics["train"]
    names = ("rounds", "equal_groups", "equal_groups_left")
    assert [metrics[f"resampling/{name}"] for name in names] == [[2], [1.0], [1.0]]


def test_the_log_is_of_the_first_round_and_counts_all_tokens(both):
    expected, metrics = both.plain._metrics["train"], both.metrics
    added = {f"resampling/{name}" for name in ("rounds", "equal_groups", "equal_groups_left")}
    assert metrics.keys() == expected.keys() | added
    for name in expected.keys() - {"num_tokens"}:
        assert metrics[name] == expected[name], name
    assert {"reward", "rewards/reward/mean", "completions/mean_length"} <= expected.keys()
    assert 0 < expected["frac_reward_zero_std"][0] == metrics["resampling/equal_groups"][0] < 1
    assert metrics["resampling/rounds"][0] >= 1
    assert metrics["num_tokens"][0] > 1.5 * expected["num_tokens"][0]


def test_the_table_of_completions_is_of_the_rollout(both):
    rollout, logs = both.rollout, both.trainer._logs
    assert list(logs["prompt"]) == texts(rollout, "prompt")
    assert list(logs["rewards"]["reward"]) == rewards_of(rollout).tolist()
    assert list(logs["advantages"]) == rollout["advantages"].tolist()
    assert list(logs["extra"]["length"]) == rollout["completion_mask"].sum(1).tolist()


def test_other_estimators_see_the_rewards_of_the_rollout(make):
    rollout = tiny.rolled_out(make_one(make, advantage_estimator="rloo"))
    rewards = rewards_of(rollout).view(-1, GROUP)
    others = (rewards.sum(1, keepdim=True) - rewards) / (GROUP - 1)
    torch.testing.assert_close(rollout["advantages"], (rewards - others).flatten())


def test_without_equal_rewards_nothing_changes(make):
    """Not one bit of weights, metrics and random numbers."""
    results = []
    for rounds in (0, 3):
        trainer = make(kl_bound=0.01, resampling_rounds=rounds)
        torch.manual_seed(0)
        trainer.train()
        assert tiny.logged(trainer, "resampling/rounds") == ([0.0, 0.0] if rounds else [])
        left_out = ("resampling/", "step_time", "train_")
        log = [{x: y for x, y in entry.items() if not x.startswith(left_out)} for entry in trainer.state.log_history]
        results.append((log, trainer.model.state_dict(), torch.get_rng_state()))
    (log, *state), (our_log, *our_state) = results
    assert our_log == log
    torch.testing.assert_close(our_state, state, rtol=0, atol=0)


def test_rollouts_of_one_run_draw_different_prompts(make):
    trainer = make_one(make)
    first, again = (texts(tiny.rolled_out(trainer), "prompt") for _ in range(2))
    trainer.state.global_step += 2
    assert first == again != texts(tiny.rolled_out(trainer), "prompt")


def test_vllm_generates_the_rounds(make, monkeypatch):
    take_the_place_of_vllm(monkeypatch, Engine())
    trainer = make_one(make, use_vllm=True, vllm_mode="colocate")
    rollout = tiny.rolled_out(trainer)
    assert trainer._metrics["train"]["resampling/rounds"][0] >= 1
    mask = rollout["completion_mask"].bool()
    sampled, scored = rollout["sampling_per_token_logps"][mask], rollout["old_per_token_logps"][mask]
    torch.testing.assert_close(sampled, scored, rtol=0, atol=within(1e-4))  # the engine has the trainer's own weights


def test_two_processes_resume_exactly(left_by_two):
    """With rollouts of older weights too."""
    for result in left_by_two("ddp", "resampling"):
        log = resumed_exactly(result["interrupted"])
        assert max(entry.get("resampling/rounds", 0) for entry in log) > 0
        assert max(entry.get("sampling/rollouts_behind", 0) for entry in log) == 1


def test_two_processes_share_groups(left_by_two):
    """A group that lies on both processes is replaced as a whole, and both draw the same prompts."""
    ours = left_by_two("ddp", "resampling")
    rewards = torch.cat([rewards_of(result["rollout"]) for result in ours]).view(-1, GROUP)
    prompts = [prompt for result in ours for prompt in texts(result["rollout"], "prompt")]
    assert [len(set(prompts[start : start + GROUP])) for start in range(0, 3 * GROUP, GROUP)] == [1, 1, 1]
    assert (rewards.std(1) > 0).all()
    advantages = torch.cat([result["rollout"]["advantages"] for result in ours])
    torch.testing.assert_close(advantages, tiny.group_advantages(rewards))
    for result in ours:
        metrics, logs = result["metrics"], result["logs"]
        assert metrics["resampling/rounds"][0] >= 1
        assert metrics["resampling/equal_groups"][0] > 0 == metrics["resampling/equal_groups_left"][0]
        assert logs["prompt"] == prompts
        assert logs["length"] == [n for each in ours for n in each["rollout"]["completion_mask"].sum(1).tolist()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rollout_func": RolloutFunc(Engine())}, "cannot be used with a rollout function: set resampling_rounds"),
        ({"train_dataset": IterableDataset.from_generator(lambda: iter(dataset()))}, "by their number, got .*Iterable"),
        ({"train_dataset": dataset().add_column("image", [None] * 16)}, "text only, .* a column 'image': remove it"),
    ],
)
def test_what_it_cannot_merge_is_refused(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(resampling_rounds=1, **{"train_dataset": dataset(), **arguments})
