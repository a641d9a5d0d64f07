"""Whole training: `TrollTrainer` against `GRPOTrainer`, same model, same completions, four updates per rollout.

The model samples its completions once, in advance, since generation is the same on both sides and would hide the
difference. The rest of `trainer.train()` is timed: the old policy's pass, the updates, the optimiser, the metrics.
"""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from benchmarks import measure
from troll.trl import TrollConfig, TrollTrainer

PROJECTED = "trust_region/projected_fraction"
BASELINE = "GRPOTrainer (clip)"
TRAINERS: dict[str, tuple[type[GRPOTrainer], type[GRPOConfig]]] = {
    BASELINE: (GRPOTrainer, GRPOConfig),
    "TrollTrainer": (TrollTrainer, TrollConfig),
}

#: A Qwen3 with the real vocabulary; on a CPU scaled down. Tokens are sequences x completion length of one update.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "Qwen3, width 256, 4 layers": {"width": 256, "layers": 4, "sequences": 4, "length": 56},
    },
    "cuda": {
        "Qwen3-0.6B": {"width": 1024, "layers": 28, "sequences": 16, "length": 1024},
        "Qwen3-1.7B": {"width": 2048, "layers": 28, "sequences": 8, "length": 1024},
    },
}
#: Prompts have a single token, since on a CPU TRL scores prompts too, and TROLL does not.
VOCABULARY, PROMPT, UPDATES = 151_936, 1, 4

#: A rate so large that the trust region binds within a rollout.
LEARNING_RATE = 1e-4


def contenders(width: int, layers: int, sequences: int, length: int, *, device: str) -> measure.Contenders:
    """The training on one rollout, set up when it is called, so that no other contender's memory counts."""

    def train(name: str) -> object:
        return _trainer(name, width, layers, sequences, length, device).train()

    return {name: functools.partial(train, name) for name in TRAINERS}


def _trainer(name: str, width: int, layers: int, sequences: int, length: int, device: str) -> GRPOTrainer:
    trainer_class, config_class = TRAINERS[name]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 128, 1),
        num_key_value_heads=max(width // 256, 1),
        head_dim=128,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
    )
    model: Any = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 10  # logits of standard deviation 3: a few likely tokens
    prompts = torch.randint(3, VOCABULARY, (UPDATES * sequences, PROMPT))
    with torch.no_grad():
        ids = model.to(device).generate(
            prompts.to(device), do_sample=True, min_new_tokens=length, max_new_tokens=length
        )

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        return {
            "prompt_ids": ids[:, :PROMPT].tolist(),
            "completion_ids": ids[:, PROMPT:].tolist(),
            "logprobs": None,
        }

    arguments = config_class(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=sequences,
        num_generations=sequences,
        steps_per_generation=UPDATES,
        max_steps=UPDATES,
        max_completion_length=length,
        learning_rate=LEARNING_RATE,
        bf16=device == "cuda",
        use_cpu=device == "cpu",
        gradient_checkpointing=device == "cuda",
        logging_steps=UPDATES,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>"))
    trainer = trainer_class(
        model=model,
        reward_funcs=_reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * (UPDATES * sequences)}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
        ),
        rollout_func=rollout,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _reward(completion_ids: list[list[int]], **_: object) -> list[float | None]:
    return [sum(ids) % 7 for ids in completion_ids]


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints times and peak memory of one rollout's updates."""
    results = []
    for name, case in CASES[device].items():
        # A repeated call of `train` starts with the weights of the last one.
        trainers = {trainer: _trainer(trainer, device=device, **case) for trainer in TRAINERS}
        taken = measure.seconds({name: trainer.train for name, trainer in trainers.items()}, repeats, device)
        peaks = measure.peak_memory(contenders, case, list(trainers), device)
        tokens = case["sequences"] * case["length"]
        title = f"training: {name}, vocabulary {VOCABULARY}, {UPDATES} updates of {tokens} tokens and their capture"
        rows = measure.show(title, taken, peaks)
        logged = [entry for entry in trainers["TrollTrainer"].state.log_history if PROJECTED in entry][-1]
        Console().print(f"projected in the last rollout: {logged[PROJECTED]:.1%} of the tokens")
        results += [{"case": name, **case, **row, "projected": logged[PROJECTED]} for row in rows]
    return results
