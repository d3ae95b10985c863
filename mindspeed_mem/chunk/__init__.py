"""Chunk-based ZeRO: chunks, when they are gathered and reduced, where they rest, how their optimizer steps."""
