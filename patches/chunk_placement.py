"""megatron.core.optimizer.DistributedOptimizer: masters and optimizer states of chunks that rest on the host.

Why here: when it has been built it has made its masters and no states yet. It keeps both in torch tensors of the inner
optimizer, wherever they lie; only that one's step is taken over. Checkpoints and schedulers stay Megatron's.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

from mindspeed_mem.patches import _distributed_optimizer as masters
from mindspeed_mem.patching import around
from mindspeed_mem.zero.buffers import runtime
from mindspeed_mem.zero.buffers.buckets import Bucket, in_order_of_use
from mindspeed_mem.zero.buffers.runtime import HostChunk
from mindspeed_mem.zero.optimizer.placed import Place, PlacedOptimizer

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer."


@around(_OPTIMIZER + "__init__")
def init(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    now = runtime.current()
    if now is None or self.is_stub_optimizer or now.host is None:
        return
    place = Place.HOST if now.settings.step_on_host else Place.SWAPPED
    stores = now.stores(self.buffers)
    resting: dict[Bucket, HostChunk] = {}
    owner: dict[torch.Tensor, HostChunk] = {}
    for model_param, master in masters.every(self):
        bucket = masters.bucket_of(self, model_param)
        chunks = masters.chunks_of(self, model_param)
        store = stores(bucket)
        own_master = model_param.dtype is torch.float32
        if not store.on_host:
            continue
        if own_master and (chunks is None or chunks.stage < 3):
            now.warn_once(
                "fp32 parameters stay on the device with --chunk-zero-stage below 3: they are their own masters"
            )
            continue
        chunk = None if chunks is None else chunks.of_bucket(bucket)
        one = owner[master] = resting.setdefault(bucket, HostChunk(chunk, own_master))
        one.masters[model_param] = master
        if not own_master and not now.starts_on_host:
            with torch.no_grad():
                master.data = store.like(master).copy_(master)
    if owner:

        def place_of(master):
            return place if master in owner and owner[master].on_host else Place.DEVICE

        self.placed = PlacedOptimizer(self.optimizer, place_of, now.backend, group_bytes=now.group_bytes)
        # None on a CPU, where both memories are one: gradients and masters are read where they are.
        self.host_store = None if now.backend.copies_block else now.host
        self.host_gradients = {}
        self.resting = [resting[bucket] for bucket in in_order_of_use(self.buffers) if bucket in resting]
        now.rest(self.resting)


@around(_OPTIMIZER + "_build_model_and_main_param_groups")
def build_groups(original, cls, *args, **kwargs):
    """Masters are made where they rest: all of them might not fit the device."""
    now = runtime.current()
    if now is None or not now.starts_on_host:
        return original(cls, *args, **kwargs)
    with _MastersOn(now.host):
        return original(cls, *args, **kwargs)


class _MastersOn(TorchFunctionMode):
    """Upstream writes ``shard.clone().float()`` for a master."""

    def __init__(self, store):
        super().__init__()
        self._store = store

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.clone:
            return args[0]
        if function is torch.Tensor.float:
            like = torch.empty(args[0].shape, dtype=torch.float32, device="meta")
            return self._store.like(like).copy_(args[0])
        return function(*args, **(kwargs or {}))


@around(_OPTIMIZER + "_copy_model_grads_to_main_grads")
def copy_model_grads_to_main_grads(original, self):
    """A master on the host takes its gradient there, in memory that stays: torch has both on one device."""
    if getattr(self, "placed", None) is None or getattr(self.buffers[0], "chunks_of_model", None) is not None:
        return original(self)
    store, held = self.host_store, self.host_gradients
    for model_param, master in masters.every(self):
        span = self._get_model_param_range_map(model_param)["param"]
        piece = model_param.main_grad.view(-1)[span.start : span.end].float()
        if store is None or self.placed.place(master) is Place.DEVICE:
            held.pop(master, None)
            master.grad = piece
            continue
        if master not in held:
            held[master] = store.like(piece)
        store.take(held[master], piece, lasting=True)
        master.grad = held[master]
    if store is not None:
        store.settle()


@around(_OPTIMIZER + "_copy_main_params_to_model_params")
def copy_main_params_to_model_params(original, self):
    """Masters on the host go up as they are, one behind the other, and are cast there: the host waits once."""
    if getattr(self, "placed", None) is None or self.host_store is None:
        return original(self)
    chunks = getattr(self.buffers[0], "chunks_of_model", None)
    if chunks is not None and chunks.stage == 3:  # its shards are where their masters are
        return original(self)
    with _MastersUp(self.host_store, self.placed):
        original(self)
    self.host_store.settle()  # anybody may write to masters now


class _MastersUp(TorchFunctionMode):
    """Upstream writes ``shard.copy_(master)``, for which torch casts on the host, in memory that is not pinned."""

    def __init__(self, store, placed):
        super().__init__()
        self._store, self._placed = store, placed

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_ and self._placed.place(args[1]) is not Place.DEVICE:
            fetched = self._store.fetch(args[1], args[0].device)
            if fetched is not None:
                args = args[0], fetched[0], *args[2:]
                self._store.meet(fetched[1])
        return function(*args, **(kwargs or {}))
