"""The comparison of `experiments.overthinking` on SmolLM2: shorter answers of a language model that people use.

    make smollm2
    python -m experiments.overthinking_smollm2 --output_dir runs/overthinking-smollm2

The model first learns by supervised learning to answer sums in several attempts, on questions that are neither trained
on nor held out. Both methods have the weights that were chosen on the toy model. Writes
docs/results/overthinking-smollm2.jsonl after every run; runs that the file has are not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from experiments import overthinking
from experiments.rows import read_rows
from troll_lab.tasks.reasoning_gym import questions

RESULT = overthinking.RESULT.with_name("overthinking-smollm2.jsonl")
#: Of redundant tokens, and of all: what `experiments.overthinking` chose.
WEIGHTS = {"overthinking": "0.2", "overthinking-length": "0.03"}
SEEDS = range(3)
OPTIONS = {
    "min_terms": 2,
    "max_terms": 3,
    "min_digits": 1,
    "max_digits": 1,
    "system_prompt": "Write the result.",
    "prompt": "What is {expression}?",
    "attempts": ", ",
}
#: Against the recipes: the task, and LoRA with the tuned learning rate of `smollm2-sums`.
FIELDS = ["--task_options", json.dumps(OPTIONS), "--use_peft", "true", "--lora_r", "32", "--lora_alpha", "32"]
FIELDS += ["--lora_target_modules", "all-linear", "--lora_dropout", "0", "--learning_rate", "2e-4"]
FIELDS += ["--per_device_train_batch_size", "8", "--eval_size", "256", "--per_device_eval_batch_size", "128"]


def main() -> int:
    """Makes the runs, and prints the table of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the runs")
    options = parser.parse_args()
    start, rows = options.output_dir / "start", read_rows(RESULT)
    if not (start / "config.json").is_file():
        teach(options.model_name_or_path, start)
    for seed in SEEDS:
        for recipe, weight in WEIGHTS.items():
            overthinking.make(rows, RESULT, options.output_dir, str(start), recipe, weight, seed, FIELDS)
    print(overthinking.outcome(rows, WEIGHTS, SEEDS))
    return 0


def teach(model: str, folder: Path, **settings: Any) -> None:
    """Trains a chat model to answer in several attempts, and writes it to a folder.

    Args:
        model: The model's name or folder.
        folder: Where the trained model goes.
        settings: Further fields of TRL's `SFTConfig`.
    """
    system = {"role": "system", "content": OPTIONS["system_prompt"]}
    learned = [
        {
            "prompt": [system, {"role": "user", "content": question.prompt}],
            "completion": [{"role": "assistant", "content": question.formatted_answer}],
        }
        for question in questions("chain_sum", OPTIONS, split="warmup", size=960)
    ]
    given: dict[str, Any] = {
        "output_dir": str(folder.with_name(f"{folder.name}-training")),
        "max_steps": 60,
        "per_device_train_batch_size": 16,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "linear",
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "seed": 0,
    }
    trainer = SFTTrainer(model, args=SFTConfig(**given | settings), train_dataset=Dataset.from_list(learned))
    trainer.train()
    trainer.save_model(str(folder))


if __name__ == "__main__":
    sys.exit(main())
