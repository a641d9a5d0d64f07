"""The projection onto the KL ball, and everything per token that follows the reading."""
