"""Policies as values: the few outcomes of a token's distribution that carry its mass. No logits, no LM heads."""
