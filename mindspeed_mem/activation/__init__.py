"""Activations: swapped, recomputed, evicted and measured; which operator saved what, and where its bytes are."""
