"""The seam of the laboratory's trainer: what is said of a TRL that does not fit."""

import inspect
from types import SimpleNamespace
from typing import Any

from trl import GRPOTrainer

from troll_lab.trl import LabTrainer, seam


def trainer_like(**changes: Any) -> type:
    """A class with `GRPOTrainer`'s methods, of which some are changed or, if None, left out."""
    methods = {str(method.name): getattr(GRPOTrainer, str(method.name)) for method in seam.NEEDED}
    return type("OtherTrainer", (), {name: value for name, value in (methods | changes).items() if value is not None})


def test_differences_names_what_trl_lacks():
    assert list(seam.differences(trainer_like())) == []
    (phrase,) = seam.differences(trainer_like(_generate=None))
    assert phrase == "OtherTrainer._generate (further rounds of generation, and further conversations) is missing"
    (phrase,) = seam.differences(trainer_like(_save_checkpoint=lambda self, model: None))
    assert phrase.endswith("has no parameter trial")
    functions = SimpleNamespace(get_callable_name=print)
    assert list(seam.differences(functions=functions)) == ["trl.trainer.utils.nanstd is missing"]


def test_all_private_methods_of_trl_that_the_trainer_overrides_are_checked():
    own = {name for name, value in vars(LabTrainer).items() if inspect.isfunction(value) and name.startswith("_")}
    needed = {method.name for method in seam.NEEDED} | {"__init__", "_compute_loss"}  # the last by the base's seam
    assert {name for name in own if hasattr(GRPOTrainer, name)} <= needed
