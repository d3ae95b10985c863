"""Gradients of weights that are computed later than the backward pass that they belong to.

A backward pass hands on gradients of activations; those of weights nobody waits for. What they need is held here, by
pass, until `WeightGradients.run` computes them. They reach their parameters through autograd, as they would have in
the backward pass: gradients of several uses in one pass are added up before the parameter takes them, in the same
order, and whoever follows a parameter's gradients is told once.

What is held are inputs and output gradients of layers: activations, which live longer for it. They are used on the
stream that they were used on in the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

Compute = Callable[[], torch.Tensor | None]


class Delayed(Protocol):
    """What a layer has put off by itself."""

    @property
    def holds(self) -> tuple[torch.Tensor, ...]:
        """What it is made of, as far as that is known."""

    def compute(self) -> None:
        """See that its parameters have their gradients, and who follows these is told."""


class WeightGradients:
    """Those that are put off, by pass; passes run one at a time."""

    def __init__(self) -> None:
        self._passes: dict[Hashable, _Pass] = {}
        self._now: _Pass | None = None
        self.sources: list[Callable[[], Sequence[Delayed]]] = []
        """Whoever knows of layers that put gradients off by themselves: called when the backward of a pass has ended,
        for what they have put off in it."""
        self.count = 0
        """How many gradients were put off so far, those from elsewhere included."""
        self.around: list[Callable[[Hashable], AbstractContextManager]] = []
        """Whoever watches: entered, with the pass, around the computing of what was put off in it."""

    @property
    def collecting(self) -> bool:
        """Whether a backward pass runs whose gradients of weights are put off."""
        return self._now is not None

    @contextlib.contextmanager
    def collect(self, key: Hashable) -> Iterator[None]:
        """Around the backward of the pass ``key``: what is put off in it waits for `run`. If it fails it is dropped."""
        self._now = self._passes[key] = _Pass()
        try:
            yield
            for source in self.sources:
                self._now.delayed += source()
            self.count += len(self._now.delayed)
        except BaseException:
            del self._passes[key]
            raise
        finally:
            self._now = None

    def put_off(
        self,
        parameter: torch.nn.Parameter,
        compute: Compute,
        holds: tuple[torch.Tensor, ...] = (),
        fetch: Callable[[], None] | None = None,
    ) -> None:
        """Put a gradient off.

        Args:
            parameter: whose it is.
            compute: makes it; returns None if it has been added where it belongs.
            holds: what it is made of, as far as that is on the device.
            fetch: starts to bring the rest there; called once, while the gradient before this is computed.
        """
        assert self._now is not None
        self.count += 1
        stream = torch.get_device_module(parameter.device).current_stream()
        backward = torch._C._current_graph_task_id()
        self._now.put_off.setdefault(backward, []).append(_PutOff(parameter, compute, stream, holds, fetch))
        self._now.parameters.add(parameter)

    def awaits(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a gradient of ``parameter`` was put off in the pass that runs; what it has from elsewhere is put off
        as well, to be added in its turn."""
        if self._now is None or parameter not in self._now.parameters:
            return False
        if parameter.grad is not None:
            gradient, parameter.grad = parameter.grad, None
            self.put_off(parameter, lambda: gradient)
        return True

    def run(self, key: Hashable) -> None:
        """Compute what was put off in the backward of the pass ``key``, and let go of it. If that fails, no parameter
        keeps a part of a gradient, which a later pass would take for its own."""
        one = self._passes.pop(key)
        without = [parameter for parameter in one.parameters if parameter.grad is None]
        try:
            with contextlib.ExitStack() as stack:
                for watcher in self.around:
                    stack.enter_context(watcher(key))
                self._run(one)
        except BaseException:
            for parameter in without:
                parameter.grad = None
            raise

    @staticmethod
    def _run(one: _Pass) -> None:
        for put_off in one.put_off.values():  # each backward's sums by themselves, as they reach parameters
            roots: list[torch.Tensor] = []
            following: Callable[[], None] | None = None
            while put_off:  # from the end: autograd runs first what was made last
                last = put_off.pop()
                roots.append(_later(last.parameter, _Computes(last.compute, following), last.stream))
                following = last.fetch
            if following is not None:
                following()
            del last, following
            torch.autograd.backward(roots, [root.detach() for root in roots])
        while one.delayed:
            one.delayed.pop(0).compute()

    def waiting(self) -> int:
        """Bytes of all that is held, each storage counted once."""
        passes = self._passes.values()
        held = [one.holds for passed in passes for some in passed.put_off.values() for one in some]
        held += [one.holds for passed in passes for one in passed.delayed]
        storages = (tensor.untyped_storage() for tensors in held for tensor in tensors)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def clear(self) -> int:
        """Drop everything; returns of how many passes."""
        count = len(self._passes)
        self._passes.clear()
        self._now = None
        return count


class _PutOff(NamedTuple):
    """The gradient of one weight of one layer."""

    parameter: torch.nn.Parameter
    compute: Compute
    stream: Any
    holds: tuple[torch.Tensor, ...]
    fetch: Callable[[], None] | None


class _Computes:
    """Computes a gradient, while what the one after it needs is on its way."""

    def __init__(self, compute: Compute, following: Callable[[], None] | None) -> None:
        self._compute, self._following = compute, following

    def __call__(self) -> torch.Tensor | None:
        if self._following is not None:
            self._following()
        return self._compute()


class _Pass:
    """What one backward has put off."""

    def __init__(self) -> None:
        self.put_off: dict[int, list[_PutOff]] = {}
        """By the backward that runs: a checkpoint has its own within that of the pass."""
        self.delayed: list[Delayed] = []
        self.parameters: set[torch.nn.Parameter] = set()


def _later(parameter: torch.nn.Parameter, compute: Compute, stream: Any) -> torch.Tensor:
    """A root in autograd from which ``compute`` is run, on this stream."""
    with torch.enable_grad(), torch.get_device_module(parameter.device).stream(stream):
        return _Later.apply(parameter, compute)


class _Later(torch.autograd.Function):
    """Stands for a layer in autograd: its backward makes the gradient of the layer's weight."""

    @staticmethod
    def forward(ctx, parameter, compute):
        ctx.compute = compute
        return parameter.new_empty(())

    @staticmethod
    def backward(ctx, *_):
        compute, ctx.compute = ctx.compute, None  # with all that it holds
        return compute(), None


WEIGHT_GRADIENTS = WeightGradients()
"""Those of this process."""
