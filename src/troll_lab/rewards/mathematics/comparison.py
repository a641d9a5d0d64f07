r"""Decides whether two mathematical answers are the same, with the same limits of time and memory on every machine.

`notation.py` writes both in one notation. `texts.py` drops units and compares texts that need no parser: `72`, `72.00`,
`\$72` and `1,000` are compared exactly. `expressions.py` compares the rest, in separate processes (`pool.py`): sympy
may never finish, and Python handles no signal during a long operation on integers. The kernel counts the CPU time of
every comparison, so a busy machine changes no verdict, and it bounds the memory. What runs before, in the training
process, takes polynomial time for any text.

math-verify's own normalization is not used: it turns `5t` and `3h` into 5 and 3, closes parentheses at the first `)`,
and makes a comma of "and". Its `verify`, which rounds to six decimals, decides only where no exact comparison applies.

docs/reference/rewards.md has the rules for users, and the known limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from troll_lab.rewards.mathematics.pool import Comparison, ask
from troll_lab.rewards.mathematics.texts import MAX_CHARACTERS, same_at_sight, tidy, without_units


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
    if find_spec("math_verify") is None:
        raise ImportError('math rewards need math-verify: pip install "troll-rl[tasks]"')
    found: dict[tuple[str, str], Comparison] = {}
    questions: dict[tuple[str, str], tuple[str, str]] = {}
    for pair in set(pairs):
        gold, answer = (tidy(text) if len(text) <= MAX_CHARACTERS else text for text in pair)
        same = same_at_sight(gold, answer)
        if same is None:
            gold, answer = without_units(gold, answer)
            same = same_at_sight(gold, answer)
        if same is None:
            questions[pair] = gold, answer
        else:
            found[pair] = Comparison.EQUAL if same else Comparison.DIFFERENT
    if questions:
        found.update(zip(questions, ask(list(questions.values()), cpu_seconds, positive_symbols), strict=True))
    return [found[pair] for pair in pairs]
