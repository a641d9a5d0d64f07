"""Code shared by all commands: running and ending, output lines, and errors."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich is not installed everywhere that `one_line` is used
    from rich.console import Console

#: Exit codes: training failed (in one of the runs), a mistake in the command, and Ctrl-C.
FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130


class UsageError(ValueError):
    """A mistake in a command or its files; the message is one line that says what is wrong and what to do."""


def run_command(command: Callable[[], int], extras: str = "trl,tasks,report") -> int:
    """Runs a command and prints its errors, each in one line.

    Args:
        command: Returns its exit code. It may import packages that are not installed, and may raise UsageError, or
            SandboxError where programs cannot be run.
        extras: The extras of this library that install the packages.

    Returns:
        The exit code.
    """
    from troll_sandbox import SandboxError

    try:
        with warnings.catch_warnings():
            ignore_remarks_of_libraries()
            return command()
    except KeyboardInterrupt:
        print("troll: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        return fail(f'{error}: pip install "troll-rl[{extras}]"')
    except (ImportError, UsageError, SandboxError) as error:
        return fail(error)


def ignore_remarks_of_libraries() -> None:
    """Ignores warnings between libraries, and those about their code when Python compiles it."""
    warnings.simplefilter("ignore", FutureWarning)
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*[/\\]site-packages[/\\]")


def fail(error: object, code: int = USAGE_ERROR) -> int:
    """Prints an error, and returns the exit code."""
    print(f"troll: error: {error}", file=sys.stderr)
    return code


def silence_libraries() -> None:
    """Turns off the libraries' progress bars and remarks, and prints warnings in one line."""
    import datasets
    import huggingface_hub

    warnings.showwarning = _show_warning
    huggingface_hub.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    with contextlib.suppress(ModuleNotFoundError):  # rewards need none
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"troll: warning: {message}", file=sys.stderr)


def without_fields(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits off `--field value ...`: argparse does not know these, and would take the values for recipes."""
    first = next((index for index, argument in enumerate(arguments) if argument.startswith("--")), len(arguments))
    return list(arguments[:first]), list(arguments[first:])


def say(console: Console, line: str) -> None:
    """Prints a line unchanged: rich would break it, and take its square brackets for markup."""
    console.print(line, soft_wrap=True, markup=False)


def first_sentence(recipe: str) -> str:
    """The first sentence of the comment at the start of a recipe's text; empty if it starts with something else.

    Read without YAML: the help must not wait for imports.
    """
    lines = takewhile(lambda line: line.startswith("#"), recipe.splitlines())
    comment = " ".join(line.lstrip("#").strip() for line in lines)
    return re.split(r"(?<=[.?!]) ", comment, maxsplit=1)[0]


def one_line(message: object, most: int | None = None) -> str:
    """An error's message without its line breaks, cut to at most `most` characters."""
    return " ".join(str(message).split())[:most]


@contextlib.contextmanager
def raised_as(kind: type[Exception], label: str = "") -> Iterator[None]:
    """Raises a ValueError of the context as an error of another kind, in one line that begins with a label."""
    try:
        yield
    except ValueError as error:
        raise kind(f"{label}{one_line(error)}") from error
