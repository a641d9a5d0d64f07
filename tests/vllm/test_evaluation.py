"""`troll eval` with a real vLLM on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.trl import tiny
from tests.vllm.test_colocated import SHAPE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
]


def generations(folder: Path, model: Path, backend: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "troll.cli", "eval", str(model), "--task", "reasoning_gym:chain_sum"]
    command += ["--eval_size", "8", "--max_new_tokens", "6", "--dtype", "float32", "--backend", backend]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    output_dir = folder / backend
    done = subprocess.run(
        [*command, "--output_dir", str(output_dir)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    (path,) = (output_dir / "generations").iterdir()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_engine_gives_the_completions_of_transformers(tmp_path):
    """Greedy, in float32, where the likeliest tokens of a random model are far apart."""
    model = tmp_path / "model"
    tiny.make_model("llama", **SHAPE, max_position_embeddings=256).save_pretrained(model)
    tiny.make_tokenizer().save_pretrained(model)
    ours, theirs = (generations(tmp_path, model, backend) for backend in ("vllm", "transformers"))
    assert len(ours) == 8
    for one, other in zip(ours, theirs, strict=True):
        assert one == other
