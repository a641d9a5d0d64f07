"""What logits say of a policy, read tile by tile from any source: a tensor, an LM head, a slice of the vocabulary."""
