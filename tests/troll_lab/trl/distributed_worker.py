"""What either of two processes does for test_distributed; see `tests.troll.trl.worker`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.troll.trl import tiny
from tests.troll.trl.distributed_worker import CASES, ByPath, SameRollouts, said, train
from troll.grading import Grader, Verdict
from troll_lab.trl import LabTrainer

PPO: dict[str, Any] = {"advantage_estimator": "gae", "critic_kwargs": {"learning_rate": 1e-2, "gae_lambda": 0.9}}
#: With another estimator, a case of the base's own.
BASE = ("REINFORCE++",)
LAB_CASES = {"PPO": PPO} | {name: CASES[name] for name in BASE}


class LabRollouts(SameRollouts, LabTrainer):
    """The laboratory's trainer with the same completions for the same prompts, in however many processes."""


class NumberIsAnswer(Grader):
    """The answer is the problem's number, and right from 5 on."""

    votes = True

    def grade(self, completions: Sequence[str], **columns: Any) -> list[Verdict]:
        return [Verdict(float(number >= 5), str(number), "") for number in columns["number"]]


#: Problems and, of each process, completions in a batch: some left over, or none for a process.
EVALUATIONS = [(7, 4), (1, 2), (9, 2)]


def evaluate(make: tiny.Maker, problems: int, batch: int) -> dict[str, float]:
    """The metrics of an evaluation."""
    trainer = make(
        LabRollouts,
        reward_funcs=NumberIsAnswer(),
        eval_dataset=tiny.make_dataset(problems).add_column("number", list(range(problems))),
        num_generations_eval=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=batch,
        ddp_backend="gloo",
    )
    trainer.evaluate()
    return dict(trainer.state.log_history[-1])


def work(mode: str, make: tiny.Maker, folder: Path) -> dict[str, Any]:
    """The critic, and with DDP everything else."""
    if mode != "ddp":
        return {"critic": said(ValueError, ByPath(**vars(make)), LabRollouts, ddp_backend="gloo", **PPO)}
    results: dict[str, Any] = {name: train(make, name, 2, kind=LabRollouts, cases=LAB_CASES) for name in LAB_CASES}
    results["base"] = {name: train(make, name, 2) for name in BASE}
    return results | {"evaluations": [evaluate(make, *sizes) for sizes in EVALUATIONS]}
