"""Collectives while memory is short: room is made before they begin, and none is repeated."""

import pytest
import torch

from mindspeed_mem.device import collectives, get_backend
from tests.guarding import GaveUp, N, Sandbag, guarded, limited_memory, numbers


@pytest.fixture
def memory():
    with limited_memory() as memory:
        yield memory


deprecated = pytest.mark.filterwarnings("ignore:.*(deprecated|will be deprecated):FutureWarning")


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed
    torch.distributed.destroy_process_group()


@deprecated
def test_a_collective_finds_room_made(memory, one_rank):
    """gloo copies what it reduces and scatters, in the calling thread: a lack inside could not be repaired."""
    whole, part, sandbag = numbers(N), torch.zeros(N), Sandbag(memory)
    guard = guarded(sandbag)
    memory.limit = memory.allocated + 100
    with pytest.raises(torch.OutOfMemoryError):
        one_rank.reduce_scatter_tensor(part, whole)
    with guard:
        one_rank.reduce_scatter_tensor(part, whole)
        asked = list(sandbag.asked)
        one_rank.all_reduce(part)
    memory.limit = None
    assert asked == sandbag.asked == [2 * whole.nbytes - 100]
    assert {tensor.untyped_storage()._cdata for tensor in (whole, part)} <= sandbag.pinned[0]
    assert guard.lacks == 1 and torch.equal(whole, part)


@deprecated
def test_a_collective_that_fails_all_the_same_is_not_repeated(memory, one_rank):
    whole, part, sandbag = numbers(N), torch.zeros(N), Sandbag(memory, pieces=0)
    memory.limit = memory.allocated + 100
    with pytest.raises(GaveUp, match="is a collective"), guarded(sandbag):
        one_rank.reduce_scatter_tensor(part, whole)
    memory.limit = None
    assert len(sandbag.asked) == 1


@deprecated
@pytest.mark.needs_torch("2.7", "it copies in the caller's thread")
def test_what_gloo_copies_in_threads_of_its_own_is_not_counted(memory, one_rank):
    """Nobody could make room there."""
    tensors = [numbers(N), numbers(N, seed=1)]  # it copies them into one
    expected = [tensor.numpy().copy() for tensor in tensors]
    memory.limit = memory.allocated + 100
    memory.reset_peak()
    most = memory.limit
    one_rank.all_reduce_coalesced(tensors, async_op=True).wait()
    memory.limit = None
    assert memory.peak <= most
    assert [tensor.numpy().tobytes() for tensor in tensors] == [one.tobytes() for one in expected]


class _Accelerator(type(get_backend("cpu"))):
    def index(self):
        return 0


@pytest.mark.parametrize(("backend", "nothing"), [(get_backend("cpu"), False), (_Accelerator(), True)])
def test_what_collectives_allocate(backend, nothing):
    whole, parts, c10d = torch.zeros(8), list(torch.zeros(8).chunk(2)), torch.ops.c10d
    base = collectives.scratch_bytes(c10d._allgather_base_.default, (whole, parts[0]), {}, backend)
    assert base == (0 if nothing else whole.nbytes + parts[0].nbytes)
    assert collectives.scratch_bytes(c10d.allgather_.default, ([parts], [parts[0]]), {}, backend) == 3 * parts[0].nbytes
    for op in (c10d.allreduce_.default, c10d.send.default, c10d.recv_.default):
        assert collectives.scratch_bytes(op, ([whole],), {}, backend) == 0
    functional = torch.ops._c10d_functional.all_gather_into_tensor.default
    assert collectives.scratch_bytes(functional, (whole, 4, "0"), {}, backend) == 4 * whole.nbytes
