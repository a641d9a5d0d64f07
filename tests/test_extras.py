"""A package that is not installed is named together with the extra that brings it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("troll.trl", ["trl"], "trl"),
        ("troll.trl", ["trl", "transformers", "accelerate", "datasets", "peft"], "trl"),
        ("troll.huggingface", ["transformers", "accelerate", "peft"], "trl"),
        ("troll.tasks", ["datasets"], "tasks"),
        ("troll.episodic.environments", ["gymnasium", "mujoco"], "episodic"),
    ],
)
def test_what_is_missing_is_told(module: str, missing: list[str], extra: str) -> None:
    program = f"import sys; sys.modules |= dict.fromkeys({missing}); import {module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {module} needs ")
    assert last.endswith(f'pip install "troll-rl[{extra}]"')
