"""Buffers of modules, so that they can be put back where a forward runs again."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mindspeed_mem.activation.storage.records import version_of


class Buffer(NamedTuple):
    """A buffer of a module, and what it held."""

    holder: dict[str, torch.Tensor | None]
    name: str
    tensor: torch.Tensor | None
    version: int
    value: torch.Tensor | None
    """None: there was none, or it was not copied."""

    @classmethod
    def of(cls, holder: dict[str, torch.Tensor | None], name: str, copied: bool = True) -> Buffer:
        """The buffer of this name, where ``holder`` is the ``_buffers`` of its module."""
        tensor = holder[name]
        if tensor is None:
            return cls(holder, name, None, 0, None)
        return cls(holder, name, tensor, version_of(tensor), tensor.data.clone() if copied else None)

    def changed(self) -> bool:
        """Or may be: torch's batch norm changes vectors, and no version tells of it."""
        if self.holder.get(self.name) is not self.tensor:
            return True
        return self.tensor is not None and (version_of(self.tensor) != self.version or self.tensor.dim() == 1)

    def put(self) -> None:
        """No version tells of it: backward may have saved the tensor."""
        self.holder[self.name] = self.tensor
        if self.tensor is not None and self.value is not None:
            with torch.inference_mode(self.tensor.is_inference()):
                self.tensor.data.copy_(self.value)
