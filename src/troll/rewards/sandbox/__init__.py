"""Runs programs that a model wrote, isolated from everything of the user's."""
