"""The projection onto the KL ball, and everything else per token that follows the reading."""
