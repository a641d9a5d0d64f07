"""An update of verl's FSDP engine, in time and peak memory: verl's clip and TROLL, from logits and from fused heads.

It needs verl's environment. The rollout is made up. The pass that computes old log-probabilities and one update are
measured, for a model with the vocabulary of Qwen3.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import measure

#: For each contender, whether the plug-in is on, verl's fused kernels are, and the head is read.
CONTENDERS = {
    "verl's clip, logits": (False, False, False),
    "verl's clip, fused kernels (torch)": (False, True, False),
    "TROLL, head": (True, False, True),
    "TROLL, logits": (True, False, False),
}

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {"Qwen3, width 128, 2 layers": {"width": 128, "layers": 2, "sequences": 4, "length": 256}},
    "cuda": {"Qwen3-0.6B": {"width": 1024, "layers": 28, "sequences": 16, "length": 1024}},
}
VOCABULARY, PROMPT = 151_936, 8


def contenders(width: int, layers: int, sequences: int, length: int, *, device: str) -> measure.Contenders:
    """The scoring and the update of one rollout; the engine is made when it is first called."""

    @functools.cache
    def engine(name: str) -> tuple[Any, Any]:
        with mock.patch.object(Qwen3ForCausalLM, "forward", Qwen3ForCausalLM.forward):
            return _engine(name, width, layers, device), Qwen3ForCausalLM.forward

    def update(name: str) -> object:
        (actor, forward), batch = engine(name), _batch(sequences, length)
        # verl's fused kernels replace the forward of the class, and so of all models of the process.
        with mock.patch.object(Qwen3ForCausalLM, "forward", forward):
            return actor.update(actor.score(batch), mini_batch=sequences, micro_batch_size_per_gpu=sequences)

    return {name: functools.partial(update, name) for name in CONTENDERS}


def _engine(name: str, width: int, layers: int, device: str) -> Any:
    if device == "cpu":  # before verl is imported
        on_cpu = str(Path(__file__).resolve().parents[1] / "examples" / "verl" / "cpu")
        sys.path.append(on_cpu)
        os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu", "VERL_LOGGING_LEVEL": "ERROR"}
    from tests.troll.verl.actor import PLUG_IN, configuration, in_this_process, saved

    plugged_in, fused, reads_head = CONTENDERS[name]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        num_key_value_heads=max(width // 128, 1),
        head_dim=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
        max_position_embeddings=4096,
    )
    folder = saved(Qwen3ForCausalLM(config), Path(tempfile.mkdtemp()))
    overrides = [
        f"trainer.device={device}",
        f"actor_rollout_ref.model.use_fused_kernels={fused}",
        "actor_rollout_ref.actor.optim.lr=1e-4",
    ]
    actor = in_this_process(configuration(folder, *overrides, plug_in=PLUG_IN if plugged_in else ()))
    actor.engine.optimizer_step = actor._optimizer_step  # without a record of the step
    if plugged_in and not reads_head:
        vars(actor.engine)["reads_head"] = False
    return actor


def _batch(sequences: int, length: int) -> Any:
    from tests.troll.verl.actor import Sample, as_batch

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (sequences, PROMPT + length), generator=generator)
    ones = torch.ones(length, dtype=torch.long)
    return as_batch([Sample(row[:PROMPT], row[PROMPT:], ones, torch.randn(length, generator=generator)) for row in ids])


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints times and peak memory."""
    title = f"verl, FSDP2, vocabulary {VOCABULARY}, old log-probabilities and one update"
    return measure.compare(title, CASES[device], contenders, repeats, device)
