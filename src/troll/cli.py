"""The command line: ``troll train | report``."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

#: Exit codes: training broke down, a mistake in the command, and Ctrl-C.
FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="troll", description="RL fine-tuning of language models with trust regions instead of clipping."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a model by a recipe",
        description="Train a model by a recipe: a name (quickstart, gsm8k-qwen3) or the path of a YAML file.",
        epilog="Any field of TaskConfig, TrollConfig or trl.ModelConfig can follow, e.g. --learning_rate 1e-5.",
    )
    train.add_argument("recipe", metavar="RECIPE")
    report = commands.add_parser("report", help="write the report of a run folder anew")
    report.add_argument("run_folder", metavar="RUN_FOLDER", type=Path)

    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["train"] and argv[1:2] and argv[1].startswith("-") and argv[1] not in ("-h", "--help"):
        # argparse would take the value of an unknown option for the recipe.
        return _fail(ValueError("the recipe comes first: troll train RECIPE [--field value ...]"))
    arguments, overrides = parser.parse_known_args(argv)
    if arguments.command != "train" and overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        return _train(arguments.recipe, overrides) if arguments.command == "train" else _report(arguments.run_folder)
    except KeyboardInterrupt:
        print("troll: interrupted", file=sys.stderr)
        return INTERRUPTED


def _train(recipe_name: str, overrides: list[str]) -> int:
    # Only now: `troll --help` shall not wait for torch and transformers.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # between libraries, nothing a user could act on
            return _run(recipe_name, overrides)
    except ModuleNotFoundError as error:
        return _fail(ImportError(f'{error}: pip install "troll-rl[trl,tasks,report]"'))
    except ImportError as error:
        return _fail(error)


def _run(recipe_name: str, overrides: list[str]) -> int:
    import huggingface_hub
    import transformers
    from rich.console import Console

    from troll import recipes
    from troll.study.run import train
    from troll.tasks import TaskError

    warnings.showwarning = _show_warning
    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        finished = train(recipes.load(recipe_name, overrides), Console())
    except (recipes.RecipeError, TaskError) as error:
        return _fail(error)
    except FloatingPointError as error:
        _fail(error)
        return FAILED
    return 0 if finished else INTERRUPTED


def _report(run_folder: Path) -> int:
    from troll.study.report import write_report

    try:
        print(write_report(run_folder))
    except (ImportError, OSError, ValueError) as error:
        return _fail(error)
    return 0


def _fail(error: Exception) -> int:
    print(f"troll: error: {error}", file=sys.stderr)
    return USAGE_ERROR


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"troll: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
