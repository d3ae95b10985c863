"""Operators that run again in backward: how they are recorded, tried out, and run again."""
