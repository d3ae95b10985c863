"""What is compiled for the engine's hooks does what is there in Python."""

from __future__ import annotations

import itertools

import pytest
import torch

from mindspeed_mem.device import DeviceError, fast_tensors
from mindspeed_mem.device.native_build import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def compiled():
    try:
        fast_tensors.EXTENSION.build()
    except DeviceError as error:
        if "headers" in str(error):
            pytest.skip(str(error))
        raise
    return fast_tensors.EXTENSION.load()


LAYOUTS = [((), (), 0), ((0,), (1,), 0), ((4, 3), (3, 1), 0), ((3, 4), (1, 3), 2), ((2, 2, 2), (0, 3, 1), 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64])
def test_a_view_is_the_same(compiled, dtype):
    storage = torch.arange(256, dtype=torch.uint8).untyped_storage()
    for size, stride, offset in LAYOUTS:
        for given in ((size, stride), (torch.Size(size), stride)):
            mine, other = (
                make(storage, dtype, *given, offset) for make in (compiled.view_of, fast_tensors.view_in_python)
            )
            assert (mine.dtype, mine.shape, mine.stride(), mine.storage_offset()) == (
                other.dtype,
                other.shape,
                other.stride(),
                other.storage_offset(),
            )
            assert mine.untyped_storage() is storage and mine._base is None and mine.is_leaf and not mine.requires_grad
            assert torch._C._dispatch_keys(mine).raw_repr() == torch._C._dispatch_keys(other).raw_repr()
            assert dtype is torch.bool or torch.equal(mine.view(dtype).nan_to_num(), other.nan_to_num())
            mine.zero_()
            assert mine._version == 1


def test_a_view_of_nonsense_is_refused(compiled):
    storage = torch.zeros(4).untyped_storage()
    for given in ((), (storage, 3, (1,), (1,), 0), (storage, torch.uint8, [1], (1,), 0), (storage, torch.uint8, 1, 1)):
        with pytest.raises(TypeError):
            compiled.view_of(*given)


class _Own(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_plain_is_the_same(compiled):
    plain, weight = torch.ones(2, 3), torch.nn.Parameter(torch.ones(2, 3))
    tensors = [
        plain,
        plain.t(),
        weight,
        weight.t(),
        weight * 2,
        plain.as_subclass(_Own),
        plain.to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.ones(2, device="meta"),
    ]
    for tensor, kind in itertools.product(tensors, ("cpu", "cuda", "meta")):
        assert compiled.is_plain(tensor, kind) is fast_tensors.is_plain_in_python(tensor, kind), (tensor, kind)
    assert compiled.is_plain(plain, "cpu") and not compiled.is_plain("cpu", "cpu")
