"""Makes a small Qwen3 with random weights for a task, so that its whole pipeline runs on a CPU, without a download.

    python examples/small_model.py --task mbpp --dataset_path mbpp.jsonl --output_dir runs/small-model
    troll train mbpp-qwen3 --model_name_or_path runs/small-model --dataset_path mbpp.jsonl ...

A random model never writes a right answer. With `--solution FIELD` it first memorises the solutions of `--problems`
training problems, which takes a minute or two: then some completions are right, and rewards differ.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from troll_lab.runs.toy_network import EOS, IGNORED_LABEL, PAD, learn, model_config, pad_right, shuffled_batches
from troll_lab.tasks import TaskConfig, load_task


def main() -> None:
    """Reads the options, makes the model and says where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True)
    parser.add_argument("--task_options", help="JSON, as for troll train")
    parser.add_argument("--dataset_path", required=True, help="a file of JSON lines, as for troll train")
    parser.add_argument("--question", default="text", help="field of the question")
    parser.add_argument("--solution", help="field of the solution to learn by heart; by default nothing is learned")
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--eval_size", type=int, help="rows that are held out of one file, as for troll train")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args()

    config = TaskConfig(
        task=options.task,
        task_options=options.task_options,
        dataset_path=options.dataset_path,
        train_size=options.problems,
        eval_size=options.eval_size,
    )
    prompts = list(load_task(config, for_training=True).train_dataset["prompt"])
    rows = list(load_dataset("json", data_files=options.dataset_path, split="train"))
    texts = [value for row in rows for value in row.values() if isinstance(value, str)]
    tokenizer = make_tokenizer([*texts, *prompts], options.vocabulary)
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_config(model_config(tokenizer))
    if options.solution:
        solutions = [solution_of(prompt, rows, options.question, options.solution) for prompt in prompts]
        learn_by_heart(model, tokenizer, prompts, solutions, options.steps)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, top_k=0
    )
    model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens: {options.output_dir}")


def make_tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, which reads any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left")


def solution_of(prompt: str, rows: list[dict[str, str]], question: str, solution: str) -> str:
    """The solution of the row whose question stands in a prompt."""
    for row in rows:
        if row[question].strip() in prompt:
            return row[solution].replace("\r\n", "\n")
    raise SystemExit(f"no row's field {question!r} is in the prompt {prompt[:80]!r}: name its field with --question")


def learn_by_heart(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    solutions: list[str],
    steps: int,
) -> None:
    """Supervised learning, only of the solutions."""
    ids, labels = [], []
    for prompt, solution in zip(prompts, solutions, strict=True):
        asked = tokenizer(prompt)["input_ids"]
        told = [*tokenizer(solution)["input_ids"], tokenizer.eos_token_id]
        ids.append(torch.tensor([*asked, *told]))
        labels.append(torch.tensor([IGNORED_LABEL] * len(asked) + told))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for batch in track(shuffled_batches(len(ids), min(8, len(ids)), steps), "learning", total=steps):
        input_ids = pad_right([ids[row] for row in batch], tokenizer.pad_token_id)
        learn(model, optimizer, input_ids, pad_right([labels[row] for row in batch], IGNORED_LABEL))


if __name__ == "__main__":
    main()
