r"""Whether two mathematical answers are the same: math-verify's judgement, within limits that hold everywhere.

math-verify parses and compares, in processes of its own (`pool.py`): its time limits are signals, which only a main
thread can receive and which no long operation on integers obeys. There, the kernel counts the CPU time of every
comparison, so a busy machine changes no verdict, and bounds the memory.

Two plain numbers are compared as texts, exactly and without a process: `72`, `72.00`, `\$72`, `1,000`. That is stricter
than math-verify, which rounds to six decimals; expressions such as `\frac{1}{3}` and `0.333333` are left to it.
As with math-verify, a unit is not compared (`18 km` and `18 m` are equal), and a percentage equals its number and its
fraction (`50\%`, `50`, `0.5`). Times of day are compared as text. Some answers are refused that math-verify would read
as one number: see `is_ambiguous` in `texts.py`, and `expressions.py`; so is a sum, product, integral, limit or
derivative that is left to do, where the gold answer is a number without one.

Known limits, because a guard would need a parser or a dictionary:

- Granted: a letter that may be a multiplier for a unit (`18\text{k}`), a hedge in text (`18\text{, perhaps}`), dots
  (`18\ldots`), a name before the answer (`f(x) = 18`), arithmetic left to do (`20 - 2`), `N` for `n`.
- Refused: sentences (`the answer is 18`), numbers in words, also in a unit (`18 \text{ in two hours}`), several words
  without `\text` (`18 years old`), `BA` for `AB`, `1 < x < 2` for `(1, 2)`, which may be a point.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from troll.rewards.mathematics.pool import Comparison, ask
from troll.rewards.mathematics.texts import MAX_CHARACTERS, for_math_verify, same_at_sight, tidy


def check_math_verify() -> None:
    """Raises ImportError where math-verify is missing."""
    if find_spec("math_verify") is None:
        raise ImportError('math rewards need math-verify: pip install "troll-rl[tasks]"')


def compare(pairs: Sequence[tuple[str, str]], cpu_seconds: float = 2.0) -> list[Comparison]:
    """Compares answers to gold answers; a pair that comes twice is compared once.

    Args:
        pairs: N pairs of a gold answer and an answer, each without a box around it.
        cpu_seconds: CPU time that one comparison may take.

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
            questions[pair] = for_math_verify(gold, answer)
        else:
            found[pair] = Comparison.EQUAL if same else Comparison.DIFFERENT
    if questions:
        check_math_verify()
        found.update(zip(questions, ask(list(questions.values()), cpu_seconds), strict=True))
    return [found[pair] for pair in pairs]
