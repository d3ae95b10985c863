"""An optimizer over parameters in three places: the same bits, the same checkpoints, and memory where it belongs."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_mem.device import get_backend
from mindspeed_mem.device.cpu import CpuBackend
from mindspeed_mem.device.limited_cpu import CompilerError, LimitedMemory
from mindspeed_mem.device.simulated import SimulatedBackend
from mindspeed_mem.zero.optimizer.placed import Place, PlacedOptimizer
from mindspeed_mem.zero.optimizer.states import PlacedStates
from tests.guarding import settled
from tests.placed_runs import DEVICE, HOST, MAKES, OF_HOST, SMALL, SWAPPED, FusedAdam, Run, late, on_host, same
from tests.worlds import on_ranks, parallel

HALF = (torch.bfloat16, torch.float16, torch.float32)

# ---- the same bits


@given(
    kind=st.sampled_from(sorted(MAKES)),
    sizes=st.lists(st.one_of(st.integers(0, 3000), st.integers(10_000, 40_000)), min_size=1, max_size=6),
    data=st.data(),
    asynchronous=st.booleans(),
)
@settings(max_examples=80)
def test_every_place_has_the_optimizers_own_bits(kind, sizes, data, asynchronous):
    allowed = list(Place) if kind in OF_HOST else [DEVICE, SWAPPED]
    places = data.draw(st.lists(st.sampled_from(allowed), min_size=len(sizes), max_size=len(sizes)))
    missing = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=1))
    if kind == "Adafactor":  # it divides by the number of elements
        sizes = [size or 1 for size in sizes]
    backend = late() if asynchronous else CpuBackend()
    run = Run(kind, sizes, places, backend).steps(3, missing).steps(1)
    stock = Run(kind, sizes, None).steps(3, missing).steps(1)
    assert same(run.saved(), stock.saved())


@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize("kind", OF_HOST)
def test_a_step_without_gradients_counts_where_the_optimizer_counts_it(kind, place):
    run, stock = (Run(kind, [300, 500], places, CpuBackend()).steps(2, {0}) for places in ([place] * 2, None))
    assert same(run.steps(1).saved(), stock.steps(1).saved())


@pytest.mark.parametrize("shape", [(), (7, 11), (300, 200)])
@pytest.mark.parametrize("kind", ["AdamW", "Adafactor", "SGD momentum"])
def test_parameters_of_any_shape_are_swapped(kind, shape):
    run, stock = Run(kind, [shape], [SWAPPED], late()), Run(kind, [shape], None)
    assert same(run.steps(3).saved(), stock.steps(3).saved())


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("first_has_gradient", [False, True])
def test_adafactors_eps_is_that_of_the_whole_group(foreach, first_has_gradient):
    """torch takes it from the type of the first parameter with a gradient, for all of different types."""
    trained = []
    for placed in (False, True):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(8, 8).to(dtype)) for dtype in (torch.bfloat16, torch.float32) * 3]
        optimizer = torch.optim.Adafactor(params, foreach=foreach)
        if placed:
            places = dict.fromkeys(params[1:5], SWAPPED)
            PlacedOptimizer(optimizer, places, CpuBackend())
        for _ in range(2):
            for param in params:
                param.grad = torch.randn(8, 8).to(param.dtype) * 3e-3
            params[0].grad = params[0].grad if first_has_gradient else None
            optimizer.step()
        trained.append([*params, optimizer.param_groups[0]["eps"]])
    assert same(*trained)


def test_a_host_step_without_a_choice_differs_by_rounding_only():
    run, stock = Run("AdamW", [5000], [HOST], get_backend("cpu")).steps(5), Run("AdamW", [5000], None).steps(5)
    difference = (run.params[0] - stock.params[0]).abs()
    assert (difference <= 5 * (2**-23 * (stock.params[0].abs() + 0.1) + 2**-20 * 1e-2)).all()


# ---- checkpoints


@pytest.mark.parametrize("kind", OF_HOST)
@pytest.mark.parametrize("before, after", [(a, b) for a in (None, HOST, SWAPPED) for b in (None, HOST, SWAPPED)])
def test_a_run_goes_on_in_any_place_from_a_checkpoint_of_any(kind, before, after):
    sizes = [3000, 20_000, 500]

    def run(place):
        return Run(kind, sizes, place and [place, DEVICE, place], CpuBackend())

    whole, first, second = Run(kind, sizes, None).steps(5), run(before).steps(2), run(after)
    second.load(first.saved())
    second.generator = first.generator
    assert same(second.steps(3).saved(), whole.saved())


def test_a_parameter_changes_its_place_between_steps():
    backend = SimulatedBackend()
    run, stock = Run("AdamW fused", [3000], [DEVICE], backend), Run("AdamW fused", [3000], None)
    [param] = run.params
    for place in (SWAPPED, HOST, DEVICE, HOST, SWAPPED, DEVICE):
        run.placed._place_of = lambda param, place=place: place
        param.data = param.data.clone() if place is DEVICE else on_host(backend, param.data)
        run.steps(1)
        assert backend.owns(run.optimizer.state[param]["exp_avg"]) is (place is DEVICE)
        assert same(run.saved(), stock.steps(1).saved())


# ---- scale, clip, infinities


@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("loss_scale, clip", [(1.0, 1.0), (512.0, 1.0), (1.0, 0.3), (3.0, 0.7)])
def test_scale_and_clip_reach_every_place(place, on_device, loss_scale, clip):
    backend = late()
    run = Run("AdamW fused", [3000, 40_000], [place] * 2, backend)
    stock = Run("AdamW fused", [3000, 40_000], None)
    for param, own in zip(run.params, stock.params, strict=True):
        gradient = torch.randn(param.shape)
        own.grad = gradient / loss_scale * clip
        param.grad = gradient if on_device or place is DEVICE else on_host(backend, gradient)
    given = [param.grad.clone() for param in run.params]
    run.placed.scale_next(loss_scale, clip)
    run.optimizer.step()
    stock.optimizer.step()
    assert same(run.saved(), stock.saved())
    if place is not DEVICE:
        assert same(given, [param.grad for param in run.params])
    for param, own in zip(run.params, stock.params, strict=True):  # the next step is not scaled
        own.grad = param.grad = torch.ones(param.shape)
    run.optimizer.step()
    stock.optimizer.step()
    assert same(run.saved(), stock.saved())


@pytest.mark.parametrize("kind, where", [({"fused": True}, "meta"), ({"capturable": True}, "meta"), ({}, "cpu")])
def test_a_step_count_goes_to_the_device_with_its_parameter_where_the_kernel_reads_it(kind, where):
    param = torch.nn.Parameter(torch.empty(100, device="meta"))
    optimizer = torch.optim.AdamW([param], **kind)
    states, group = PlacedStates(optimizer, late()), optimizer.param_groups[0]
    made = states.on_host(param, group, adam=True)
    assert {key: value.device.type for key, value in made.items()} == dict.fromkeys(made, "cpu") and len(made) == 3
    states.settle(param, group, on_host=False)
    devices = {key: value.device.type for key, value in optimizer.state[param].items()}
    assert devices == {"step": where, "exp_avg": "meta", "exp_avg_sq": "meta"}
    assert optimizer.state[param]["step"].dtype is torch.float32


# ---- memory


@pytest.fixture
def memory():
    """The host's memory, counted as a device's."""
    try:
        memory = LimitedMemory()
    except CompilerError as error:
        pytest.skip(str(error))
    with memory:
        yield memory


@pytest.mark.parametrize("kind", ["AdamW fused", "SGD momentum"])
def test_on_the_device_there_is_a_buffer_during_the_step_and_nothing_after_it(memory, kind):
    backend = CpuBackend()
    backend.attach_ledger(memory)
    run = Run(kind, [200_000, 3000, 50_000], [SWAPPED] * 3, backend)
    host = [on_host(backend, torch.randn(param.shape)) for param in run.params]
    for _ in range(3):
        for param, gradient in zip(run.params, host, strict=True):
            param.grad = gradient
        before = settled(memory)
        memory.reset_peak()
        run.optimizer.step()
        assert memory.allocated - before <= 512  # step counts
        assert memory.peak - before <= 2 * SMALL  # a buffer, and states made by the optimizer itself


def test_on_the_host_a_step_needs_no_device_memory(memory):
    backend = CpuBackend()
    backend.attach_ledger(memory)
    run = Run("AdamW", [200_000, 3000], [HOST] * 2, backend)
    host = [on_host(backend, torch.randn(param.shape)) for param in run.params]
    for param, gradient in zip(run.params, host, strict=True):
        param.grad = gradient
    before = settled(memory)
    memory.reset_peak()
    run.optimizer.step()
    assert memory.peak == memory.allocated == before
    for param in run.params:  # as a loaded checkpoint leaves it, or Megatron before it saves a first one
        run.optimizer.state[param]["exp_avg"] = torch.zeros_like(param)
    run.placed.settle()
    assert memory.allocated == before


def test_a_step_without_room_for_its_buffer_can_be_tried_again(memory):
    backend = CpuBackend()
    backend.attach_ledger(memory)
    run, stock = Run("AdamW", [20_000, 3000], [SWAPPED, DEVICE], backend), Run("AdamW", [20_000, 3000], None)
    for param, own in zip(run.params, stock.params, strict=True):
        param.grad, own.grad = torch.ones(param.shape), torch.ones(param.shape) * 0.5
    run.placed.scale_next(clip=0.5)
    memory.limit = memory.allocated + 1000
    with pytest.raises(RuntimeError) as error:
        run.optimizer.step()
    assert backend.is_out_of_memory(error.value)
    memory.limit = None
    run.optimizer.step()
    stock.optimizer.step()
    assert same(run.saved(), stock.saved())


# ---- the optimizer stays what it was


def test_hooks_schedulers_and_closures_work_as_before():
    run = Run("AdamW", [3000, 20_000, 100], list(Place), late())
    calls = []
    run.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    run.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5)

    def closure():
        calls.append("closure")
        sum(param.square().sum() for param in run.params).backward()
        return 7

    run.optimizer.zero_grad()
    assert run.optimizer.step(closure) == 7
    scheduler.step()
    assert calls == ["pre", "closure", "post"]
    assert [group["lr"] for group in run.optimizer.param_groups] == [5e-3, 1.5e-3]
    assert isinstance(run.optimizer, torch.optim.AdamW)


def test_a_failing_step_leaves_groups_and_state_in_place():
    run = Run("AdamW", [300, 20_000], [SWAPPED] * 2, late()).steps(1)
    groups, state = run.optimizer.param_groups, run.optimizer.state
    run.optimizer.param_groups[1]["betas"] = (0.9, "x")
    with pytest.raises(TypeError):
        run.steps(1)
    assert run.optimizer.param_groups is groups and run.optimizer.state is state
    assert [id(param) for group in groups for param in group["params"]] == [id(param) for param in run.params]


class LooksLikeFusedAdam(FusedAdam):
    """Has all of its attributes, and a step of its own."""

    def step(self, closure=None):
        raise NotImplementedError


def test_what_cannot_be_done_is_refused_with_all_reasons():
    with pytest.raises(ValueError, match="the optimizer is SGD; allowed are torch.optim.Adam and AdamW"):
        Run("SGD", [10], [HOST], CpuBackend())
    with pytest.raises(ValueError, match="amsgrad=True in a parameter group; it must be False"):
        Run("AdamW amsgrad", [10], [HOST], CpuBackend())
    Run("AdamW amsgrad", [10], [SWAPPED], CpuBackend()).steps(1)
    run = Run("AdamW", [10, 10], [HOST, SWAPPED], CpuBackend())
    with pytest.raises(ValueError, match="has been replaced already"):
        PlacedOptimizer(run.optimizer, {}, CpuBackend())
    run.optimizer.param_groups[0]["amsgrad"] = True
    run.params[0].data = run.params[0].data.double()
    run.params[0].grad = run.params[0].data
    with pytest.raises(ValueError) as error:
        run.optimizer.step()
    assert "amsgrad=True" in str(error.value) and "torch.float64 on cpu" in str(error.value)
    param = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="LBFGS is not known to step each parameter without looking at others"):
        PlacedOptimizer(torch.optim.LBFGS([param]), {param: SWAPPED}, CpuBackend())
    # What has the attributes of a FusedAdam, as Apex' FusedLAMB does, is none.
    with pytest.raises(ValueError, match="LooksLikeFusedAdam is not known to step each parameter"):
        PlacedOptimizer(LooksLikeFusedAdam([param], 1e-2, 0.1), {param: SWAPPED}, CpuBackend())
    with pytest.raises(ValueError, match="the optimizer is LooksLikeFusedAdam; allowed are"):
        PlacedOptimizer(LooksLikeFusedAdam([param], 1e-2, 0.1), {param: HOST}, CpuBackend())
    with pytest.raises(ValueError, match="group_bytes=1; give at least 65536"):
        Run("AdamW", [10], [SWAPPED], CpuBackend(), group_bytes=1)


# ---- in Megatron


def train(places, resumed):
    """Three steps of Megatron's distributed optimizer, the last one after a resume from a checkpoint, if wanted."""
    from tests.models import build_gpt, build_optimizer, train_step

    def build():
        chunks = build_gpt(layers=1, dtype=torch.bfloat16, ddp={"use_distributed_optimizer": True})
        [optimizer] = build_optimizer(chunks).chained_optimizers
        for group in optimizer.optimizer.param_groups:
            group["fused"] = True  # as the host steps
            for index, param in enumerate(group["params"] if places else ()):
                where[param] = places[index % len(places)]
                if where[param] is not DEVICE:
                    param.data = on_host(CPU, param.data)
        if places:
            PlacedOptimizer(optimizer.optimizer, where, CPU, group_bytes=SMALL)
        return chunks, optimizer

    where = {}
    with parallel():
        chunks, optimizer = build()
        losses = [train_step(chunks, optimizer=optimizer, step=step).loss for step in range(2)]
        if resumed:
            saved = copy.deepcopy((optimizer.state_dict(), optimizer.get_parameter_state_dp_zero()))
            weights = copy.deepcopy(chunks[0].state_dict())
            chunks, optimizer = build()
            chunks[0].load_state_dict(weights)
            optimizer.load_state_dict(saved[0])
            optimizer.load_parameter_state_from_dp_zero(saved[1])
        losses.append(train_step(chunks, optimizer=optimizer, step=2).loss)
        state = optimizer.get_parameter_state_dp_reshardable()
        return losses, state, [param.detach() for param in chunks[0].parameters()], len(set(where.values()))


CPU = CpuBackend()


@pytest.mark.distributed
def test_megatrons_distributed_optimizer_trains_and_resumes_with_the_same_bits():
    stock = on_ranks(2, train, None, False)
    for resumed in (False, True):
        placed = on_ranks(2, train, [HOST, SWAPPED, DEVICE], resumed)
        assert [rank[3] for rank in placed] == [3, 3]
        assert same([rank[:3] for rank in placed], [rank[:3] for rank in stock])
