"""`troll train`, killed and started again with --resume_from_checkpoint."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.dying import dying, in_new_process
from tests.troll_lab.runs.conftest import logged, trainer_with
from troll_lab import cli
from troll_lab.runs import build


def command(overrides: list[str], place: str, output: Path) -> None:
    """`troll train quickstart`, dying at a place, with all that it prints in a file."""
    torch.set_num_threads(1)
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    callbacks, context = dying(place)
    build._trainer = trainer_with(*callbacks)
    with context:
        code = cli.main(["train", "quickstart", *overrides])
    raise SystemExit(code)


@pytest.mark.parametrize(
    ("place", "ignored"),
    [
        pytest.param("update 4", "", marks=pytest.mark.slow),
        ("checkpoint-4/optimizer.pt", "; checkpoint-4 is incomplete and is ignored: the run ended while it was "),
    ],
)
def test_killed_train_goes_on_from_its_last_checkpoint(short_run, tmp_path, whole, place, ignored):
    printed, folder, (_, unbroken, _) = tmp_path / "printed", tmp_path / "run", whole
    assert in_new_process(command, short_run, place, printed) == -9
    assert not (folder / "summary.json").exists()
    printed.unlink()

    assert in_new_process(command, [*short_run, "--resume_from_checkpoint"], "", printed) == 0, printed.read_text()
    assert f"resuming from checkpoint-2 (step 2 of 4){ignored}" in printed.read_text()
    ours, expected = (load_file(each / "model" / "model.safetensors") for each in (folder, unbroken))
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name
    assert logged(folder) == logged(unbroken)
    assert (folder / "answers.jsonl").read_text() == (unbroken / "answers.jsonl").read_text()
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
