def completion_text(completion: str | list[dict[str, str]]) -> str:
    """Returns the text the model wrote, from a plain completion or from a conversation's last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
