r"""Whether two mathematical answers are the same: math-verify's judgement, within limits that hold everywhere.

math-verify parses and compares in separate processes (`pool.py`), since its own time limits are signals, which only a
main thread can receive and which a long operation on integers does not obey. There the kernel counts the CPU time of
every comparison, so a busy machine changes no verdict, and it bounds the memory.

Two plain numbers are compared as texts, exactly and without a process: `72`, `72.00`, `\$72`, `1,000`. That is stricter
than math-verify, which rounds to six decimals; expressions such as `\frac{1}{3}` and `0.333333` are left to it. Some
answers are refused that math-verify would read as one number: see `is_ambiguous` in `texts.py`, and `expressions.py`.
docs/tasks.md says what users see of this, and which limits are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from troll.rewards.mathematics.pool import Comparison, ask
from troll.rewards.mathematics.texts import MAX_CHARACTERS, same_at_sight, tidy, without_units


def check_math_verify() -> None:
    """Raises ImportError where math-verify is missing."""
    if find_spec("math_verify") is None:
        raise ImportError('math rewards need math-verify: pip install "troll-rl[tasks]"')


def compare(
    pairs: Sequence[tuple[str, str]], cpu_seconds: float = 2.0, positive_symbols: bool = False
) -> list[Comparison]:
    r"""Compares answers to gold answers; a pair that occurs twice is compared once.

    Args:
        pairs: N pairs of a gold answer and an answer, each without a box around it.
        cpu_seconds: CPU time that one comparison may take.
        positive_symbols: Whether symbols stand for positive numbers, so that `\sqrt{x^2}` is `x`.

    Returns:
        N comparisons, in the order of the pairs.

    Raises:
        ImportError: If math-verify is not installed.
        RuntimeError: If math-verify is installed, but cannot be imported.
    """
    found: dict[tuple[str, str], Comparison] = {}
    questions: dict[tuple[str, str], tuple[str, str]] = {}
    for pair in set(pairs):
        gold, answer = (tidy(text) if len(text) <= MAX_CHARACTERS else text for text in pair)
        same = same_at_sight(gold, answer)
        if same is None:
            questions[pair] = without_units(gold, answer)
            same = same_at_sight(*questions[pair])
        if same is not None:
            questions.pop(pair, None)
            found[pair] = Comparison.EQUAL if same else Comparison.DIFFERENT
    if questions:
        check_math_verify()
        found.update(zip(questions, ask(list(questions.values()), cpu_seconds, positive_symbols), strict=True))
    return [found[pair] for pair in pairs]
