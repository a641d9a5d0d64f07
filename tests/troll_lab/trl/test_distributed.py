"""The laboratory's trainer in two processes with gloo on the CPU."""

import pytest
import torch

from tests.troll.trl.distributed_worker import train
from tests.troll.trl.test_distributed import assert_same_metrics, assert_same_updates
from tests.troll_lab.trl.distributed_worker import BASE, EVALUATIONS, LAB_CASES, LabRollouts
from tests.troll_lab.trl.test_trainer import TIMES


@pytest.fixture(scope="module")
def two_processes(left_by_two):
    """What either process returned."""
    return left_by_two("ddp", "laboratory")


def test_two_processes_make_the_update_of_one(make, two_processes):
    one = train(make, "PPO", 1, kind=LabRollouts, cases=LAB_CASES)
    results = [result["PPO"] for result in two_processes]
    assert_same_updates(results, one)
    assert_same_metrics(results, one)
    assert any(name.startswith("critic/") for name in one["log"][0])


@pytest.mark.parametrize("case", BASE)
def test_lab_trainer_in_two_processes_is_troll_trainer(two_processes, case):
    for result in two_processes:
        lab, base = result[case], result["base"][case]
        torch.testing.assert_close(lab["gradients"], base["gradients"], rtol=0, atol=0)
        logs = [[{k: v for k, v in entry.items() if k not in TIMES} for entry in run["log"]] for run in (lab, base)]
        assert logs[0] == logs[1]


@pytest.mark.parametrize("mode", ["fsdp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_critics_train_with_fsdp_and_not_with_deepspeed(left_by_two, mode):
    for result in left_by_two(mode, "laboratory"):
        expected = "a critic cannot be trained with DEEPSPEED" if mode == "zero3" else "done"
        assert result["critic"].startswith(expected)


@pytest.mark.parametrize("index", range(len(EVALUATIONS)))
def test_an_evaluation_counts_every_problem_once(two_processes, index):
    problems, _ = EVALUATIONS[index]
    expected = max(0, problems - 5) / problems
    for result in two_processes:
        metrics = result["evaluations"][index]
        for name in ("pass@1", "pass@2", "mean@2", "maj@2", "rewards/success/mean"):
            assert metrics[f"eval_{name}"] == pytest.approx(expected), name
