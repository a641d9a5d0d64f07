"""The examples that stand on their own run to their end, and do what they say."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from troll_lab.tasks import TaskConfig, load_task

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_own_loop_keeps_every_update_within_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    numbers = [re.findall(r"[-+]?\d+\.?\d*", line) for line in lines]
    losses = [float(found[1]) for found in numbers]
    largest_kl = [float(found[3]) for found in numbers]
    assert losses[-1] < losses[0]
    assert largest_kl[0] == 0  # equal policies
    assert max(largest_kl) == pytest.approx(0.02, abs=1e-4)  # some tokens were projected, none lies outside


@pytest.mark.parametrize("name", ["own_loop", "distil"])
def test_page_shows_the_example(name: str) -> None:
    page = (EXAMPLES.parent / "docs" / "own-loop.md").read_text("utf-8")
    assert f"```python\n{(EXAMPLES / f'{name}.py').read_text('utf-8')}```" in page


def test_loop_learns_within_the_bound() -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, str(EXAMPLES / "loop.py"), "--rollouts", "14"]
    _, *lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 14
    numbers = [[float(number.rstrip("%")) for number in line.split()[:8]] for line in lines]
    rewards, _, measured, wanted, _, largest_kl, rates = list(zip(*numbers, strict=True))[1:]
    assert sum(rewards[-4:]) > 1.5 * sum(rewards[:4])  # five seeds gave 1.8 to 2.8
    assert max(largest_kl) == pytest.approx(0.05, abs=1e-4)  # some tokens were projected, none lies outside
    assert wanted == pytest.approx([0.1 * (3 / 7) ** 0.5] * len(lines), abs=1e-4)
    assert min(measured) > 0
    assert len(set(rates)) > 1


def test_distil_brings_the_student_to_the_teacher(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "distil.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    seen, whole = zip(*(map(float, re.findall(r"\d+\.\d+", line)) for line in lines), strict=True)
    assert seen[-1] < 0.01 * seen[0]
    # What the outcomes show never exceeds the divergence over the vocabulary.
    assert all(part < full for part, full in zip(seen, whole, strict=True))
    assert whole[-1] < 0.2 * whole[0]


def test_gaussian_policy_trains_by_both_methods() -> None:
    pytest.importorskip("gymnasium")
    command = [sys.executable, str(EXAMPLES / "gaussian_policy.py"), "--seeds", "1", "--iterations", "1"]
    command += ["--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    runs = re.findall(r"^ *(clip|trust region)  rate \S+  seed 0  returns .* at most (\d+\.\d+)$", done.stdout, re.M)
    assert [method for method, _ in runs] == 2 * ["clip", "trust region"]
    # Both bounds, and what the pull leaves of the mean's.
    assert 0 < float(runs[1][1]) < 2 * 0.055


def test_counting_pays_for_numbers_before_the_first_mistake() -> None:
    task = load_task(TaskConfig(f"{EXAMPLES / 'tasks' / 'counting.py'}:4"), for_training=True)
    row = task.train_dataset[0]
    last = int(row["prompt"].split()[-1])
    right = [str(last + number) for number in range(1, 5)]
    answers = [" ".join(right), " ".join([*right, "and so on"]), " ".join([*right[:2], "7", right[3]]), "", "Well"]
    success, share = task.reward_funcs
    given: dict[str, Any] = {"prompts": [""] * 5, "completions": answers, "answer": [row["answer"]] * 5}
    assert success(**given) == [1, 1, 0, 0, 0] and share(**given) == [1, 1, 0.5, 0, 0]
    assert not {*task.train_dataset["prompt"]} & {*task.eval_dataset["prompt"]}
