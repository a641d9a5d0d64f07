r"""The reward for a mathematical answer: 1 where the completion's final answer equals the gold answer, else 0.

`notation.py` writes both answers in one notation. `texts.py` drops units and compares texts that need no parser: `72`,
`72.00`, `\$72` and `1,000` are compared exactly. `expressions.py` compares the rest, in separate processes (`pool.py`):
sympy may never finish, and Python handles no signal during a long operation on integers. The kernel counts the CPU time
of every comparison, so a busy machine changes no verdict, and it bounds the memory. What runs before, in the training
process, takes polynomial time for any text.

math-verify's own normalization is not used: it turns `5t` and `3h` into 5 and 3, closes parentheses at the first `)`,
and makes a comma of "and". Its `verify`, which rounds to six decimals, decides only where no exact comparison applies.

docs/reference/rewards.md has the rules for users, and the known limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from numbers import Number
from typing import Any

from troll.grading import Grader, Verdict, printable
from troll_lab.rewards.answers import AnswerFormat, check_answer_format, final_answer
from troll_lab.rewards.mathematics.pool import Comparison, ask
from troll_lab.rewards.mathematics.texts import MAX_CHARACTERS, same_at_sight, tidy, without_units


class MathGrader(Grader):
    r"""Compares the final answer with the data set's, by math-verify: `72`, `72.00`, `\$72`, `\frac{144}{2}` are equal.

    Everything before the last answer in the required format is ignored: neither a correct intermediate result nor a
    list of guesses is rewarded. "What counts as equal", on the page about tasks, has the details.

    Args:
        answer_format: How completions mark the final answer: `boxed`, `hash` or `tag`.
        cpu_seconds: The CPU time in seconds for comparing one answer; an answer that takes longer counts as wrong.
        positive_symbols: Whether symbols stand for positive numbers, as in physics: `\sqrt{x^2}` is then `x`.

    Raises:
        ValueError: If an argument is out of its range.
    """

    votes = True

    def __init__(
        self, answer_format: AnswerFormat = "boxed", cpu_seconds: float = 2.0, positive_symbols: bool = False
    ) -> None:
        check_answer_format(answer_format)
        if not 0.01 <= cpu_seconds <= 3600:
            raise ValueError(f"cpu_seconds must be from 0.01 to 3600, got {cpu_seconds!r}")
        self.answer_format = answer_format
        self.cpu_seconds = cpu_seconds
        self.positive_symbols = positive_symbols

    def grade(self, completions: Sequence[str], **columns: Any) -> list[Verdict]:
        """Judges completions, several at a time.

        Args:
            completions: B texts, as the model wrote them.
            **columns: The data set's columns, of which `answer` holds B gold answers, each a number or an expression
                without a box.

        Returns:
            B verdicts with score 0 or 1. Their reasons are "correct", "wrong answer", "no answer", "time limit" and, if
            math-verify's process crashed over the answer, "cannot be compared". If the process was killed again and
            again, or could not be started for half a minute, the score is None and the reason "unscored: ..." with the
            cause.

        Raises:
            ImportError: If math-verify is not installed.
            RuntimeError: If it is, but cannot be imported.
            ValueError: If the column `answer` is missing, does not have one answer for each completion, or has one
                that is neither a text nor a number with all its digits.
        """
        golds = columns.get("answer")
        if golds is None:
            raise ValueError("mathematics is graded against a column 'answer', which the data set lacks")
        if len(golds) != len(completions) or None in golds:
            raise ValueError(f"got {len(completions)} completions, and the column 'answer' has not one answer for each")
        for gold in golds:
            if not _is_exact(gold):
                raise ValueError(
                    f"an answer in the column 'answer' must be a text, or a number with all its digits, got {gold!r}: "
                    "write the answers of this column as text"
                )
        answers = [final_answer(completion, self.answer_format) for completion in completions]
        pairs = [(str(gold), answer) for gold, answer in zip(golds, answers, strict=True) if answer is not None]
        compared = iter(compare(pairs, self.cpu_seconds, self.positive_symbols))
        verdicts = []
        for answer in answers:
            if answer is None:
                verdicts.append(Verdict(0.0, None, "no answer"))
            else:
                comparison = next(compared)
                verdicts.append(Verdict(comparison.score, answer, comparison.value))
        return verdicts

    def same_answer(self, first: str, second: str) -> bool:
        """Whether two answers of completions are equal, with either of them as the gold answer."""
        pairs = [(first, second), (second, first)]
        return Comparison.EQUAL in compare(pairs, self.cpu_seconds, self.positive_symbols)


def _is_exact(gold: Any) -> bool:
    """Whether a gold answer is still what its author wrote: from 2^53 on, floats have rounded whole numbers."""
    if isinstance(gold, float):
        return abs(gold) < 2**53  # neither infinite nor NaN
    return isinstance(gold, str | Number) and not isinstance(gold, bool)


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


#: The reward for answers in `\boxed{}`, in TRL's signature.
success = MathGrader()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    answer_format: AnswerFormat = "boxed",
    positive_symbols: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """The reward with verl's signature, for `custom_reward_function.path` and `.name`; thread-safe.

    Args:
        data_source: Unused; part of the signature.
        solution_str: The completion.
        ground_truth: The gold answer.
        extra_info: Unused; part of the signature.
        answer_format: How the completion marks its final answer; verl passes it on from
            `custom_reward_function.reward_kwargs`.
        positive_symbols: Whether symbols stand for positive numbers; verl passes it on in the same way.
        **kwargs: Unused; further arguments that verl may pass.

    Returns:
        `score` and `acc`, 0 or 1, and `pred`, the answer that was read ("" where there is none), by which verl's
        validation counts majority votes.

    Raises:
        RuntimeError: If the answer could not be compared, for lack of memory or processes for example; the message
            names the cause. verl needs a score in every row.
    """
    (verdict,) = MathGrader(answer_format, positive_symbols=positive_symbols).grade(
        [solution_str], answer=[ground_truth]
    )
    if verdict.score is None:
        raise RuntimeError(f"a completion is {verdict.reason}")
    return {"score": verdict.score, "acc": verdict.success, "pred": printable(verdict.answer or "")}
