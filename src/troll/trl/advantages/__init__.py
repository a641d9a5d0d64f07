"""Computes advantages from rewards."""
