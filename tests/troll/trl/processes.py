"""Two processes with gloo on the CPU, as `accelerate launch` starts them with the configurations that are shipped."""

import fcntl
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.utils.distributed import get_free_port

from troll_lab.recipes.accelerate import CONFIGURATIONS

ROOT = Path(__file__).parents[3]

#: Those that tests call by another name.
NAMES = {"fsdp": "fsdp2"}

#: The CPU has no bf16 that would be worth comparing with; `no` is a float32.
ON_CPU = ["--num_processes", "2", "--mixed_precision", "no", "--dynamo_backend", "no"]


def environment(mode: str) -> dict[str, str]:
    """That of the launcher. DeepSpeed, unlike accelerate's other back ends, calls a CPU a device if it is told to."""
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if mode == "zero3":
        own |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | own


def command(mode: str, *options: str) -> list[str]:
    """`accelerate launch` of two processes; what is to be launched follows."""
    configuration = ["--config_file", str(CONFIGURATIONS[NAMES.get(mode, mode)])]
    return [sys.executable, "-m", "accelerate.commands.launch", *configuration, *ON_CPU, *options]


def run(mode: str, module: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs `-m module arguments` in two processes, to its end."""
    for _ in range(2):  # somebody else may have taken the port
        port = ["--main_process_port", str(get_free_port())]
        done = subprocess.run(
            [*command(mode, *port), "-m", module, *arguments],
            cwd=ROOT,
            env=environment(mode),
            capture_output=True,
            text=True,
            timeout=1200,
        )
        if done.returncode == 0 or "EADDRINUSE" not in done.stderr:
            break
    return done


def launch_once(mode: str, part: str, folder: Path, models: dict[str, Path]) -> list[dict[str, Any]]:
    """Runs a part of `tests.troll.trl.worker`, and loads what either process left; from a second call on, only that.

    The test is skipped where DeepSpeed is needed and not installed.
    """
    if mode == "zero3" and not importlib.util.find_spec("deepspeed"):
        pytest.skip("DeepSpeed is not installed")
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "done").exists():
            return loaded(folder)
        arguments = [mode, part, str(folder), *(f"{name}={path}" for name, path in models.items())]
        results = launch("tests.troll.trl.worker", mode, arguments, folder)
        (folder / "done").touch()
        return results


def launch(worker: str, mode: str, arguments: list[str], folder: Path) -> list[dict[str, Any]]:
    """Runs `-m worker arguments` in two processes, and loads `folder/RANK.pt`, what either left."""
    done = run(mode, worker, arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return loaded(folder)


def loaded(folder: Path) -> list[dict[str, Any]]:
    """`RANK.pt` of both processes."""
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]
