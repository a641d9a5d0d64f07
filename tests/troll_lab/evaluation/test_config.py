from collections.abc import Callable
from pathlib import Path

import pytest

from troll_lab.evaluation.config import EvaluationConfig, EvaluationError, slug
from troll_lab.tasks import TaskConfig


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"samples": 0}, "samples must be an integer, at least 1, got 0"),
        ({"ks": [1, 4]}, "k must be between 1 and samples=3, got 4"),
        ({"ks": [0]}, "k must be between 1 and samples=3, got 0"),
        ({"temperature": 0.0}, "temperature 0 gives the same completion 3 times: use samples=1"),
        ({"samples": 1, "top_p": 0.9}, "top_p and top_k have no effect"),
        ({"samples": 1, "top_k": 5}, "top_p and top_k have no effect"),
        ({"temperature": -0.5}, "temperature must be finite and at least 0"),
        ({"temperature": float("nan")}, "temperature must be finite and at least 0"),
        ({"temperature": float("inf")}, "temperature must be finite and at least 0, got inf"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
        ({"top_k": -1}, "top_k must be an integer, at least 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer, at least 1"),
        ({"batch_size": 0}, "batch_size must be an integer, at least 1"),
        ({"backend": "jax"}, "backend must be one of auto, vllm, transformers, got 'jax'"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ({"tasks": []}, "no task"),
        ({"tasks": [TaskConfig(task="gsm8k"), TaskConfig(task="gsm8k")]}, "task gsm8k is named 2 times"),
    ],
)
def test_evaluation_config_refuses(settings, changed, message):
    with pytest.raises(EvaluationError, match=message):
        settings(**changed)


def test_evaluation_config_has_defaults(settings: Callable[..., EvaluationConfig]) -> None:
    assert settings(samples=1).resolved_temperature == 0
    assert settings(samples=2).resolved_temperature == 1
    assert settings(samples=1, temperature=0.5).resolved_temperature == 0.5
    assert isinstance(settings(samples=2, temperature=1).resolved_temperature, float)
    assert settings().resolved_ks == [1, 3]
    assert settings(ks=[3, 2, 2]).resolved_ks == [2, 3]
    assert settings(model="org/name", output_dir=None).folder == Path("runs/eval-org-name")
    assert settings(model="./runs/demo/", output_dir=None).folder == Path("runs/eval-runs-demo")
    assert [slug("reasoning_gym:chain_sum"), slug("my/tasks.yaml")] == ["reasoning_gym-chain_sum", "my-tasks.yaml"]
