"""Two processes with gloo on the CPU, as ``accelerate launch`` starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]

#: `--multi_gpu` is how `accelerate` says "without MPI".
LAUNCH = {
    "ddp": ["--multi_gpu"],
    "fsdp": ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"],
}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch(worker: str, mode: str, arguments: list[str], folder: Path) -> list[dict[str, Any]]:
    """Runs ``-m worker arguments`` in two processes, and loads ``folder/RANK.pt``, what either left."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", *LAUNCH[mode]]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for _ in range(2):  # somebody else may have taken the port
        port = ["--main_process_port", str(free_port()), "-m", worker]
        done = subprocess.run(
            command + port + arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
        )
        if done.returncode == 0 or "EADDRINUSE" not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]
