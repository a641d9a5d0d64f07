import threading
from collections.abc import Sequence
from typing import Any

from troll.rewards.completion import Completion, completion_text

_TIMEOUT_SECONDS = 2


def final_answer(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}` whose braces balance, None where there is none."""
    marker = r"\boxed{"
    start = text.rfind(marker)
    while start >= 0:
        depth = 1
        for end in range(start + len(marker), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + len(marker) : end]
        start = text.rfind(marker, 0, start)
    return None


def success(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[str], **columns: Any
) -> list[float]:
    r"""Reward in TRL's signature: 1.0 where the last `\boxed{...}` equals the answer, else 0.0.

    Equality is math-verify's, so `72`, `72.00`, `\$72` and `\frac{144}{2}` are one answer. Everything before the last
    box is ignored: neither a correct intermediate result nor a list of guesses earns anything.

    Args:
        prompts: Unused; part of the signature.
        completions: B completions, plain strings or conversations.
        answer: B correct answers, each a number or an expression without a box.
        **columns: Unused; the data set's other columns.

    Returns:
        B rewards, each exactly 0.0 or 1.0.

    Raises:
        ImportError: If math-verify is not installed.
    """
    return [
        float(_equal(final_answer(completion_text(completion)), gold))
        for completion, gold in zip(completions, answer, strict=True)
    ]


def _equal(candidate: str | None, gold: str) -> bool:
    if candidate is None:
        return False
    if candidate.strip() == gold.strip():
        return True
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError('math rewards need math-verify: pip install "troll-rl[tasks]"') from error
    # math-verify's timeouts are signals, which only the main thread can receive.
    timeout = _TIMEOUT_SECONDS if threading.current_thread() is threading.main_thread() else None
    boxed = [rf"\boxed{{{text}}}" for text in (gold, candidate)]
    parsed_gold, parsed_candidate = (parse(text, parsing_timeout=timeout) for text in boxed)
    return bool(verify(parsed_gold, parsed_candidate, timeout_seconds=timeout))
