"""The laboratory's trainer in TRL: `TrollTrainer` with what changes a rollout or adds a network."""

from troll_lab.trl.config import LabConfig
from troll_lab.trl.trainer import LabTrainer

__all__ = ["LabConfig", "LabTrainer"]
