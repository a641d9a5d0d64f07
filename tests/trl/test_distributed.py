"""Two processes with gloo on the CPU: the gradients and metrics of one process on the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trl.distributed_worker import CASES, EVALUATIONS, SHARDED, gradients_through, train
from tests.trl.processes import launch
from tests.trl.tiny import assert_same_gradients


def trained(mode: str, models: dict[str, Path], folder: Path) -> list[dict[str, Any]]:
    """What either process returned."""
    arguments = [mode, str(folder), *(f"{name}={path}" for name, path in models.items())]
    return launch("tests.trl.distributed_worker", mode, arguments, folder)


@pytest.fixture(scope="module")
def two_processes(model_path: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What either process returned."""
    return trained("ddp", {"llama": model_path("llama")}, tmp_path_factory.mktemp("distributed"))


@pytest.fixture(scope="module")
def two_shards(model_path: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What either process returned, each of which holds half of every weight."""
    models = {name: model_path(name) for name in ("llama", "gemma2")}
    return trained("fsdp", models, tmp_path_factory.mktemp("sharded"))


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


@pytest.mark.parametrize("index", range(len(EVALUATIONS)))
def test_an_evaluation_counts_every_problem_once(two_processes, index):
    problems, _ = EVALUATIONS[index]
    expected = max(0, problems - 5) / problems
    for result in two_processes:
        metrics = result["evaluations"][index]
        for name in ("pass@1", "pass@2", "mean@2", "maj@2", "rewards/success/mean"):
            assert metrics[f"eval_{name}"] == pytest.approx(expected), name


def test_nan_in_one_process_stops_both(two_processes):
    first, second = (result["error"] for result in two_processes)
    assert first == second
    assert first.startswith("step 2: the logits of ")
