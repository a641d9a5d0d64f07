"""What every test of the TRL adapter shares: no network, tiny models saved once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest

from tests.trl import tiny


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of a tiny model by architecture. It is saved, since TRL loads its reference model by name."""
    paths: dict[str, Path] = {}

    def path(architecture: str) -> Path:
        if architecture not in paths:
            paths[architecture] = tmp_path_factory.mktemp("models") / architecture
            tiny.make_model(architecture).save_pretrained(paths[architecture])
        return paths[architecture]

    return path


@pytest.fixture
def make(model_path: Callable[[str], Path], tmp_path: Path) -> tiny.Maker:
    """Builds a trainer: ``make(TrollTrainer, "llama", kl_bound=0.1)``."""
    return tiny.Maker(model_path, tmp_path)
