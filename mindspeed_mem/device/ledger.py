"""Counts the bytes of tensors on a device without an allocator that would, exactly and by storage."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from mindspeed_mem.device.formulas import FormulaKeepingMode


class DeviceLedger:
    """Bytes of the storages seen and still alive. A storage counts once, however many tensors view it.

    A storage's Python object lives as long as its memory, even when only autograd holds it, so that weak references
    to it tell exactly when the memory is freed.
    """

    limit: int | None = None
    """Bytes that it should not exceed; it refuses nothing itself."""

    def __init__(self) -> None:
        self.allocated = 0
        self.peak = 0
        self._seen: weakref.WeakSet = weakref.WeakSet()
        self._lock = threading.RLock()  # finalizers run wherever the last reference dies, within `see` too

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count `storage` until it is freed; seeing it again changes nothing."""
        with self._lock:
            if storage in self._seen:
                return
            self._seen.add(storage)
            nbytes = storage.nbytes()
            self.allocated += nbytes
            self.peak = max(self.peak, self.allocated)
        weakref.finalize(storage, self._freed, nbytes).atexit = False

    def reset_peak(self) -> None:
        """Let `peak` start again from `allocated`."""
        with self._lock:
            self.peak = self.allocated

    @contextmanager
    def watch(self) -> Iterator[DeviceLedger]:
        """Count every CPU storage that an operator makes inside; parameters and other inputs made before stay out."""
        with _Watch(self):
            yield self

    def _freed(self, nbytes: int) -> None:
        with self._lock:
            self.allocated -= nbytes


class _Watch(FormulaKeepingMode):
    def __init__(self, ledger: DeviceLedger) -> None:
        super().__init__()
        self._ledger = ledger

    def operator(self, op: Any, args: tuple, kwargs: dict) -> Any:
        result = op(*args, **kwargs)
        if not op.is_view:
            inputs = {id(s) for s in storages((args, kwargs))}
            for storage in storages(result):
                if id(storage) not in inputs:
                    self._ledger.see(storage)
        return result


def storages(tree: object) -> Iterator[torch.UntypedStorage]:
    """The storages of the plain CPU tensors in `tree`, with repeats; subclasses without a storage are passed over."""
    for leaf in tree_iter(tree):
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.layout == torch.strided:
            try:
                yield leaf.untyped_storage()
            except NotImplementedError:
                continue
