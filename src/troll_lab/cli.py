"""The command line: `troll train | compare | eval | tasks | report`."""

from __future__ import annotations

import argparse
import importlib.metadata
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from troll_lab.terminal import (
    FAILED,
    INTERRUPTED,
    USAGE_ERROR,
    UsageError,
    fail,
    first_sentence,
    run_command,
    silence_libraries,
    without_fields,
)

_TRAIN_EPILOG = """\
Any field of TaskConfig, LabConfig or trl.ModelConfig can follow, e.g. --learning_rate 1e-5.
Recipes that begin with tce- train movements of a robot; any field of EpisodicConfig can follow them.

recipes:
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    parser = _Parser(
        prog="troll", description="RL fine-tuning of language models with trust regions instead of clipping."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a model by a recipe",
        description="Train a model by a recipe: a name from the list below, or the path of a YAML file.",
        epilog=_TRAIN_EPILOG + "\n".join(recipe_lines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("recipe", metavar="RECIPE")
    train.set_defaults(run=_train)
    compare = commands.add_parser(
        "compare",
        help="train by recipes over methods, settings and seeds",
        description="Train by every recipe with every combination of the values that follow the fields, and compare.",
        epilog="Fields are those of `troll train`; each may have several values: --surrogate troll clip none. "
        "--seeds N: the seeds 0 to N - 1. --jobs N: how many runs at once (default: one for each GPU, else core). "
        "--output_dir DIR: the folder; the same command again, or one with more values, continues there.",
    )
    compare.add_argument("recipes", metavar="RECIPE", nargs="+")
    compare.set_defaults(run=_compare)
    _add_eval(commands.add_parser("eval", help="evaluate a model on tasks"))
    _add_tasks(commands.add_parser("tasks", help="list the tasks, or check the answers of one"))
    report = commands.add_parser("report", help="write the page about a run again, or one about several runs")
    report.add_argument("folders", metavar="RUN", type=Path, nargs="+", help="a folder of troll train or troll compare")
    report.add_argument(
        "--output_dir",
        type=Path,
        help="where the page about several runs goes (default: the folder of troll compare, else the current one)",
    )
    report.set_defaults(run=_report)

    argv = list(sys.argv[1:] if argv is None else argv)
    fields: list[str] = []
    if argv[:1] in (["train"], ["compare"]) and not {"-h", "--help"} & set(argv):
        if argv[1:2] and argv[1].startswith("-"):
            return fail(f"the recipe comes first: troll {argv[0]} RECIPE [--field value ...]")
        argv, fields = without_fields(argv)
    arguments = parser.parse_args(argv, argparse.Namespace(fields=fields))
    extras = "report" if arguments.command == "report" else "trl,tasks,report"
    return run_command(lambda: arguments.run(arguments), extras)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"troll: error: {message}\n")


class _Version(argparse.Action):
    # argparse's own action would need the version of every command, and a checkout on the path has none.
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        try:
            print(f"troll {importlib.metadata.version('troll-rl')}")
        except importlib.metadata.PackageNotFoundError:
            parser.error("troll-rl is not installed: a checkout has no version")
        parser.exit()


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_eval)
    parser.description = "Generate completions of every problem of the tasks, grade them, and print a table."
    parser.epilog = "The same command again resumes where it was stopped. With several tasks, --dataset_path and "
    parser.epilog += "--task_options take TASK=VALUE for each. A model saved by troll train comes with the settings "
    parser.epilog += "of its own task; an option overrides them, and null in a JSON object removes one."
    parser.add_argument("model", metavar="MODEL", help="a name on the hub, or the folder of a model or a run")
    parser.add_argument(
        "--task", nargs="+", help="names such as gsm8k, reasoning_gym:chain_sum (default: the one it was trained on)"
    )
    parser.add_argument("--dataset_path", nargs="+", default=[], metavar="PATH", help="local data of the task")
    parser.add_argument("--task_options", nargs="+", default=[], metavar="JSON", help="options of the task")
    parser.add_argument("--eval_size", type=int, help="problems of each task at most (default: all, or as in the run)")
    parser.add_argument("--samples", type=int, default=1, help="completions of each problem (default: 1)")
    parser.add_argument("--k", type=int, nargs="+", help="each k of pass@k (default: 1 and all samples)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: 0 for one sample, 1 for several)")
    parser.add_argument("--top_p", type=float, default=1.0, help="sample from the tokens of this mass (default: 1)")
    parser.add_argument("--top_k", type=int, default=0, help="sample from this many tokens (default: 0, all)")
    parser.add_argument("--max_new_tokens", type=int, help="default: 2048, or what the model's context leaves")
    parser.add_argument("--batch_size", type=int, help="completions at once (default: 16, with vLLM 1024)")
    parser.add_argument("--backend", default="auto", help="auto (vLLM where it can run), vllm or transformers")
    parser.add_argument("--seed", type=int, default=0, help="random seed of sampling (default: 0)")
    parser.add_argument("--dtype", default="auto", help="auto (as stored), float32, bfloat16 or float16")
    parser.add_argument("--chat_template_kwargs", metavar="JSON", help="variables of the chat template")
    parser.add_argument("--model_revision", help="branch, tag or commit of a model on the hub")
    parser.add_argument("--trust_remote_code", action="store_true", help="let the model's own code run")
    parser.add_argument("--output_dir", type=Path, help="default: runs/eval- and the model's name")


def _eval(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from troll_lab.evaluation.command import as_in_training, configuration, other_prompts, training_rows
    from troll_lab.evaluation.run import evaluate
    from troll_lab.evaluation.training_task import find_training_task
    from troll_lab.terminal import say

    silence_libraries()
    console, trained = Console(), find_training_task(arguments.model, arguments.model_revision)
    config = configuration(arguments, trained)
    if trained is not None:
        if line := as_in_training(config, trained):
            say(console, line)
        for line in (*other_prompts(config, trained), *training_rows(config, trained)):
            warnings.warn(line, stacklevel=2)
    return 0 if evaluate(config, console) else INTERRUPTED


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the names of tasks; with `check`, find out whether a task's reward agrees with its data."
    parser.set_defaults(run=_tasks)
    actions = parser.add_subparsers(metavar="check")
    check = actions.add_parser(
        "check",
        help="grade the gold answers of a task",
        description="Grade every gold answer (for code, every reference solution) of a task against itself, restated "
        "and spoiled, and print where the reward disagrees.",
        epilog="Exit code 1 if a gold answer is not graded right against itself.",
    )
    check.set_defaults(run=_check)
    check.add_argument("task", metavar="TASK", help="a name such as gsm8k, or the path of a YAML or Python file")
    check.add_argument("--dataset_path", metavar="PATH", help="local data of the task")
    check.add_argument("--task_options", metavar="JSON", help="options of the task")
    check.add_argument("--eval_size", type=int, help="rows to hold out from a file that is not divided (default: 256)")
    check.add_argument("--limit", type=int, metavar="N", help="check the first N rows only")


def _tasks(_: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from troll_lab.tasks.registry import known_tasks

    table = Table("task", "what it asks", "", caption="docs/tasks.md says where their data is from.")
    for pattern, entry in known_tasks().items():
        table.add_row(pattern.replace("[", r"\["), entry.about, "" if entry.trains else "to evaluate on only")
    Console().print(table)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from troll_lab.tasks import TaskConfig, load_task
    from troll_lab.tasks.check import check, show, size

    if arguments.limit is not None and arguments.limit < 1:
        raise UsageError(f"limit must be at least 1, got {arguments.limit}")
    silence_libraries()
    task = load_task(
        TaskConfig(
            arguments.task,
            dataset_path=arguments.dataset_path,
            task_options=arguments.task_options,
            eval_size=arguments.eval_size,
        )
    )
    console = Console()
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("grading", total=size(task, arguments.limit))
        report = check(task, arguments.limit, advance=lambda rows: progress.advance(bar, rows))
    show(report, console)
    return 0 if report.passed else FAILED


def _train(arguments: argparse.Namespace) -> int:
    from troll_lab.episodic.config import is_recipe

    if is_recipe(arguments.recipe):
        from troll_lab.episodic.train import train_command
    else:
        from troll_lab.runs.train import train_command
    return train_command(arguments.recipe, arguments.fields)


def _compare(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from troll_lab.runs.compare import compare
    from troll_lab.runs.grid import expand, parse_command

    silence_libraries()
    command = parse_command(arguments.recipes, arguments.fields)
    given = shlex.join(["troll", "compare", *arguments.recipes, *arguments.fields])
    runs = expand(arguments.recipes, command.axes)
    outcome = compare(runs, Path(command.output_dir), Console(), command.jobs, given)
    return {"finished": 0, "failed": FAILED, "interrupted": INTERRUPTED}[outcome]


def _report(arguments: argparse.Namespace) -> int:
    from troll_lab.episodic.config import is_episodic
    from troll_lab.runs.comparison_files import write_comparison
    from troll_lab.runs.recorded import is_comparison

    first, *others = arguments.folders
    try:
        if others or is_comparison(first):
            print(write_comparison(arguments.folders, arguments.output_dir or (Path() if others else first)))
        elif arguments.output_dir is not None:
            raise UsageError("--output_dir is for the page about several runs: a run's own stays in its folder")
        else:
            from troll_lab.reports import movements_page, run_page

            print((movements_page if is_episodic(first) else run_page).write_report(first))
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    return 0


def recipe_lines() -> list[str]:
    """A line for each recipe: its name, and the first sentence of its first comment.

    Without `troll_lab.recipes.names`: the help must not wait for torch to import.
    """
    here = Path(__file__).parent
    folders = (here / "recipes", here / "episodic" / "recipes")
    paths = [path for folder in folders for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)]
    width = max(len(path.stem) for path in paths)
    return [f"  {path.stem:{width}}  {first_sentence(path.read_text())}".rstrip() for path in paths]


if __name__ == "__main__":
    sys.exit(main())
