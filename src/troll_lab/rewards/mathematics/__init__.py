"""Rewards for mathematical answers; verl finds `compute_score` here."""

from troll_lab.rewards.mathematics.grader import MathGrader, compute_score, success

__all__ = ["MathGrader", "compute_score", "success"]
