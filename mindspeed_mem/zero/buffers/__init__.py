"""Chunk ZeRO on Megatron's parameter-and-gradient buffers."""
