Completion = str | list[dict[str, str]]


def completion_text(completion: Completion) -> str:
    """Returns the text the model wrote, from a plain completion or from a conversation's last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
