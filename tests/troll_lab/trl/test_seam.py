"""The seam of the laboratory's trainer: what is said of a TRL that does not fit."""

import inspect

from trl import GRPOTrainer
from trl.trainer import utils

from troll.trl.seam.needed import lacking
from troll_lab.trl import LabTrainer, seam


def test_what_trl_lacks_is_named(monkeypatch):
    assert list(lacking(seam.NEEDED, seam.FUNCTIONS)) == []
    monkeypatch.delattr(GRPOTrainer, "_generate")
    monkeypatch.setattr(GRPOTrainer, "_save_checkpoint", lambda self, model: None)
    monkeypatch.delattr(utils, "nanstd")
    save, generate, function = lacking(seam.NEEDED, seam.FUNCTIONS)
    assert generate == "GRPOTrainer._generate (further rounds of generation, and further conversations) is missing"
    assert save.endswith("has no parameter trial")
    assert function == "trl.trainer.utils.nanstd is missing"


def test_all_overridden_private_methods_of_trl_are_checked():
    own = {name for name, value in vars(LabTrainer).items() if inspect.isfunction(value) and name.startswith("_")}
    by_the_base = {"_compute_loss", "_get_per_token_logps_and_entropies"}
    needed = {method.name for method in seam.NEEDED} | {"__init__"} | by_the_base
    assert {name for name in own if hasattr(GRPOTrainer, name)} <= needed
