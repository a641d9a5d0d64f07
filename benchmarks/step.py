"""Whole training: `TrollTrainer` against `GRPOTrainer`, same model, same completions, four updates per rollout.

The model samples its completions once, in advance, since generation is the same on both sides and would hide the
difference. The rest of `trainer.train()` is timed: the old policy's pass, the updates, the optimiser, the metrics.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

from benchmarks import coverage, measure
from troll.trl import TrollConfig, TrollTrainer

PROJECTED = "trust_region/projected_fraction"
BASELINE, TROLL = "GRPOTrainer (clip)", "TrollTrainer"
#: The class, its configuration, and the settings that differ.
Trainer = tuple[type[GRPOTrainer], type[GRPOConfig], dict[str, Any]]
TRAINERS: dict[str, Trainer] = {BASELINE: (GRPOTrainer, GRPOConfig, {}), TROLL: (TrollTrainer, TrollConfig, {})}
#: Those of the benchmark `kl_target`, which compares them with the step of `TrollTrainer` without a target.
WITH_TARGET: dict[str, Trainer] = {
    TROLL: TRAINERS[TROLL],
    "TrollTrainer, kl_target": (TrollTrainer, TrollConfig, {"kl_target": 0.1}),
    "TrollTrainer, clip": (TrollTrainer, TrollConfig, {"surrogate": "clip"}),
    "TrollTrainer, clip, kl_target": (TrollTrainer, TrollConfig, {"surrogate": "clip", "kl_target": 0.1}),
}
_ALL = TRAINERS | WITH_TARGET

#: A Qwen3 with the real vocabulary; on a CPU scaled down. Tokens are sequences x completion length of one update.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "Qwen3, width 256, 4 layers": {"width": 256, "layers": 4, "sequences": 4, "length": 56},
    },
    "cuda": {
        "Qwen3-0.6B": {"width": 1024, "layers": 28, "sequences": 64, "length": 256},
        "Qwen3-1.7B": {"width": 2048, "layers": 28, "sequences": 32, "length": 256},
    },
    "small": {"Qwen3, width 128, 1 layer": {"width": 128, "layers": 1, "sequences": 2, "length": 4}},
}
#: Prompts have a single token, since on a CPU TRL scores prompts too, and TROLL does not.
VOCABULARY, PROMPT, UPDATES = 151_936, 1, 4

#: A rate so large that the trust region binds within a rollout; a checkpoint takes that of `coverage`.
LEARNING_RATE = 1e-4


def loaded(device: str, width: int = 0, layers: int = 0, model: str = "") -> tuple[Any, PreTrainedTokenizerBase]:
    """A model and its tokenizer: a checkpoint, or a random Qwen3 of some width and number of blocks."""
    torch.manual_seed(0)
    if model:
        checkpoint: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return checkpoint.to(device), AutoTokenizer.from_pretrained(model, padding_side="left")
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
    with torch.device(device):
        qwen: Any = Qwen3ForCausalLM(config)
    with torch.no_grad():
        qwen.get_output_embeddings().weight *= 10  # logits of standard deviation 3: a few likely tokens
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>"))
    return qwen, PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@functools.cache
def sampled(device: str, sequences: int, length: int, text: str = "", **model: Any) -> dict[str, list[list[int]]]:
    """The tokens of the prompts and completions of a rollout, which the model samples once for all contenders.

    Args:
        device: Where the model is.
        sequences: The completions of an update.
        length: Their tokens, of a checkpoint at most.
        text: The prompts of a checkpoint, of `coverage.ROLLOUT`.
        **model: Arguments of `loaded`.
    """
    sampler, tokenizer = loaded(device, **model)
    count = UPDATES * sequences
    if text:
        rollout = coverage.sample(sampler, tokenizer, text, 1.0, count, length)
        completions = rollout.labels != -100
        kept = {"prompt_ids": rollout.attention.bool() & ~completions, "completion_ids": completions}
        return {
            name: [row[chosen].tolist() for row, chosen in zip(rollout.ids, tokens, strict=True)]
            for name, tokens in kept.items()
        }
    prompts = torch.randint(3, VOCABULARY, (count, PROMPT)).to(device)
    with torch.no_grad():
        ids = sampler.generate(prompts, do_sample=True, min_new_tokens=length, max_new_tokens=length)
    return {"prompt_ids": ids[:, :PROMPT].tolist(), "completion_ids": ids[:, PROMPT:].tolist()}


def contenders(device: str, **case: Any) -> measure.Contenders:
    """The training on one rollout, set up when it is called, so that no other contender's memory counts."""

    def train(name: str) -> object:
        return _trainer(name, device, **case).train()

    return {name: functools.partial(train, name) for name in _ALL}


def _trainer(name: str, device: str, sequences: int, length: int, text: str = "", **model: Any) -> GRPOTrainer:
    trainer_class, config_class, settings = _ALL[name]
    tokens = sampled(device, sequences, length, text, **model)
    trained, tokenizer = loaded(device, **model)

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        return tokens | {"logprobs": None}

    arguments = config_class(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=sequences,
        num_generations=sequences,
        steps_per_generation=UPDATES,
        max_steps=UPDATES,
        max_completion_length=max(map(len, tokens["completion_ids"])),
        learning_rate=coverage.LEARNING_RATE if text else LEARNING_RATE,
        bf16=device == "cuda",
        use_cpu=device == "cpu",
        gradient_checkpointing=device == "cuda",
        logging_steps=UPDATES,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        **settings,
    )
    trainer = trainer_class(
        model=trained,
        reward_funcs=_reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * len(tokens["prompt_ids"])}),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _reward(completion_ids: list[list[int]], **_: object) -> list[float | None]:
    return [sum(ids) % 7 for ids in completion_ids]


def main(device: str, repeats: int, checkpoints: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Prints times and peak memory of one rollout's updates, of random models or of checkpoints."""
    cases = CASES[measure.shapes(device)]
    if checkpoints:
        cases = {
            f"{Path(model).name}, {text}": {
                "model": model,
                "text": text,
                "sequences": count // UPDATES,
                "length": length,
            }
            for text in coverage.texts()
            for count, length in [coverage.size(text)]
            for model in checkpoints
        }
    return compare(TRAINERS, cases, device, repeats)


def compare(
    names: Iterable[str], cases: Mapping[str, dict[str, Any]], device: str, repeats: int
) -> list[dict[str, Any]]:
    """Prints times and peak memory of trainers, as ratios to the first.

    Args:
        names: Keys of `TRAINERS` or of `WITH_TARGET`, with `TROLL`.
        cases: What is trained, by name.
        device: Where.
        repeats: The number of rounds.
    """
    results = []
    for name, case in cases.items():
        # A repeated call of `train` starts with the weights of the last one.
        trainers = {each: _trainer(each, device, **case) for each in names}
        taken = measure.seconds({each: trainer.train for each, trainer in trainers.items()}, repeats, device)
        logged = [entry for entry in trainers[TROLL].state.log_history if PROJECTED in entry][-1]
        compared = list(trainers)
        trainers.clear()  # on a GPU, their memory would count too
        peaks = measure.peak_memory(contenders, case, compared, device)
        rows = measure.show(f"training: {name}, {UPDATES} updates and their capture", taken, peaks)
        Console().print(f"projected in the last rollout: {logged[PROJECTED]:.1%} of the tokens")
        results += [{"case": name, **case, **row, "projected": logged[PROJECTED]} for row in rows]
    return results
