"""What the accelerator promises, as torch.cuda and as torch.npu; and that it finds a mistake."""

import ctypes
import os
import signal
import threading
import time

import pytest
import torch

from tests.accelerator import stand_in
from tests.worlds import on_ranks

KIB, MIB = 2**10, 2**20


def device():
    """The module that it stands in for, and its name."""
    kind = os.environ["ACCELERATOR_KIND"]
    return getattr(torch, kind), kind


def on_both(case):
    """A test that runs `case` in a process of each kind."""

    @pytest.mark.parametrize("kind", ["cuda", "npu"])
    def test(kind):
        on_ranks(1, _checked, case.__name__, device=kind)

    return test


def _checked(name):
    globals()[name]()
    device()[0].synchronize()
    stand_in.check()


# ---- memory


def unreadable():
    tensor = torch.ones(10, device=device()[1])
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(tensor.data_ptr(), 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def poisoned():
    _, kind = device()
    first = torch.ones(1000, device=kind)
    address = first.data_ptr()
    assert torch.empty(1000, device=kind).isnan().all()
    del first
    again = torch.empty(1000, device=kind)
    assert again.data_ptr() == address and again.isnan().all()


def kept_and_split():
    module, kind = device()
    module.empty_cache()
    start = module.memory_reserved()
    stand_in.reset_counters()
    tensors = [torch.empty(512, dtype=torch.uint8, device=kind) for _ in range(256)]
    # Four segments for all, or fewer where earlier cases have left room in theirs.
    assert module.memory_reserved() - start in range(0, 160 * KIB, 32 * KIB)
    large = torch.empty(8 * MIB + 1, dtype=torch.uint8, device=kind)
    assert module.memory_allocated() >= 256 * 512 + 8 * MIB
    del large
    held = module.memory_reserved()
    with stand_in.promised():
        halves = [torch.empty(4 * MIB, dtype=torch.uint8, device=kind) for _ in range(2)]  # of what is kept
    assert module.memory_reserved() == held
    del halves
    with stand_in.promised():
        whole = torch.empty(8 * MIB, dtype=torch.uint8, device=kind)  # and put together again
    del tensors, whole
    module.empty_cache()
    assert module.memory_reserved() <= start


def limited():
    module, kind = device()
    module.empty_cache()
    free, total = module.mem_get_info()
    assert total == module.get_device_properties(0).total_memory and free == total - module.memory_reserved()
    module.reset_peak_memory_stats()
    before, retries = module.memory_allocated(), module.memory_stats()["num_alloc_retries"]
    module.set_per_process_memory_fraction((module.memory_reserved() + 8 * MIB) / total)
    try:
        kept = torch.empty(6 * MIB, dtype=torch.uint8, device=kind)
        del kept
        torch.empty(7 * MIB, dtype=torch.uint8, device=kind)  # only once what is kept has been given back
        assert module.memory_stats()["num_alloc_retries"] == retries + 1
        with pytest.raises(torch.OutOfMemoryError, match="out of memory. Tried to allocate 16777216 bytes"):
            torch.empty(16 * MIB, dtype=torch.uint8, device=kind)
    finally:
        module.set_per_process_memory_fraction(1.0)
    assert module.max_memory_allocated() == before + 7 * MIB
    torch.empty(16 * MIB, dtype=torch.uint8, device=kind)


def resized():
    _, kind = device()
    tensor = torch.arange(100, device=kind, dtype=torch.float32)
    storage = tensor.untyped_storage()
    storage.resize_(0)
    with pytest.raises(RuntimeError, match="whose storage was resized to 0 bytes"):
        tensor + 1
    storage.resize_(400)
    tensor.copy_(torch.arange(100))
    assert tensor.sum().item() == 4950


# ---- streams and races


def asynchronous():
    module, kind = device()
    tensor = torch.zeros(10, device=kind)
    gate = torch.ops.accelerator.new_gate()
    torch.ops.accelerator.wait_at_gate(gate)
    tensor += 1
    event = module.Event()
    event.record()
    time.sleep(0.01)
    assert not event.query() and not module.current_stream().query()
    threading.Timer(0.02, torch.ops.accelerator.open_gate, [gate]).start()
    assert tensor.sum().item() == 10
    assert event.query() and module.current_stream().query()


def lags_by_stream():
    module, kind = device()
    side = module.Stream()
    tensor = torch.zeros(10, device=kind)
    module.synchronize()
    for lag, late in (("compute", module.default_stream()), ("side", side)):
        soon = side if late != side else module.default_stream()
        with stand_in.lagging(**{lag: 200_000}):
            ends = []
            for stream in (late, soon):
                with module.stream(stream):
                    ends.append(module.Event())
                    ends[-1].record()
            ends[1].synchronize()
            assert not ends[0].query()
        module.synchronize()
    with stand_in.lagging(random=1000, seed=3):
        for _ in range(20):
            tensor += 1
    assert tensor.sum().item() == 200


def times_events():
    module, _ = device()
    begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    begin.record()
    begin.synchronize()
    gate = torch.ops.accelerator.new_gate()
    torch.ops.accelerator.wait_at_gate(gate)
    end.record()
    time.sleep(0.02)
    torch.ops.accelerator.open_gate(gate)
    end.synchronize()
    assert 20 <= begin.elapsed_time(end)
    with pytest.raises(RuntimeError, match="enable_timing"):
        module.Event().elapsed_time(end)


def races_of_reads_and_writes():
    module, kind = device()
    side = module.Stream()
    tensor = torch.ones(1000, device=kind)
    with module.stream(side), pytest.raises(RuntimeError, match="race: aten::add reads memory that aten::fill_"):
        tensor + 1
    side.wait_stream(module.current_stream())
    with module.stream(side):
        other = tensor[:500] + 1
        other.record_stream(module.default_stream())
    tensor[500:] += 1  # what nobody else uses
    with pytest.raises(RuntimeError, match=r"race: aten::add writes memory that aten::add on stream \d+ reads"):
        tensor += 1
    side.synchronize()  # the host has seen it: what it submits from now on comes after
    tensor += 1
    assert (other == 2).all() and (tensor == torch.tensor([2.0, 3.0], device=kind).repeat_interleave(500)).all()


def races_of_freed_memory():
    module, kind = device()
    side, compute = module.Stream(), module.current_stream()

    def used_beside(then):
        module.synchronize()
        tensor = torch.ones(300 * KIB, device=kind)
        side.wait_stream(compute)
        with module.stream(side):
            tensor.sum()
        then(tensor)
        address = tensor.data_ptr()
        del tensor
        again = torch.empty(300 * KIB, device=kind)
        return again.data_ptr() == address

    with pytest.raises(RuntimeError, match="freed memory is handed out again that is still read by aten::sum"):
        used_beside(lambda tensor: None)
    assert used_beside(lambda tensor: compute.wait_stream(side))
    assert used_beside(lambda tensor: side.synchronize())
    with stand_in.lagging(side=20_000):
        assert not used_beside(lambda tensor: tensor.record_stream(side))


def faults_of_kernels():
    _, kind = device()
    table = torch.ones(3, 2, device=kind)
    torch.embedding(table, torch.tensor([5], device=kind))
    with pytest.raises(RuntimeError, match="on a stream: aten::index_select: index out of range"):
        device()[0].synchronize()


# ---- pinned memory


def pinned():
    module, kind = device()
    tensor, loose = torch.arange(1000, device=kind), torch.zeros(1000, dtype=torch.long)
    held = torch.zeros(1000, dtype=torch.long).pin_memory()
    assert held.is_pinned() and not loose.is_pinned()
    stand_in.reset_counters()
    with stand_in.promised():
        held.copy_(tensor, non_blocking=True)
        tensor.copy_(held, non_blocking=True)
        for late in (lambda: loose.copy_(tensor, non_blocking=True), lambda: tensor.copy_(loose, non_blocking=True)):
            with pytest.raises(RuntimeError, match="host synchronisation where none was promised: .* not pinned"):
                late()
        with pytest.raises(RuntimeError, match="pinned allocation where none was promised"):
            torch.empty(1, pin_memory=True)
    assert stand_in.counters()["copy to the host"] == stand_in.counters()["copy to the device"] == 1
    module.synchronize()
    assert held.sum() == tensor.sum().item() == 999 * 500
    loose.copy_(tensor)
    assert loose.sum() == 999 * 500


def pinned_memory_in_use():
    _, kind = device()
    own = torch.ops.accelerator
    host = torch.zeros(4096, dtype=torch.uint8)
    assert own.host_register(host.data_ptr(), 4096) == 0 and host.is_pinned()
    gate = own.new_gate()
    own.wait_at_gate(gate)
    host.copy_(torch.ones(4096, dtype=torch.uint8, device=kind), non_blocking=True)
    own.host_unregister(host.data_ptr())
    own.open_gate(gate)
    with pytest.raises(RuntimeError, match="pinned host memory was freed while a copy still uses it"):
        device()[0].synchronize()
    own.limit_pinned(0)
    try:
        assert own.host_register(host.data_ptr(), 4096) == 2
        with pytest.raises(RuntimeError, match="a call that was refused"):  # the next kernel is blamed
            torch.zeros(1, device=kind)
        torch.zeros(1, device=kind)
        with pytest.raises(RuntimeError, match="cannot be pinned"):
            torch.empty(1, pin_memory=True)
    finally:
        own.limit_pinned(2**62)


# ---- promises


def promises():
    module, kind = device()
    tensor = torch.arange(4.0, device=kind)
    event = module.Event()
    event.record()
    waits = {
        ".item": lambda: tensor.sum().item(),
        "aten::nonzero": lambda: tensor.nonzero(),
        "aten::masked_select": lambda: tensor.masked_select(tensor > 1),
        "stream.synchronize": module.current_stream().synchronize,
        "device.synchronize": module.synchronize,
        "event.synchronize": event.synchronize,
        "copy to the host": tensor.cpu,
    }
    with stand_in.promised():
        for name, wait in waits.items():
            with pytest.raises(RuntimeError, match="host synchronisation where none was promised: .*" + name):
                wait()
        with pytest.raises(RuntimeError, match="driver allocation where none was promised"):
            torch.empty(50 * MIB, device=kind)
        tensor += 1
        event.query()
    for wait in waits.values():
        wait()


# ---- what else torch asks of a device


def random_numbers():
    module, kind = device()
    module.manual_seed_all(5)
    state = module.get_rng_state()
    assert state.device.type == "cpu" and state.numel() == 16
    with stand_in.lagging(random=2000, seed=1):
        first = [torch.randn(5, device=kind), torch.nn.functional.dropout(torch.ones(50, device=kind), 0.5)]
    module.set_rng_state(state)
    second = [torch.randn(5, device=kind), torch.nn.functional.dropout(torch.ones(50, device=kind), 0.5)]
    assert all(map(torch.equal, first, second)) and not torch.equal(torch.randn(5, device=kind), first[0])
    with torch.random.fork_rng(device_type=kind):
        inside = torch.rand(3, device=kind)
    assert torch.equal(inside, torch.rand(3, device=kind))
    generator = torch.Generator(kind).manual_seed(7)
    assert torch.equal(
        torch.rand(3, device=kind, generator=generator), torch.rand(3, device=kind, generator=generator.manual_seed(7))
    )


def autocasts():
    _, kind = device()
    one = torch.ones(4, 4, device=kind)
    with torch.autocast(kind, dtype=torch.bfloat16):
        assert (one @ one).dtype == torch.nn.functional.linear(one, one).dtype == torch.bfloat16
        assert (one + one).dtype == torch.float32


def two_devices():
    module, kind = device()
    assert module.device_count() == 2 and module.current_device() == 0
    with module.device(1):
        assert torch.empty(1, device=kind).device.index == module.current_device() == 1
    there, here = torch.arange(5.0, device=f"{kind}:1"), torch.arange(5.0, device=f"{kind}:0")
    with pytest.raises(RuntimeError, match="same device"):
        there + here
    with pytest.raises(RuntimeError, match="same device"):
        here + torch.ones(5)
    assert torch.equal((there * 2).to(f"{kind}:0"), here * 2)
    module.set_per_process_memory_fraction(0.001, 1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(50 * MIB, device=f"{kind}:1")
    module.set_per_process_memory_fraction(1.0, 1)
    torch.empty(50 * MIB, device=f"{kind}:0")


def operators():
    _, kind = device()
    functions = {
        "in place": lambda x: x.clone().mul_(2).sub_(x),
        "out": lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
        "views": lambda x: x.view(2, -1).t()[1:, :].unfold(0, 2, 1).sum(-1),
        "of bits": lambda x: x.view(torch.int32) & 0xFF,
        "expanded": lambda x: x[:, None].expand(-1, 3, -1).contiguous(),
        "index": lambda x: x[torch.tensor([1, 0])],
        "index of the device": lambda x: x[torch.tensor([1, 0], device=x.device)].cumsum(0),
        "chosen": lambda x: x[x > 0],
        "sorted": lambda x: torch.cat([part.float().flatten() for part in x.sort()]),
        "best": lambda x: x.topk(2)[0],
        "split": lambda x: torch.stack(x.split(2, 1)),
        "scattered": lambda x: torch.zeros_like(x).scatter_add_(1, (x > 0).long(), x),
        "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
            x[None], x[None], x[None], is_causal=True
        ),
        "halved": lambda x: x.bfloat16() @ x.bfloat16().t(),
        "several": lambda x: torch.stack(torch._foreach_mul([x, x + 1], 2.0)),
        "norm": lambda x: torch.nn.functional.layer_norm(x, (4,)) + torch.nn.functional.rms_norm(x, (4,)),
        "entropy": lambda x: torch.nn.functional.cross_entropy(x, torch.arange(4, device=x.device)),
        "counted": lambda x: torch.bincount(torch.arange(4, device=x.device) % 2),
    }
    data = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    with stand_in.lagging(random=300, seed=2):
        for name, function in functions.items():
            torch.testing.assert_close(function(data.to(kind)).cpu(), function(data), msg=name)


def trains():
    _, kind = device()
    results = []
    for place in ("cpu", kind):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 8)
        )
        model = model.to(place)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            loss = (
                torch.utils.checkpoint.checkpoint(model, torch.ones(2, 8, device=place), use_reentrant=False)
                .square()
                .sum()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append([loss.item(), *(parameter.detach().cpu() for parameter in model.parameters())])
    torch.testing.assert_close(results[0], results[1])


def compiles():
    _, kind = device()
    data = torch.linspace(-1, 1, 32, device=kind, requires_grad=True)
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(lambda x: torch.nn.functional.silu(x) * x.tanh(), backend=backend, fullgraph=True)
        (gradient,) = torch.autograd.grad(compiled(data).sum(), data)
        (wanted,) = torch.autograd.grad((torch.nn.functional.silu(data) * data.tanh()).sum(), data)
        assert torch.equal(gradient, wanted)


test_memory_cannot_be_read_by_the_host = on_both(unreadable)
test_new_and_freed_memory_is_poisoned = on_both(poisoned)
test_freed_memory_is_kept_split_and_merged = on_both(kept_and_split)
test_memory_has_a_limit_and_figures = on_both(limited)
test_storages_are_emptied_and_filled = on_both(resized)
test_work_is_asynchronous = on_both(asynchronous)
test_streams_lag = on_both(lags_by_stream)
test_events_tell_times = on_both(times_events)
test_a_missing_wait_is_found = on_both(races_of_reads_and_writes)
test_memory_that_is_freed_too_early_is_found = on_both(races_of_freed_memory)
test_a_kernel_that_fails_is_heard_of = on_both(faults_of_kernels)
test_only_pinned_memory_is_copied_without_waiting = on_both(pinned)
test_pinned_memory_that_is_freed_in_use_is_found_and_its_limit_kept = on_both(pinned_memory_in_use)
test_promises_are_kept_or_raise = on_both(promises)
test_random_numbers = on_both(random_numbers)
test_autocast = on_both(autocasts)
test_two_devices = on_both(two_devices)
test_operators_give_what_the_host_gives = on_both(operators)
test_a_model_trains_as_on_the_host = on_both(trains)
test_torch_compile = on_both(compiles)
