"""Two processes with gloo on the CPU: the gradients and metrics of one process on the same global batch."""

import math
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tolerance import within
from tests.troll.trl.distributed_worker import CASES, HEADS, KL_BOUND, OTHERS, SHARDED, train
from tests.troll.trl.processes import run
from tests.troll.trl.resuming import resumed_exactly
from tests.troll.trl.sharding import through_heads
from tests.troll.trl.tiny import LOG_PROB_ERROR, MEAN_ERROR, assert_same_gradients


@pytest.fixture(scope="module")
def two_processes(left_by_two: Any) -> list[dict[str, Any]]:
    """What either process returned."""
    return left_by_two("ddp", "distributed")


@pytest.fixture(scope="module", params=["fsdp", pytest.param("zero3", marks=pytest.mark.slow)])
def two_shards(request: pytest.FixtureRequest, left_by_two: Any) -> list[dict[str, Any]]:
    """What either process returned, each of which holds half of every weight."""
    return left_by_two(request.param, "distributed")


def assert_same_updates(results: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """Gradients of one process in both, and old policies that the first update did not touch."""
    first, second = results
    assert len(one["gradients"]) == len(first["gradients"]) == len(one["log"]) >= 2
    for ours, others, expected in zip(first["gradients"], second["gradients"], one["gradients"], strict=True):
        assert_same_gradients(others, ours, 0)
        # As far off as the log-probabilities of either policy.
        assert_same_gradients(ours, expected, 2 * LOG_PROB_ERROR)
    for result in results:
        assert result["old policies survive"] and all(result["old policies survive"])


def compared(entry: dict[str, Any]) -> set[str]:
    """The metrics of all processes, without the diagnostics: a process probes some tokens of its own."""
    names = {name for name in entry if name.startswith(("trust_region/", "critic/"))}
    return {name for name in names if not name.startswith("trust_region/diagnostics/")}


def assert_same_metrics(results: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """Those of all processes in both."""
    projects = "trust_region/kl_bound" in one["log"][0]
    assert (max(entry["trust_region/projected_fraction"] for entry in one["log"]) > 0) == projects
    for first, second, expected in zip(*(result["log"] for result in results), one["log"], strict=True):
        names = compared(expected)
        assert compared(first) == compared(second) == names
        # With torch 2.8, each process logs the norm of its own shards.
        norm = math.hypot(*{first["grad_norm"], second["grad_norm"]})
        for ours in ({**first, "grad_norm": norm}, {**second, "grad_norm": norm}):
            for name in [*names, "entropy", "loss", "grad_norm", "learning_rate"]:
                # A loss is a mean of terms of about 1 that cancel; where a multiplier is near 0, its error is not.
                error = MEAN_ERROR / math.sqrt(2 * KL_BOUND) if name.endswith("multiplier") else MEAN_ERROR
                assert ours[name] == pytest.approx(expected[name], rel=1e-4, abs=error), name


def assert_exact_resume(resumed: dict[str, Any]) -> None:
    """Weights and metrics, bit by bit."""
    assert max(entry["trust_region/projected_fraction"] for entry in resumed_exactly(resumed)) > 0


def assert_same_run(results: list[dict[str, Any]], one: dict[str, Any]) -> None:
    assert_same_updates(results, one)
    assert_same_metrics(results, one)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_make_the_update_of_one(make, two_processes, case):
    results, one = [result[case] for result in two_processes], train(make, case, processes=1)
    assert_same_run(results, one)
    names = [name for name in one["log"][0] if name.startswith("trust_region/") and "diagnostics" not in name]
    # Without a bound under a penalty; with what is wanted, and the rate, under a KL target.
    assert len(names) == 10 + ("trust_region/kl_bound" in names) + 4 * ("trust_region/kl_target/rate" in names)


@pytest.mark.parametrize("name", SHARDED)
def test_two_shards_make_the_update_of_one(make, two_shards, name):
    case, model = SHARDED[name]
    results, one = [result[name] for result in two_shards], train(make, case, 1, model)
    assert all(result["shards"] for result in results)
    assert_same_run(results, one)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_a_shard_is_gathered(two_shards, name):
    for result in two_shards:
        assert_same_gradients(result[f"{name} LM head"], through_heads(name), 1e-6)


def test_sharded_mixed_precision_rounds_no_log_probabilities(two_shards):
    """accelerate's own policy for FSDP2 rounds all outputs of a model to bf16."""
    for result in two_shards:
        assert result["mixed precision"]["dtype"] == torch.float32
        first, second = result["mixed precision"]["log"]
        assert first["trust_region/kl_before_max"] < within(1e-6)
        assert second["trust_region/kl_before_max"] > 0.01
        assert second["trust_region/kl_after_max"] == pytest.approx(0.01, rel=1e-3)


def test_two_processes_resume_exactly(two_processes):
    for result in two_processes:
        assert_exact_resume(result["interrupted"]["whole"])
        resumed_exactly(result["interrupted"]["after an epoch"])


def test_two_shards_resume_exactly_and_are_saved_as_one_model(two_shards):
    """As `from_pretrained` loads it, in any number of processes."""
    for result in two_shards:
        assert_exact_resume(result["interrupted"]["whole"])
        saved = AutoModelForCausalLM.from_pretrained(result["folder"] / "whole" / "model", dtype=torch.float32)
        expected = result["interrupted"]["whole"]["resumed"]["weights"]
        assert_same_gradients(dict(saved.named_parameters()), expected, 0)
        assert not any("save_model" in warning for warning in result["interrupted"]["whole"]["warnings"])


def test_every_process_refuses_a_small_data_set_and_one_warns(two_processes):
    for rank, result in enumerate(two_processes):
        found = result["silences"]
        assert found["few"].startswith("a rollout takes 2 prompts") and "has 1 to train on" in found["few"]
        assert sum("TROLL has no effect" in line for line in found["idle"]) == (rank == 0)
        assert sum("kl_bound was 0.05 and is 0.001" in line for line in found["resumed"]) == (rank == 0)


def test_nan_in_one_process_stops_both(two_processes):
    first, second = (result["error"] for result in two_processes)
    assert first == second
    assert first.startswith("step 2: the logits of ")


# What is slow: other losses, adapters, shards in checkpoints, and a whole run from the command line


@pytest.fixture(scope="module", params=["ddp", "fsdp", "zero3"])
def the_rest(request: pytest.FixtureRequest, left_by_two: Any) -> list[dict[str, Any]]:
    """What either process returned."""
    return left_by_two(request.param, "distributed", "the rest")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_in_two_processes_are_those_of_one(make, the_rest, name):
    case, model = OTHERS[name]
    assert_same_run([result[name] for result in the_rest], train(make, case, 1, model))


@pytest.mark.slow
def test_adapters_and_shards_resume_exactly_and_are_saved(the_rest, request):
    """Adapters are saved whole; with FSDP a run that saves only shards warns, and with ZeRO-3 transformers does."""
    fsdp = request.node.callspec.params["the_rest"] == "fsdp"
    for result in the_rest:
        for runs in result["interrupted"].values():
            assert_exact_resume(runs)
    runs = the_rest[0]["interrupted"]
    for what in runs:
        assert any("save_model" in warning for warning in runs[what]["warnings"]) == (fsdp and what == "shards")
    expected = runs["LoRA"]["resumed"]["weights"]
    saved = load_file(the_rest[0]["folder"] / "LoRA" / "model" / "adapter_model.safetensors")
    assert_same_gradients(saved, {name.replace(".default", ""): weight for name, weight in expected.items()}, 0)


RUN = "troll_lab.cli train quickstart --max_steps 4 --save_steps 2 --logging_steps 2 --eval_strategy no --use_cpu true"
RUN += " --per_device_train_batch_size 8 --steps_per_generation 2 --ddp_backend gloo --output_dir"


@pytest.mark.slow
def test_troll_train_resumes_exactly_in_new_processes(tmp_path):
    if Version(transformers.__version__) < Version("5.18"):
        pytest.skip("before transformers 5.18, Trainer loads to cpu:0 where several processes resume on a CPU")
    module, *arguments = RUN.split()
    resume = ["--resume_from_checkpoint", str(tmp_path / "whole" / "checkpoint-2")]
    for name, more in (("whole", []), ("resumed", resume)):
        done = run("ddp", module, [*arguments, str(tmp_path / name), *more])
        assert done.returncode == 0, done.stdout + done.stderr
    whole, resumed = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "resumed"))
    assert_same_gradients(resumed, whole, 0)
