"""Reads policies from logits, tile by tile, from any source: a tensor, an LM head, a slice of the vocabulary."""
