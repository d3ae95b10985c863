"""Which passes of a step start to reduce their chunk's gradients, and to gather its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch


class GradientReductions:
    """``with`` around a step; gradients are reduced with the last backward of their chunk only, and where gradients of
    weights come later with the last of these.

    Args:
        no_sync: a function, or one for each chunk, whose context keeps gradients from being reduced; None: nothing
            reduces them before the step's end.
        start: a function, or one for each chunk, that starts the reduction of the parameters it is called with; None:
            they start by themselves in a backward outside of `no_sync`.
        chunks: the model chunks of this stage.
    """

    def __init__(self, no_sync: Any, start: Any, chunks: Sequence[torch.nn.Module]) -> None:
        self._no_sync: list[Callable[[], AbstractContextManager]] = of_each(no_sync, 1)
        self._start, self._chunks = of_each(start, len(chunks)), chunks
        self._off = contextlib.ExitStack()

    def __enter__(self) -> GradientReductions:
        for no_sync in self._no_sync:
            self._off.enter_context(no_sync())
        return self

    def __exit__(self, *_: object) -> None:
        self._off.close()

    @contextlib.contextmanager
    def backward(self, chunk: int, last: bool, weights_later: bool = False) -> Iterator[None]:
        """Around each backward, and each pass that makes its gradients of weights later. ``last``: of this chunk in
        this step.

        All chunks' reductions are on meanwhile: only this one's gradients are being made.
        """
        if not last or (self._start and weights_later):
            yield
            return
        if not self._start:
            self._off.close()
        yield
        if self._start:
            self._off.close()
            self._start[chunk](self._chunks[chunk].parameters())
        self.__enter__()


class ParameterGathers:
    """Starts the gathering of a chunk's parameters one chunk ahead of its first forward.

    Args:
        start: a function, or one for each chunk, called with the chunk's parameters; None: nothing is to be started.
        chunks: the model chunks of this stage.
    """

    def __init__(self, start: Any, chunks: Sequence[torch.nn.Module]) -> None:
        self._start, self._chunks = of_each(start, len(chunks)), chunks
        self._next = 0

    def before(self, chunk: int) -> None:
        """A forward of this chunk comes next."""
        while self._next <= chunk + 1 and self._next < len(self._start):
            self._start[self._next](self._chunks[self._next].parameters())
            self._next += 1


def of_each(given: Any, count: int) -> list[Any]:
    """`given` as a list: one that is no list `count` times, None not at all."""
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given] * count
