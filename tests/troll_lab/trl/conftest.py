"""What every test of the laboratory's trainer shares: the tiny models of the TRL adapter's tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.troll.trl import tiny
from tests.troll.trl.conftest import left_by_two, model_path  # noqa: F401 (fixtures)
from troll_lab.trl import LabTrainer


@pytest.fixture
def make(model_path: Callable[[str], Path], tmp_path: Path) -> tiny.Maker:  # noqa: F811
    """Builds a trainer: `make(rollout_delay=1)`."""
    return tiny.Maker(model_path, tmp_path, LabTrainer)
