"""Where shards rest: in device memory, or on the host."""

from __future__ import annotations

import torch

from mindspeed_mem.device import Backend


class Store:
    """Device memory: tensors lie where their model is."""

    on_host = False

    def like(self, tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """An uninitialised contiguous tensor of the shape and dtype of `tensor`, here; None: its device is ours."""
        return torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)


class HostStore(Store):
    """Host memory, pinned where that exists, outside what a CPU counts as device memory."""

    on_host = True

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def like(self, tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        held = self._backend.host_empty(tensor.numel() * tensor.element_size())
        return held.view(tensor.dtype).view(tensor.shape)


DEVICE = Store()


def device_of_models() -> torch.device:
    """The accelerator that there is, or else the host."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")
