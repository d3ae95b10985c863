"""Memory again for a storage that was emptied, as an operator of torch.

`UntypedStorage.resize_` allocates where no dispatch mode sees it, so that whoever makes room when an operator runs out
of memory (op_guard.py) would miss it. As an operator it is seen, and runs again like others.
"""

from __future__ import annotations

import torch

NAMESPACE = "mindspeed_mem"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("refill_(Tensor(a!) tensor) -> ()")


def _refill(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


_library.impl("refill_", _refill, "CompositeExplicitAutograd")


@torch.no_grad()
def refill(tensor: torch.Tensor) -> None:
    """Uninitialised memory for `tensor`, contiguous from the start of a storage that was resized to 0.

    All views of it have that memory, too; no version counter changes. Nothing happens if it has it already. Raises the
    device's out-of-memory error.
    """
    torch.ops.mindspeed_mem.refill_(tensor)
