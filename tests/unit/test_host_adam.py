"""Adam on the host against torch's own: the same bits whatever the tile, in every precision, with every scale."""

import dataclasses
import threading
import tracemalloc

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_mem.device.limited_cpu import CompilerError, LimitedMemory
from mindspeed_mem.zero.optimizer.host_adam import AdamSettings, GradientScaling, HostAdam, adam_problems
from tests.guarding import settled

HALF = (torch.bfloat16, torch.float16, torch.float32)
SETTINGS = AdamSettings(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decoupled=True)

UNSCALED = GradientScaling()


class Shard:
    """A shard and the gradients of some steps."""

    def __init__(self, elements: int, gradients: torch.dtype = torch.float32, steps=3):
        torch.manual_seed(elements)
        self.master = torch.randn(elements)
        self.exp_avg, self.exp_avg_sq = torch.zeros(elements), torch.zeros(elements)
        self.gradients = [torch.randn(elements).to(gradients) for _ in range(steps)]

    def step(self, adam: HostAdam, settings: AdamSettings = SETTINGS, scaling: GradientScaling = UNSCALED):
        for number, gradient in enumerate(self.gradients, start=1):
            before = gradient.clone()
            adam.step(self.master, gradient, self.exp_avg, self.exp_avg_sq, number, settings, scaling)
            assert torch.equal(before, gradient)
        return self

    def by_torch(self, settings: AdamSettings, scaling: GradientScaling, fused: bool = True):
        """The same steps by torch.optim on the whole shard."""
        kind = torch.optim.AdamW if settings.decoupled else torch.optim.Adam
        param = torch.nn.Parameter(self.master.clone())
        optimizer = kind(
            [param],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            maximize=settings.maximize,
            fused=fused,
            foreach=False,
        )
        for gradient in self.gradients:
            param.grad = gradient.float() / scaling.loss_scale * scaling.clip
            optimizer.step()
        self.master = param.detach()
        self.exp_avg, self.exp_avg_sq = optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"]
        return self

    def __eq__(self, other):
        names = ("master", "exp_avg", "exp_avg_sq")
        return all(torch.equal(getattr(self, name), getattr(other, name)) for name in names)


@given(
    elements=st.integers(1, 5000),
    tile=st.integers(1, 80),
    gradients=st.sampled_from(HALF),
    loss_scale=st.sampled_from([1.0, 65536.0, 3.0]),
    clip=st.sampled_from([1.0, 0.37]),
    decoupled=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    maximize=st.booleans(),
)
def test_tiles_are_the_bits_of_torchs_own_step_on_the_whole(
    elements, tile, gradients, loss_scale, clip, decoupled, weight_decay, maximize
):
    settings = AdamSettings(
        lr=1e-2,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=weight_decay,
        decoupled=decoupled,
        maximize=maximize,
    )
    scaling = GradientScaling(loss_scale, clip)
    tiled = Shard(elements, gradients).step(HostAdam(64 * tile), settings, scaling)
    assert tiled == Shard(elements, gradients).by_torch(settings, scaling)


@pytest.mark.parametrize("tile", [64, 1024 * 7, 65536])
@pytest.mark.parametrize("gradients", HALF)
def test_a_large_shard_in_tiles_is_the_whole(tile, gradients):
    elements = 300_001
    assert Shard(elements, gradients).step(HostAdam(tile)) == Shard(elements, gradients).step(
        HostAdam(elements // 64 * 64 + 64)
    )


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_kernel_differs_from_an_adam_that_is_not_fused_by_rounding_only(decoupled):
    settings, steps = dataclasses.replace(SETTINGS, decoupled=decoupled, weight_decay=0.1), 50
    fused, loop = Shard(20_000, steps=steps), Shard(20_000, steps=steps)
    largest = fused.master.abs()
    fused.step(HostAdam(), settings)
    loop.by_torch(settings, UNSCALED, fused=False)
    largest = torch.maximum(largest, loop.master.abs())
    difference = (fused.master - loop.master).abs()
    assert difference.any()  # else there would be nothing to bound
    assert (difference <= steps * (2**-23 * largest + 2**-20 * settings.lr)).all()


@pytest.mark.parametrize("gradients", HALF)
@pytest.mark.parametrize("name, value", [("loss_scale", 8.0), ("clip", 0.5)])
def test_scale_and_clip_reach_gradients_of_every_precision(gradients, name, value):
    plain = Shard(1000, gradients).step(HostAdam())
    scaled = Shard(1000, gradients).step(HostAdam(), scaling=GradientScaling(**{name: value}))
    factor = 1 / value if name == "loss_scale" else value
    assert torch.equal(scaled.exp_avg, plain.exp_avg * factor)  # powers of two: exactly
    assert torch.equal(scaled.exp_avg_sq, plain.exp_avg_sq * factor**2)


def test_the_stage_is_all_memory_it_takes():
    tracemalloc.start()
    adam = HostAdam(4096)
    taken = tracemalloc.take_snapshot()
    tracemalloc.stop()
    taken = taken.filter_traces([tracemalloc.DomainFilter(True, numpy.lib.tracemalloc_domain)])
    assert [trace.size for trace in taken.traces if trace.size > 512] == [4096 * 4]  # else scalars
    assert adam.tile == 4096


def test_a_step_allocates_nothing():
    try:
        memory = LimitedMemory()
    except CompilerError as error:
        pytest.skip(str(error))
    shard, adam = Shard(200_001, torch.bfloat16), HostAdam(4096)
    with memory:
        before = settled(memory)
        adam.step(shard.master, shard.gradients[0], shard.exp_avg, shard.exp_avg_sq, 1, SETTINGS, GradientScaling(2.0))
        assert memory.peak - before < 64  # scalars


def test_threads_with_an_object_each_do_not_disturb_each_other():
    shards = [Shard(50_000 + number, torch.bfloat16) for number in range(4)]
    threads = [threading.Thread(target=shard.step, args=(HostAdam(704),)) for shard in shards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(shard == Shard(50_000 + n, torch.bfloat16).step(HostAdam()) for n, shard in enumerate(shards))


def test_all_that_is_wrong_is_said_at_once():
    shard = Shard(10)
    with pytest.raises(ValueError) as error:
        HostAdam().step(shard.master.double(), shard.gradients[0][:9], shard.exp_avg, shard.exp_avg_sq, 1, SETTINGS)
    assert "master has torch.float64; allowed: torch.float32" in str(error.value)
    assert "gradient has 9 elements; the master has 10" in str(error.value)
    with pytest.raises(ValueError, match="exp_avg_sq .* contiguous host memory"):
        HostAdam().step(shard.master, shard.gradients[0], shard.exp_avg, torch.zeros(20)[::2], 1, SETTINGS)
    with pytest.raises(ValueError, match="got 1000 elements; give a multiple of 64"):
        HostAdam(1000)


def test_only_an_adam_can_be_reproduced():
    param = torch.nn.Parameter(torch.zeros(2))

    class Other(torch.optim.AdamW):
        def step(self, closure=None):
            raise NotImplementedError

    class Same(torch.optim.AdamW):
        pass

    def problems(optimizer):
        return adam_problems(optimizer, optimizer.param_groups)

    assert problems(torch.optim.Adam([param])) == problems(Same([param])) == []
    assert "the optimizer is Other; allowed are torch.optim.Adam" in problems(Other([param]))[0]
    assert "the optimizer is SGD" in problems(torch.optim.SGD([param], lr=1.0))[0]
    assert "amsgrad=True in a parameter group; it must be False" in problems(Same([param], amsgrad=True))[0]
