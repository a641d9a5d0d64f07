"""Completions that could not be judged, with a critic, with resampling and in evaluations."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.troll.trl import tiny
from tests.troll.trl.test_ungraded import (
    SETTINGS,
    Never,
    Sometimes,
    assert_moves_where_judged,
    assert_only_judged_moves_the_model,
    expected_advantages,
    form,
    make_one,
    shy,
    stuck,
    success,
)
from troll.grading import Verdict
from troll.trl.ungraded import NothingJudgedError, UngradedFilter
from troll_lab.trl.eval_metrics import judged_by

pytestmark = pytest.mark.filterwarnings("ignore:.*(could not be judged|is on-policy)")


def ended(trainer: Any) -> str:
    """With what a run ends in which nothing can be judged; two of three times for lack of memory."""
    grader, accelerator = Sometimes(), trainer.accelerator
    unscored = UngradedFilter(accelerator, [grader], torch.ones(1))
    reasons = ["no process"] if accelerator.process_index == 0 else ["no memory"] * 2
    grader.latest = [Verdict(None, "program", f"unscored: {reason}") for reason in reasons]
    batch = {"completion_mask": torch.ones(2, 2), "num_items_in_batch": torch.tensor(8.0)}
    for _ in range(2):  # training may go on in the same process, and ends again
        with pytest.raises(NothingJudgedError) as error:
            for _ in range(3):
                unscored.count_verdicts()
                unscored.observe(torch.full((4, 1), torch.nan))
                unscored.without(batch, trainer.of_rows)
    return str(error.value)


def work(mode: str, make: tiny.Maker, folder: Path) -> dict[str, Any]:
    """A rollout and an evaluation in which some completions cannot be judged, and runs in which none can."""
    evaluation = {"eval_dataset": tiny.make_dataset(4), "do_eval": True, "num_generations_eval": 4}
    trainer = make(reward_funcs=[Sometimes(), form], **tiny.halved(SETTINGS), **evaluation)
    rollout = tiny.rolled_out(trainer)
    logs = {name: list(trainer._logs[name]) for name in ("completion", "advantages")}
    metrics = dict(trainer._metrics["train"])
    evaluated = trainer.evaluate()
    left_nothing = []
    for tokens in (trainer.accelerator.process_index, 0):  # of another process, and of none
        trainer.ungraded.count({"completion_mask": torch.tensor([tokens])})
        left_nothing.append(trainer.ungraded.left_nothing())
    return {
        "rollout": tiny.tensors(rollout),
        "metrics": metrics,
        "logs": logs,
        "evaluated": {name: value for name, value in evaluated.items() if isinstance(value, float)},
        "left_nothing": left_nothing,
        "ended": ended(trainer),
        "answers": [verdict.answer for verdict in trainer.eval_metrics._verdicts],
    }


def test_only_what_was_judged_moves_the_model_of_a_critic(make):
    assert_only_judged_moves_the_model(make, advantage_estimator="gae")


def test_an_update_of_nothing_judged_moves_nothing(make):
    moved = [True, True, False, False, True, True]
    assert_moves_where_judged(make, [True, False, True], moved, advantage_estimator="gae")


def test_resampling_counts_the_first_round_and_what_was_judged(make):
    trainer = make_one(make, resampling_rounds=2)
    rollout = tiny.rolled_out(trainer)
    rows = torch.tensor([stuck(text) for text in trainer._logs["completion"]])
    assert rows.any() and not (rollout["completion_mask"] * rollout["tool_mask"])[rows].any()
    assert (rollout["advantages"][rows] == 0).all()
    (share,) = trainer._metrics["train"]["rewards/unscored"]
    assert 0 < share < 1


def test_another_task_is_judged_by_its_own_functions(make):
    held_out = {"eval_dataset": tiny.make_dataset(4), "do_eval": True, "num_generations_eval": 4}
    trainer = make_one(make, reward_funcs=[form, Sometimes()], eval_strategy="steps", eval_steps=2, **held_out)
    with judged_by(trainer, [shy], None):
        assert "eval_rewards/unscored" not in trainer.evaluate()
    with judged_by(trainer, [Never()], None):
        assert trainer.evaluate()["eval_rewards/unscored"] == 1.0
    assert 0 < trainer.evaluate()["eval_rewards/unscored"] < 1


def test_two_processes_agree_on_what_is_left_out(left_by_two):
    found = left_by_two("ddp", "unscored")
    completions = found[0]["logs"]["completion"]
    rows = torch.tensor([stuck(text) for text in completions])
    assert rows.any() and not rows.all()
    mask = torch.cat([(one["rollout"]["completion_mask"] * one["rollout"]["tool_mask"]).any(1) for one in found])
    assert mask.tolist() == (~rows).tolist()
    advantages = torch.cat([one["rollout"]["advantages"] for one in found])
    torch.testing.assert_close(advantages, expected_advantages(completions), rtol=1e-4, atol=1e-4)
    tokens = sum((one["rollout"]["completion_mask"] * one["rollout"]["tool_mask"]).sum() for one in found)
    for one in found:
        assert float(one["rollout"]["num_items_in_batch"]) == float(tokens)
        assert one["metrics"]["rewards/unscored"] == [pytest.approx(float(rows.float().mean()))]
        kept = [text for text in one["answers"] if not stuck(text)]
        assert one["evaluated"]["eval_rewards/unscored"] == pytest.approx(1 - len(kept) / len(one["answers"]))
        assert one["evaluated"]["eval_rewards/success/mean"] == pytest.approx(sum(map(success, kept)) / len(kept))
    assert [one["left_nothing"] for one in found] == [[False, True]] * 2
    for one in found:
        assert "3 rollouts in a row, most often because of: no memory" in one["ended"]
    names = [name for name in found[0]["evaluated"] if "success" in name or "pass@" in name or "unscored" in name]
    assert len(names) >= 4 and len({tuple(one["evaluated"][name] for name in names) for one in found}) == 1
