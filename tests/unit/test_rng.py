"""What runs again draws what it drew before, from the generators of whatever device there is."""

from __future__ import annotations

import pytest
import torch

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation import regions
from mindspeed_mem.activation.rerun import rng
from mindspeed_mem.activation.wrappers import region_forward
from mindspeed_mem.device.cpu import CpuBackend
from mindspeed_mem.patching import REGISTRY
from mindspeed_mem.plan import load_memory_config
from tests.swap_runs import again

PATCHES = "mindspeed_mem.patches.activation_stacks"


class OwnGenerators(CpuBackend):
    """A device, or two, with random generators of their own, as every accelerator has."""

    type, tensor_type, is_host = "own", "cpu", False

    def __init__(self):
        super().__init__()
        self.generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]

    def index(self):
        return 0

    def rng_state(self, index=None):
        return self.generators[index or 0].get_state()

    def set_rng_state(self, state, index=None):
        self.generators[index or 0].set_state(state)


@pytest.fixture
def default(monkeypatch):
    """No earlier test's device."""
    monkeypatch.setattr(rng._Source, "backend", None)


class Layer(torch.nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.linear, self.backend = torch.nn.Linear(8, 8), backend

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return x + y * (torch.rand(y.shape, generator=self.backend.generators[0]) > 0.5) * y


def gradients(plan):
    backend = OwnGenerators()
    torch.manual_seed(0)
    model = torch.nn.ModuleList(Layer(backend) for _ in range(2))
    engine = None
    if plan is not None:
        engine = engines.start(load_memory_config(plan), backend)
        for number, layer in enumerate(model):
            for owner in regions.tag_layer(layer, number):
                REGISTRY.apply_method(owner, "forward", region_forward, PATCHES)
        engine.in_force.num_layers = len(model)
        engine.resolve()
    try:
        for _ in range(2):
            x = torch.linspace(-1, 1, 32).view(4, 8)
            for layer in model:
                x = layer(x)
            x.square().mean().backward()
        again = engine is not None and sum(engine.mover.second_runs.values())
        return [parameter.grad for parameter in model.parameters()], again
    finally:
        if engine is not None:
            engines.stop()
            REGISTRY.undo([PATCHES])


def test_recompute_replays_the_devices_own_generator(default):
    native, _ = gradients(None)
    recomputed, runs = gradients(again(recompute=[2]))
    assert runs == 4
    assert all(map(torch.equal, recomputed, native))


def test_generators_of_all_devices_that_an_operator_works_on(default):
    backend = OwnGenerators()
    backend.tensor_type = "meta"
    rng.follow(backend)
    states = rng.capture([torch.empty(1, device="meta:1")])

    def draw():
        return [torch.rand(2, generator=generator).tolist() for generator in backend.generators]

    first = draw()
    with rng.as_of(states):
        assert draw() == first
    assert not rng.same(states, rng.capture_as(states))
    after = draw()
    assert after != first
    rng.restore(states)
    assert draw() == first and draw() == after
