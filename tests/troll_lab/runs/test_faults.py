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
    ("place", "line"),
    [
        pytest.param("update 4", "resuming from checkpoint-2 (step 2 of 4)", marks=pytest.mark.slow),
        (
            "checkpoint-4/optimizer.pt",
            "resuming from checkpoint-2 (step 2 of 4); checkpoint-4 is incomplete and is ignored: the run ended while "
            "it was written",
        ),
    ],
)
def test_a_killed_run_goes_on_from_its_last_complete_checkpoint(short_run, tmp_path, place, line):
    printed = tmp_path / "printed"
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert in_new_process(command, [*short_run, "--output_dir", str(whole)], "", printed) == 0, printed.read_text()
    assert in_new_process(command, short_run, place, printed) == -9
    assert not (folder / "summary.json").exists()
    printed.unlink()

    assert in_new_process(command, [*short_run, "--resume_from_checkpoint"], "", printed) == 0, printed.read_text()
    assert line in printed.read_text().splitlines()
    ours, expected = (load_file(each / "model" / "model.safetensors") for each in (folder, whole))
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name
    assert logged(folder) == logged(whole)
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


def test_a_run_that_died_in_its_first_checkpoint(short_run, tmp_path):
    printed = tmp_path / "printed"
    assert in_new_process(command, short_run, "checkpoint-2/trainer_state.json", printed) == -9
    printed.unlink()
    assert in_new_process(command, [*short_run, "--resume_from_checkpoint"], "", printed) == 2
    says = "resume_from_checkpoint: there is no complete checkpoint in output_dir "
    (line,) = [line for line in printed.read_text().splitlines() if says in line]
    assert line.endswith("checkpoint-2 is incomplete and is ignored: the run ended while it was written")

    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    assert in_new_process(command, [*short_run, "--resume_from_checkpoint", checkpoint], "", printed) == 2
    assert "checkpoint-2 is an incomplete checkpoint: the run ended while it was written; there is no complete one" in (
        printed.read_text()
    )
