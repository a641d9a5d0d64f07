"""What goes wrong in an evaluation by a mistake of its user."""


class EvaluationError(ValueError):
    """An evaluation that cannot be made; the message is one line that says what is wrong and what to do."""
