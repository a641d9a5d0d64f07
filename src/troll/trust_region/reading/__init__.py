"""Reads policies from logits, tile by tile, from any source: a tensor, an LM head, a slice of the vocabulary.

From a call to a kernel:

    capture            →  _one_pass  →  _largest_of_source  →  TritonTile.select  →  its kernels
    trust_region_step  →  read       →  _Read.forward       →  TritonTile.read    →  its kernel

`LogitsSource.tile_class` chooses between `TritonTile` and `Tile`, which does the same in torch.
"""
