"""Plain layers that compute a branch on a stream of its own, on the simulated device or on the accelerator.

Autograd runs each node on the stream of its forward, after the streams its gradients come from. On a CPU it does not;
`Streams.backward` does it instead.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation import regions
from mindspeed_mem.activation.wrappers import region_forward
from mindspeed_mem.device import Backend, get_backend
from mindspeed_mem.device.simulated import SimulatedBackend
from mindspeed_mem.patching import REGISTRY
from mindspeed_mem.plan import load_memory_config
from tests.models import DEVICE

WIDTH = 32
PIPELINE = "F0 F1 B0 B1 F2 B2".split()
_sequence_nr = torch._C._autograd._get_sequence_nr
_PATCHES = "mindspeed_mem.patches.activation_stacks"


class Streams:
    """The main stream of a program, and one beside it."""

    def __init__(self, backend: Backend, **of_side: Any):
        self.backend = backend
        self.main, self.side = backend.current_stream(), backend.new_stream("side", **of_side)
        self._bounds, self._streams = [0], [self.main]

    @contextmanager
    def on_side(self) -> Iterator[None]:
        before = self.backend.current_stream()
        self._switched(self.side)
        try:
            with self.backend.on_stream(self.side):
                yield
        finally:
            self._switched(before)

    def _switched(self, stream: Any) -> None:
        self._bounds.append(_sequence_nr())
        self._streams.append(stream)

    def wait(self, stream: Any, other: Any) -> None:
        if stream != other:
            self.backend.wait(stream, self.backend.record(other), "the program's own")

    def used_on(self, tensor: torch.Tensor, stream: Any) -> None:
        self.backend.used_on(tensor, stream, "the program's own")

    def backward(self, loss: torch.Tensor) -> None:
        of_node, before, found = {}, {}, [loss.grad_fn]
        for node in found:  # each once: a node's consumers come first, as each has but one
            leaf = node.name().endswith("AccumulateGrad")
            number = bisect_right(self._bounds, node._sequence_nr()) - 1
            of_node[node] = before[node] if leaf else self._streams[number]
            for follower, _ in node.next_functions:
                if follower is not None:
                    before[follower] = of_node[node]
                    if follower not in found:
                        found.append(follower)
        with ExitStack() as self._now:
            for node, stream in of_node.items():
                node.register_prehook(functools.partial(self._starts, stream, before.get(node, stream)))
            del node, found, of_node, before
            loss.backward()
        self.wait(self.main, self.side)

    def _starts(self, stream: Any, before: Any, gradients: tuple) -> None:
        self._now.close()
        self._now.enter_context(self.backend.on_stream(stream))
        if stream != before:
            self.wait(stream, before)
            for gradient in gradients:
                if gradient is not None:
                    self.used_on(gradient, stream)


class NativeStreams(Streams):
    """Of the accelerator, which autograd knows."""

    def __init__(self, backend: Backend):
        super().__init__(backend)
        self.side.side = False  # operators run there

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


@contextmanager
def without(backend: Backend, reason: str | None) -> Iterator[None]:
    """Inside, no wait of this reason is made, and the allocator is not told of what it is about."""
    wait, used_on = backend.wait, backend.used_on
    backend.wait = lambda stream, event, why: why == reason or wait(stream, event, why)
    backend.used_on = lambda tensor, stream, why: why == reason or used_on(tensor, stream, why)
    try:
        yield
    finally:
        del backend.wait, backend.used_on


class Fork(torch.autograd.Function):
    """One tensor for two uses; their gradients meet on the stream of the fork."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx, one, other):
        return one + other


class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class SidePart(Part):
    """What it starts on the other stream goes on when it has returned."""

    def __init__(self, streams: Streams):
        super().__init__()
        self.streams = streams

    def forward(self, x):
        with self.streams.on_side():
            return super().forward(x) * 2  # which nobody saves here


class Layer(torch.nn.Module):
    """Two parts beside another. ``tells``: the allocator learns of every stream that reads a tensor; without that,
    autograd keeps what is read until the streams have joined."""

    def __init__(self, streams: Streams, tells: bool):
        super().__init__()
        self.streams, self.tells = streams, tells
        self.before, self.beside, self.after = Part(), Part(), Part()
        self.first, self.second = SidePart(streams), SidePart(streams)

    def forward(self, x):
        streams, (rest, x) = self.streams, Fork.apply(x)
        main, side = streams.backend.current_stream(), streams.side
        mine, other = Fork.apply(self.before(x))
        given = [other if self.tells else other * 2]
        streams.wait(side, main)
        if self.tells:
            streams.used_on(other, side)
        branch = self.first(given.pop())  # nobody else holds it
        here = self.beside(mine)
        branch = self.second(branch)
        streams.wait(main, side)
        if self.tells:
            streams.used_on(branch, main)
        return rest + self.after(here * branch)


def run(
    plan: dict[str, Any] | None,
    leave_out: str | None = None,
    tells: bool = True,
    survive: bool = False,
    after_part: Callable[[engines.Engine], object] | None = None,
    bandwidth: float = 10e9,
) -> tuple[list[torch.Tensor], Backend]:
    """Gradients of two micro-batches in flight, two steps. Raises an error where the device finds a race.

    ``after_part``: called after each part, forward and backward.
    """
    simulated = DEVICE == "cpu"
    backend = SimulatedBackend(bandwidth=bandwidth) if simulated else get_backend(DEVICE)
    streams = Streams(backend, side=False) if simulated else NativeStreams(backend)
    torch.manual_seed(0)
    model = torch.nn.ModuleList(Layer(streams, tells) for _ in range(2)).to(DEVICE)
    engine = None
    with ExitStack() as stack:
        stack.enter_context(without(backend, leave_out))
        if plan is not None:
            engine = engines.start(load_memory_config(plan), backend, survive=survive)
            stack.callback(REGISTRY.undo, [_PATCHES])
            stack.callback(engines.stop)
            for number, layer in enumerate(model):
                for owner in regions.tag_layer(layer, number):
                    REGISTRY.apply_method(owner, "forward", region_forward, _PATCHES)
            engine.in_force.num_layers = len(model)
            engine.resolve()
        if after_part is not None:
            for part in (m for m in model.modules() if isinstance(m, Part)):
                part.register_forward_hook(functools.partial(_call, after_part, engine))
                part.register_full_backward_hook(functools.partial(_call, after_part, engine))
        if simulated:
            stack.enter_context(backend.tracker())
        for _ in range(2):
            _step(engine, model, streams)
        if simulated:
            backend.check()
        return [parameter.grad.clone() for parameter in model.parameters()], backend


def _call(after_part: Callable[[engines.Engine], object], engine: engines.Engine, *_: Any) -> None:
    after_part(engine)


def _step(engine: engines.Engine | None, model: torch.nn.ModuleList, streams: Streams) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    if engine is not None:
        engine.passes.begin_schedule(("test",))
    losses = {}
    for action in PIPELINE:
        number = int(action[1:])
        if action[0] == "F":
            if engine is not None:
                engine.passes.begin_forward(number, 0)
            x = torch.linspace(-1, 1, 16 * WIDTH).view(16, WIDTH).to(DEVICE) * (number + 1)
            for layer in model:
                x = layer(x)
            losses[number] = x.square().mean()
            del x
            if engine is not None:
                engine.passes.end_forward(losses[number])
        else:
            loss = losses.pop(number)
            if engine is not None:
                engine.passes.begin_backward(loss)
            streams.backward(loss)
            del loss
            if engine is not None:
                engine.passes.end_backward()
    if engine is not None:
        engine.passes.end_schedule(True)
