"""torch.cuda on the host: what Megatron asks of it gets a right answer."""

from __future__ import annotations

import pytest
import torch

from tests.worlds import on_ranks

pytestmark = pytest.mark.distributed


def run(case, size=1):
    """Run a case that asserts for itself on ranks with the CPU patches."""
    on_ranks(size, case)


def devices():
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
    torch.cuda.set_device(3)
    assert torch.cuda.current_device() == "cpu"
    assert torch.cuda.get_device_capability() == (0, 0)
    assert torch.cuda.get_device_properties(torch.device("cuda:0")).total_memory > 2**28
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push("here")
    torch.cuda.nvtx.range_pop()


def test_devices():
    run(devices)


def counted():
    import os

    assert torch.cuda.device_count() == int(os.environ["LOCAL_WORLD_SIZE"]) == 2


def test_a_machine_has_as_many_devices_as_ranks():
    run(counted, 2)


def on_the_device_of(like: torch.Tensor) -> torch.Tensor:
    kept = torch.empty((3,), dtype=torch.long, device=like.device)
    return torch.zeros_like(kept) + torch.arange(3, device=like.device)


def factories():
    sample = torch.ones(2)
    for device in ("cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 1), 0, "cpu"):
        made = [
            torch.empty(2, device=device, pin_memory=True),
            torch.tensor([1.0], dtype=torch.float, device=device),
            torch.rand(3, device=device),
            torch.arange(3, device=device),
            torch.zeros_like(sample, device=device),
        ]
        assert {tensor.device.type for tensor in made} == {"cpu"}, device
        assert sample.to(device) is sample and sample.to(device=device, non_blocking=True) is sample
        assert sample.to(device, torch.float64).dtype is torch.float64
        layer = torch.nn.Linear(2, 2)
        assert layer.to(device) is layer and layer.to(device=device, dtype=torch.float64).weight.device.type == "cpu"
    assert torch.empty(2, device="meta").is_meta
    assert torch.jit.script(on_the_device_of)(sample).tolist() == [0, 1, 2]
    with torch.device("meta"):
        assert torch.empty(2).is_meta
    assert sample.to(torch.ones(1, dtype=torch.int32)).dtype is torch.int32 and sample.to("meta").is_meta
    assert sample.cuda() is sample
    assert sample.cuda(0, non_blocking=True) is sample
    model = torch.nn.Linear(2, 2)
    weight = model.weight
    assert model.cuda(torch.cuda.current_device()).weight is weight


def test_tensors_for_the_device_land_on_the_host():
    run(factories)


def types():
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.nn.Parameter(torch.ones(1).half()).type() == "torch.cuda.HalfTensor"
    assert torch.ones(1).type(torch.float64).dtype == torch.float64
    assert torch.ones(1).type("torch.cuda.IntTensor").dtype == torch.int32


def test_types_are_named_as_on_a_device():
    run(types)


def streams():
    import threading

    side, default = torch.cuda.Stream(), torch.cuda.default_stream()
    assert torch.cuda.current_stream() is default
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
        assert seen == [default]
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() is side
    assert torch.cuda.current_stream() is default
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="two recorded events"):
        first.elapsed_time(last)
    first.record()
    side.wait_event(side.record_event(last))
    side.wait_stream(default)
    assert last.query() and first.elapsed_time(last) >= 0
    torch.ones(1).record_stream(side)


def test_streams_are_identities_of_each_thread():
    run(streams)


def memory():
    allocated = torch.cuda.memory_allocated()
    assert 2**26 < allocated <= torch.cuda.max_memory_allocated()
    kept = torch.ones(2**26)
    assert torch.cuda.memory_allocated() > allocated + 2**27
    assert torch.cuda.max_memory_reserved() >= torch.cuda.memory_reserved() > 2**27
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] >= kept.nbytes


def test_memory_figures_are_the_processes_own():
    run(memory)


def random_numbers():
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), first)
    with torch.random.fork_rng():
        torch.rand(5)
    second = torch.rand(3)
    torch.cuda.set_rng_state(state)
    torch.rand(3)
    assert torch.equal(torch.rand(3), second)


def test_the_hosts_generator_is_the_devices():
    run(random_numbers)


def trackers():
    import logging

    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.addHandler(handler)
    tracker = CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("a", 7)
    outside = torch.get_rng_state()
    with tracker.fork("a"):
        inside = torch.rand(2)
    assert torch.equal(torch.get_rng_state(), outside)
    with tracker.fork("a"):
        assert not torch.equal(torch.rand(2), inside)  # it goes on where it stopped
    torch.manual_seed(7)
    assert torch.equal(torch.rand(2), inside)
    with pytest.raises(ValueError, match="of the body"), tracker.fork("a"):
        raise ValueError("of the body")
    logger.warning("heard")
    logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == ["heard"]


def test_megatrons_tracker_forks_it_quietly():
    run(trackers)


def loaders():
    from torch.utils.data import DataLoader

    torch.manual_seed(3)
    before = torch.get_rng_state()
    loader = DataLoader(list(range(4)), batch_size=2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert torch.equal(torch.get_rng_state(), before)
    assert loader.generator is None
    given = torch.Generator().manual_seed(1)
    state = given.get_state()
    iter(DataLoader(list(range(4)), generator=given))
    assert not torch.equal(given.get_state(), state)


def test_data_loaders_leave_it_alone():
    run(loaders)


def compiled():
    def function(x):
        return x + 1

    assert torch.compile(function) is function
    assert torch.compile(function, dynamic=True) is function
    assert torch.compile(mode="max-autotune")(function) is function


def test_nothing_is_compiled():
    run(compiled)


def groups():
    import torch.distributed as dist

    group = dist.new_group([0, 1], backend="nccl", pg_options=object())
    assert dist.get_backend(group) == "gloo"
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert float(total) == 2
    dist.barrier(group=group, device_ids=[0])
    dist.destroy_process_group(group)


def test_groups_are_gloos():
    run(groups, 2)


def sends(batched: bool):
    """The sender takes the storage away at once; the receiver starts late."""
    import time

    import torch.distributed as dist

    size = 4_000_000
    if dist.get_rank() == 0:
        tensor = torch.arange(size, dtype=torch.float32)
        if batched:
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1)])
        else:
            works = [dist.isend(tensor, 1)]
        tensor.fill_(torch.nan)
        tensor.data = torch.empty(1)
    else:
        time.sleep(0.3)
        got = torch.empty(size)
        works = [dist.irecv(got, 0)]
    for work in works:
        work.wait()
    assert dist.get_rank() == 0 or torch.equal(got, torch.arange(size, dtype=torch.float32))


@pytest.mark.parametrize("batched", [False, True])
def test_what_is_sent_may_be_overwritten(batched):
    on_ranks(2, sends, batched)
