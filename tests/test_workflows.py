"""The workflows run the Makefile's own targets."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_are_targets(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    for step in steps(workflow):
        command = step.get("run", "")
        if not command or command.startswith("sudo "):  # what prepares the machine
            continue
        assert command.startswith("make "), command
        words = re.sub(r'"[^"]*"', "", command.partition(">")[0]).split()[1:]
        assert words and all(word in targets or "=" in word or "matrix" in command for word in words), command


def test_a_matrix_of_targets_names_targets() -> None:
    weekly = yaml.safe_load((ROOT / ".github" / "workflows" / "weekly.yml").read_text())
    for target in weekly["jobs"]["versions"]["strategy"]["matrix"]["target"]:
        assert re.search(rf"^{target}:", MAKEFILE, re.M)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_unless_a_job_says_otherwise(workflow: Path) -> None:
    content = yaml.safe_load(workflow.read_text())
    assert content["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in content["jobs"].values())
