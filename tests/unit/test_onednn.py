"""oneDNN's kernels run out of memory: torch would let others compute, and the guard does not let it."""

import pytest
import torch

from mindspeed_mem.device import onednn
from tests.guarding import GaveUp, Sandbag, guarded, limited_memory, numbers


@pytest.fixture
def memory():
    with limited_memory() as memory:
        yield memory


onednn_computes_bf16 = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN does not compute bf16 products on this CPU",
)


def halves(*shape, seed=0):
    return numbers(*shape, seed=seed, dtype=torch.bfloat16)


PRODUCTS = {
    "baddbmm": lambda: torch.baddbmm(halves(8, 64, 64, seed=2), halves(8, 64, 64), halves(8, 64, 64, seed=1)),
    "strided": lambda: torch.bmm(halves(8, 64, 64)[:, :, ::2], halves(8, 64, 64, seed=1)[:, ::2]),
    "out": lambda: torch.bmm(
        halves(8, 64, 64)[:, :, ::2], halves(8, 64, 64, seed=1)[:, ::2], out=torch.empty(8, 64, 64).bfloat16()
    ),
}


@onednn_computes_bf16
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", PRODUCTS)
def test_no_other_kernel_computes_where_onednn_lacked_memory(memory, name):
    run, retries = PRODUCTS[name], 0
    expected = run().float().numpy().copy()
    for room in range(0, 1 << 18, 1 << 13):
        sandbag = Sandbag(memory, pieces=256)
        guard = guarded(sandbag)
        memory.limit = memory.allocated + room
        try:
            with guard:
                result = run()
        finally:
            memory.limit = None
        assert torch._C._get_mkldnn_enabled()
        assert result.float().numpy().tobytes() == expected.tobytes(), f"{room} bytes of room"
        retries += guard.retries
        del result, sandbag, guard
    assert retries


@pytest.fixture
def product_in_place(memory):
    """Adds to a tensor a product that oneDNN cannot compute in the memory left."""
    target, one, other = halves(8, 64, 64), halves(8, 64, 64, seed=1), halves(8, 64, 64, seed=2)
    memory.limit = memory.allocated + target.nbytes + 4096
    yield lambda: target.baddbmm_(one[:, :, ::2], other[:, ::2])
    memory.limit = None


@onednn_computes_bf16
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_what_another_kernel_has_written_in_place_is_not_repeated(memory, product_in_place):
    sandbag = Sandbag(memory, pieces=0)
    with pytest.raises(GaveUp, match="has changed its arguments already"), guarded(sandbag):
        product_in_place()
    assert torch._C._get_mkldnn_enabled() and not sandbag.asked


@onednn_computes_bf16
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_without_the_guard_it_is_noticed_at_the_end(memory, product_in_place):
    with pytest.raises(onednn.FellBackError, match="oneDNN"), onednn.noticed(memory):
        product_in_place()
    assert torch._C._get_mkldnn_enabled()
    with pytest.raises(KeyError), onednn.noticed(memory):
        product_in_place()
        raise KeyError
    assert torch._C._get_mkldnn_enabled()


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_who_switches_onednn_off_keeps_it_off(memory):
    one, sandbag = numbers(64, 64), Sandbag(memory)
    with torch.backends.mkldnn.flags(enabled=False), onednn.noticed(memory):
        memory.limit = memory.allocated
        with guarded(sandbag):
            one @ one
        memory.limit = None
        assert not torch._C._get_mkldnn_enabled()
    assert sandbag.asked
