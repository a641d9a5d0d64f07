"""The first line of a program has its verdict: `# REASON` or `# REASON | REASON`, the beginnings of reasons."""


def without_verdict(text: str) -> str:
    """A program after its first line."""
    return text.partition("\n")[2]


def has_verdict(text: str, reason: str) -> bool:
    """Whether a program's first line names a reason, at least its beginning."""
    first = text.partition("\n")[0]
    assert first.startswith("# "), first
    return reason.startswith(tuple(first.removeprefix("# ").split(" | ")))
