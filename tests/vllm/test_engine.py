"""A real vLLM on a CPU: colocated, it samples from the weights as they are, and its log-probabilities train.

Slow: an engine compiles for a minute. `make test-vllm` runs these in an environment with vLLM.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from tests.tolerance import within
from tests.troll.trl import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
]

#: vLLM's attention on a CPU has kernels for heads of 32 and more.
SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 32}

#: What rounding may do to a log-probability, as `tiny.LOG_PROB_ERROR`, for this shape.
FLOAT32_ERROR = 2 * tiny.LOG_PROB_ERROR

#: In bf16, whose numbers are so much farther apart. The errors within a sum mostly cancel.
BF16_ERROR = FLOAT32_ERROR / math.sqrt(64) * torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps


def run_module(*arguments: str) -> None:
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]


def save(folder: Path, **changes: Any) -> Path:
    """A model and its tokenizer."""
    tiny.make_model("llama", **SHAPE, **changes).save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs jobs of `tests.vllm.worker`, each in a process of its own."""

    def of_job(
        dtype: str = "float32", *, tied: bool = False, lora: bool = False, more_tokens: int = 0, **settings: Any
    ) -> dict[str, Any]:
        model = save(tmp_path / "model", tie_word_embeddings=tied)
        job = {"model": str(model), "dtype": dtype, "lora": lora, "more_tokens": more_tokens, "settings": settings}
        job_path, result_path = tmp_path / "job.json", tmp_path / "result.json"
        job_path.write_text(json.dumps(job))
        run_module("tests.vllm.worker", str(job_path), str(result_path))
        return json.loads(result_path.read_text())

    return of_job


def values(result: dict[str, Any], name: str) -> list[float]:
    return [entry[name] for entry in result["history"] if name in entry]


@pytest.mark.parametrize(
    ("dtype", "error", "tied"), [("float32", FLOAT32_ERROR, False), ("bfloat16", BF16_ERROR, True)]
)
def test_engine_samples_from_the_weights_of_the_last_hand_over(run, dtype, error, tied):
    result = run(dtype, tied=tied, anchor="rollout", support_top_k=24)
    assert result["dtype"] == f"torch.{dtype}"
    assert result["after"] <= within(error)
    # The weights moved far, so that an engine that goes on with others is seen.
    assert min(result["before"], result["start"]) > 2 * error
    # K above vLLM's own cap of 20: at least 24 of 48 tokens.
    assert min(values(result, "trust_region/support_size")) > 20
    assert max(values(result, "trust_region/kl_after_max")) <= 0.05 * (1 + within(1e-3))
    assert all(math.isfinite(loss) for loss in values(result, "loss"))
    # The first update of each of two rollouts; the second rollout comes after an update.
    at_first = values(result, "trust_region/kl_before_mean")[::2]
    assert len(at_first) == 2
    # Of near equal policies the KL divergence is at most half of the square of the largest difference of log-probs.
    assert max(at_first) <= max(within(error**2 / 2), 1e-6)


@pytest.mark.parametrize("anchor", ["old", "rollout"])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}, {"top_k": 5}], ids=["whole", "top_p", "top_k"])
def test_first_update_sees_the_sampler_in_the_old_policy(run, anchor, truncation):
    """By either anchor, and on the kept set: the ratio to what sampled is 1 up to rounding."""
    result = run(anchor=anchor, support_top_k=48, **truncation)
    assert result["after"] <= within(FLOAT32_ERROR)
    largest = max(within(FLOAT32_ERROR**2 / 2), 1e-6)
    assert max(values(result, "trust_region/kl_before_mean")[::2]) <= largest
    if anchor == "old":
        # TRL's own: the engine's log-probabilities of its tokens against the trainer's.
        assert max(values(result, "sampling/sampling_logp_difference/max")) <= within(FLOAT32_ERROR)
        assert abs(values(result, "sampling/importance_sampling_ratio/mean")[0] - 1) <= within(FLOAT32_ERROR)
        assert max(values(result, "sampling/mismatch_kl_max")) <= largest
        assert not truncation or max(values(result, "sampling/added_fraction")) == 0


def test_adapters_reach_the_engine(run):
    result = run(lora=True, anchor="rollout", support_top_k=24)
    assert result["after"] <= within(FLOAT32_ERROR)
    assert min(result["before"], result["start"]) > 2 * FLOAT32_ERROR


def test_another_vocabulary_is_refused_before_training(run):
    with pytest.raises(AssertionError, match=r"vLLM has read a model of 48 tokens from .*, and the trained one has 64"):
        run(more_tokens=16)


def generations(folder: Path, model: Path, backend: str) -> list[dict[str, Any]]:
    command = ["troll_lab.cli", "eval", str(model), "--task", "reasoning_gym:chain_sum", "--backend", backend]
    command += ["--eval_size", "8", "--max_new_tokens", "6", "--dtype", "float32"]
    run_module(*command, "--output_dir", str(folder / backend))
    (path,) = (folder / backend / "generations").iterdir()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("adapter", [False, True], ids=["model", "adapter"])
def test_engine_gives_the_completions_of_transformers(tmp_path, adapter):
    """`troll eval`, greedy, in float32, where the likeliest tokens of a random model are far apart."""
    model = save(tmp_path / "model", max_position_embeddings=256)
    if adapter:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        config = LoraConfig(r=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        model = tmp_path / "adapter"
        tiny.adapted(base, config, scale=0.2).save_pretrained(model)
        tiny.make_tokenizer().save_pretrained(model)
    ours, theirs = (generations(tmp_path, model, backend) for backend in ("vllm", "transformers"))
    assert len(ours) == 8 and ours == theirs
