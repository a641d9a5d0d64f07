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

from tests.trl.distributed_worker import CASES, SHARDED, gradients_through, train
from tests.trl.tiny import assert_same_gradients

ROOT = Path(__file__).parents[2]

#: `--multi_gpu` is how `accelerate` says "without MPI".
LAUNCH = {
    "ddp": ["--multi_gpu"],
    "fsdp": ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"],
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch(mode: str, models: dict[str, Path], folder: Path) -> list[dict[str, Any]]:
    """Runs the worker in two processes, and loads what either returned."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", *LAUNCH[mode]]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    arguments = [mode, str(folder), *(f"{name}={path}" for name, path in models.items())]
    for _ in range(2):  # somebody else may have taken the port
        port = ["--main_process_port", str(free_port()), "-m", "tests.trl.distributed_worker"]
        done = subprocess.run(
            command + port + arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
        )
        if done.returncode == 0 or "EADDRINUSE" not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def two_processes(model_path: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What either process returned."""
    return launch("ddp", {"llama": model_path("llama")}, tmp_path_factory.mktemp("distributed"))


@pytest.fixture(scope="module")
def two_shards(model_path: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What either process returned, each of which holds half of every weight."""
    models = {name: model_path(name) for name in ("llama", "gemma2")}
    return launch("fsdp", models, tmp_path_factory.mktemp("sharded"))


@pytest.mark.parametrize("case", CASES)
def test_two_processes_make_the_update_of_one(make, two_processes, case):
    first, second = (result[case] for result in two_processes)
    one = train(make, case, processes=1)
    assert len(one["gradients"]) == len(first["gradients"]) == 2
    for ours, others, expected in zip(first["gradients"], second["gradients"], one["gradients"], strict=True):
        assert_same_gradients(others, ours, 0)
        assert_same_gradients(ours, expected, 1e-5)


@pytest.mark.parametrize("name", SHARDED)
def test_two_shards_make_the_update_of_one(make, two_shards, name):
    case, model = SHARDED[name]
    first, second = (result[name] for result in two_shards)
    one = train(make, case, 1, model)
    assert len(one["gradients"]) == len(first["gradients"]) == 2
    for ours, others, expected in zip(first["gradients"], second["gradients"], one["gradients"], strict=True):
        assert_same_gradients(others, ours, 0)
        assert_same_gradients(ours, expected, 1e-5)
    assert max(entry["trust_region/projected_fraction"] for entry in first["log"]) > 0


@pytest.mark.parametrize("model", ["plain", "biased"])
def test_a_head_that_is_a_shard_is_gathered(two_shards, model):
    for result in two_shards:
        assert_same_gradients(result[model], gradients_through(model, sharded=False), 1e-6)


def test_sharded_mixed_precision_does_not_round_log_probabilities(two_shards):
    """accelerate's own policy for FSDP2 rounds all outputs of a model to bf16."""
    for result in two_shards:
        assert result["mixed precision"]["dtype"] == torch.float32
        first, second = result["mixed precision"]["log"]
        assert first["trust_region/kl_before_max"] < 1e-6
        assert second["trust_region/kl_before_max"] > 0.01
        assert second["trust_region/kl_after_max"] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_those_of_all_processes(make, two_processes, case):
    one = train(make, case, processes=1)
    names = [name for name in one["log"][0] if name.startswith("trust_region/")]
    assert len(names) == (10 if case == "gspo" else 12)  # whose tail is floored, and has no mass to log
    names += [name for name in one["log"][0] if name.startswith("critic/")]
    assert any(name.startswith("critic/") for name in names) == (case == "PPO")
    assert max(entry["trust_region/projected_fraction"] for entry in one["log"]) > 0
    for result in two_processes:
        for ours, expected in zip(result[case]["log"], one["log"], strict=True):
            for name in [*names, "entropy", "loss"]:
                assert ours[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_nan_in_one_process_stops_both(two_processes):
    first, second = (result["error"] for result in two_processes)
    assert first == second
    assert first.startswith("step 2: the logits of ")
