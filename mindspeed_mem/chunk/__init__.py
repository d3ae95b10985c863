"""Chunk-based ZeRO: which parameters share a chunk, and how large chunks should be."""
