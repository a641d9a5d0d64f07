"""How far the policy drifts where it gets no signal: the figure of docs/method.md.

    python -m experiments.drift --output_dir runs/drift [--seeds 4]

Trains the recipe `sparse-signal` at a fast rate with three methods, and keeps the model after each rollout. The start
policy answers held-out prompts in groups of eight. On the groups whose rewards are all equal, which give no gradient,
each model's KL from the start policy is measured over the whole vocabulary. Writes docs/assets/drift.svg and
docs/results/drift.json; finished runs are kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from experiments import RECIPES, figures
from troll.files import json_text, read_json, write_atomically
from troll_lab import recipes
from troll_lab.evaluation.generate import Sampling, TransformersGenerator, seed_of
from troll_lab.evaluation.model import find_model, load_model, load_tokenizer
from troll_lab.evaluation.problems import load_problems
from troll_lab.runs.build import model_path
from troll_lab.runs.compare import compare
from troll_lab.runs.grid import expand, parse_command
from troll_lab.runs.recorded import read_runs
from troll_lab.tasks import TaskConfig

DOCS = Path(__file__).parents[1] / "docs"
RECIPE, RATE = str(RECIPES / "sparse-signal.yaml"), "3e-4"
METHODS = {
    "TROLL": ["--surrogate", "troll", "--kl_bound", "0.05"],
    "KL penalty, β = 1": ["--surrogate", "kl_penalty", "--surrogate_kwargs.weight", "1"],
    "TROLL, proximal pull, ε = 0.5": ["--surrogate", "troll", "--pull", "proximal", "--kl_bound", "0.5"],
}
PROMPTS, GROUP = 64, 8


def main() -> int:
    """Trains, measures and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=4)
    options, fields = parser.parse_known_args()
    found = {}
    for number, (name, method) in enumerate(METHODS.items()):
        folder = options.output_dir / str(number)
        if code := train(folder, method, options.seeds, fields):
            return code
        found[name] = [measure(run.folder, run.seed) for run in sorted(read_runs([folder]), key=lambda run: run.seed)]
    write_atomically(DOCS / "results" / "drift.json", json_text(found, indent=1, ensure_ascii=False) + "\n")
    figures.save_svg(lambda: draw(found), DOCS / "assets" / "drift.svg")
    for name, runs in found.items():
        last = [run["kl"][-1] for run in runs]
        print(f"{name}: {fmean(last):.3f} nats a token at the end, {min(last):.3f} to {max(last):.3f}")
    return 0


def train(folder: Path, method: Sequence[str], seeds: int, fields: Sequence[str]) -> int:
    """Makes the runs of a method that are not finished, with the model after every rollout; returns an exit code."""
    steps = recipes.load(RECIPE, []).training.rollout_steps
    saving = [
        "--save_strategy",
        "steps",
        "--save_steps",
        str(steps),
        "--save_only_model",
        "true",
        "--save_total_limit",
        "1000",
    ]
    numbers = [str(seed) for seed in range(seeds)]
    shared = ["--learning_rate", RATE, "--seed", *numbers, *saving, *fields]
    axes = parse_command([RECIPE], [*method, *shared]).axes
    return 0 if compare(expand([RECIPE], axes), folder, Console(), jobs=1) == "finished" else 1


def measure(run: Path, seed: int) -> dict[str, Any]:
    """Measures one run.

    Returns:
        The seed, the share of groups with equal rewards, the final success, and KL(start ‖ policy) after each rollout,
        in nats, the mean over the tokens of these groups.
    """
    recipe = recipes.load(RECIPE, [f"--seed={seed}"])
    source = find_model(model_path(recipe))
    start, tokenizer = load_model(source, "float32"), load_tokenizer(source)
    length = recipe.training.max_completion_length
    assert length is not None  # the recipe sets it
    rows, labels, equal = without_signal(start, tokenizer, recipe.task, length, seed)
    before = log_probs(start, rows, labels)
    checkpoints = sorted(run.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    kl = []
    for checkpoint in track(checkpoints, description=run.name):
        after = log_probs(load_model(find_model(str(checkpoint)), "float32"), rows, labels)
        kl.append(round((before.exp() * (before - after)).sum(-1).mean().item(), 5))
    return {"seed": seed, "equal_groups": equal, "kl": kl, "success": read_json(run / "summary.json")["success_after"]}


def without_signal(
    model: Any, tokenizer: Any, task: TaskConfig, length: int, seed: int
) -> tuple[list[Tensor], list[Tensor], float]:
    """Answers of a policy in groups with equal rewards.

    Returns:
        The token ids of each prompt with its answer; which of them are the answer's; and the share of such groups.
    """
    problems = load_problems(task, tokenizer, {})
    generator = TransformersGenerator(model, tokenizer, Sampling(1.0, 1.0, 0, length))
    rows, labels, equal = [], [], 0
    for problem in range(PROMPTS):
        prompt = list(problems.ids[problem])
        seeds = [seed_of(seed, problems.name, problem, sample) for sample in range(GROUP)]
        answers = generator.generate([prompt] * GROUP, seeds)
        verdicts = problems.judge([problem] * GROUP, [answer.text for answer in answers])
        if len({verdict.score for verdict in verdicts}) > 1:
            continue
        equal += 1
        for answer in answers:
            ids = tokenizer(answer.text, add_special_tokens=False)["input_ids"]
            ids += generator.end_ids[:1] if answer.finished else []
            rows.append(torch.tensor(prompt + ids))
            labels.append(torch.tensor([False] * len(prompt) + [True] * len(ids)))
    return rows, labels, equal / PROMPTS


@torch.no_grad()
def log_probs(model: Any, rows: list[Tensor], labels: list[Tensor]) -> Tensor:
    """The policy at each token of the answers, (N, V), in float64."""
    ids, attention = pad_sequence(rows, batch_first=True), pad_sequence([torch.ones_like(row) for row in rows], True)
    counted = pad_sequence(labels, batch_first=True)
    logits = model(input_ids=ids, attention_mask=attention).logits
    found: Tensor = logits[:, :-1][counted[:, 1:]].double().log_softmax(-1)
    return found


def draw(found: dict[str, list[dict[str, Any]]]) -> Figure:
    """The figure: a line for each method, the mean over seeds, and a thin one for each seed."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained", facecolor="white")
    axes = figure.add_subplot(
        yscale="log", xlabel="rollouts", ylabel="nats a token", title="KL from the start, where there is no signal"
    )
    for number, (name, runs) in enumerate(found.items()):
        rollouts = range(1, 1 + len(runs[0]["kl"]))
        for run in runs:
            axes.plot(rollouts, run["kl"], color=f"C{number}", linewidth=0.6, alpha=0.5)
        axes.plot(
            rollouts,
            [fmean(values) for values in zip(*(run["kl"] for run in runs), strict=True)],
            color=f"C{number}",
            label=name,
        )
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
