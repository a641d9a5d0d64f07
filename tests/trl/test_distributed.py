"""Two processes with gloo on the CPU: the gradients and metrics of one process on the same global batch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trl.distributed_worker import CASES, train
from tests.trl.tiny import assert_same_gradients

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs the worker in two processes; `--multi_gpu` is how `accelerate` says "without MPI"."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", str(free_port()), "-m", "tests.trl.distributed_worker", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def two_processes(model_path: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What either process returned."""
    folder = tmp_path_factory.mktemp("distributed")
    for _ in range(2):  # somebody else may have taken the port
        done = launch([str(model_path("llama")), str(folder)])
        if done.returncode == 0 or "EADDRINUSE" not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_make_the_update_of_one(make, two_processes, case):
    first, second = (result[case] for result in two_processes)
    one = train(make, case, processes=1)
    assert len(one["gradients"]) == len(first["gradients"]) == 2
    for ours, others, expected in zip(first["gradients"], second["gradients"], one["gradients"], strict=True):
        assert_same_gradients(others, ours, 0)
        assert_same_gradients(ours, expected, 1e-5)


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_those_of_all_processes(make, two_processes, case):
    one = train(make, case, processes=1)
    names = [name for name in one["log"][0] if name.startswith("trust_region/")]
    assert len(names) == 10
    assert max(entry["trust_region/projected_fraction"] for entry in one["log"]) > 0
    for result in two_processes:
        for ours, expected in zip(result[case]["log"], one["log"], strict=True):
            for name in [*names, "entropy", "loss"]:
                assert ours[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_nan_in_one_process_stops_both(two_processes):
    first, second = (result["error"] for result in two_processes)
    assert first == second
    assert first.startswith("step 2: the logits of ")
