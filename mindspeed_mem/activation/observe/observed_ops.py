"""What is noted while a forward is watched: operations, and runs of modules and functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Node = tuple[int, str]
"""Layer and operator; a layer that there is not (-1, or beyond the last) is outside the layers."""
OUTSIDE: Node = (-1, "")


class Step(NamedTuple):
    """One operation, or (node None) nothing but a moment."""

    node: Node | None
    flops: int = 0
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    collective: bool = False


@dataclass
class Run:
    """One run of a module or function, from step ``begin`` up to step ``end``."""

    node: Node
    fused: bool
    """A function inside inline code that is one step of it."""
    inputs: set[int]
    begin: int
    end: int = 0
    outputs: set[int] = field(default_factory=set)
