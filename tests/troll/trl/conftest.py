"""What every test of the TRL adapter shares: tiny models saved once."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.troll.trl import processes, tiny
from troll.trl import TrollConfig


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


#: What two processes train.
MODELS = ("llama", "gemma2")


@pytest.fixture(scope="session")
def left_by_two(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[dict[str, Any]]]:
    """What either of two processes left for a test file, by back end: `left_by_two("fsdp", "critic")`.

    They are launched once in a session, for whichever of pytest-xdist's processes asks first.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def left(mode: str, name: str, part: str = "updates") -> list[dict[str, Any]]:
        folder = base / f"{mode} {part}"
        results = processes.launch_once(mode, part, folder, {model: model_path(model) for model in MODELS})
        return [{**result[name], "mode": mode, "folder": folder / name} for result in results]

    return left


@pytest.fixture
def make(model_path: Callable[[str], Path], tmp_path: Path) -> tiny.Maker:
    """Builds a trainer: `make(TrollTrainer, "llama", kl_bound=0.1)`."""
    return tiny.Maker(model_path, tmp_path)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., TrollConfig]:
    """Makes a configuration: `config(kl_bound=0.1)`."""
    return partial(tiny.config, tmp_path)
