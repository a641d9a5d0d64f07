"""What every estimator of advantages keeps to, in either trainer: called by the tests of both."""

from typing import Any

import pytest
import torch

from tests.troll.trl import tiny
from troll.trl.estimators import ESTIMATORS


def trains(make: Any, estimator: str) -> None:
    trainer = make(advantage_estimator=estimator, eval_dataset=tiny.make_dataset(4))
    before = tiny.parameters(trainer.model)
    trainer.train()
    trainer.evaluate()
    assert all(torch.isfinite(torch.tensor(tiny.logged(trainer, "loss"))))
    assert tiny.changed(before, trainer.model)


def one_completion_is_enough_without_groups(make: Any, estimator: str) -> None:
    """In batches of odd sizes, too."""
    sizes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 3, "steps_per_generation": 3}
    settings = {"advantage_estimator": estimator, "num_generations": 1, "max_steps": 2, **sizes}
    if ESTIMATORS[estimator].needs_group:
        with pytest.raises(ValueError, match="at least 2 generations"):
            make(**settings)
        return
    trainer = make(**settings)
    trainer.train()
    assert trainer.args.num_generations == 1
    assert len(tiny.logged(trainer, "loss")) == 2
