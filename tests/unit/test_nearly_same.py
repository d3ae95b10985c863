"""Two runs on an accelerator may differ by rounding, not by more, whatever the type."""

import pytest
import torch

from mindspeed_mem.activation.rerun.bits import nearly_same


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_rounding_passes_and_noise_does_not(dtype):
    torch.manual_seed(1)
    exact = torch.rand(1000)
    rounded = exact * (1 + torch.finfo(dtype).eps / 2 * (2 * torch.rand(1000) - 1))
    noisy = exact + 0.2 * (2 * torch.rand(1000) - 1)
    assert nearly_same(exact.to(dtype), rounded.to(dtype))
    assert not nearly_same(exact.to(dtype), noisy.to(dtype))
