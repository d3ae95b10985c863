"""Runs tiny GPT models with activation swap, for the tests of numerics, memory and asynchrony.

Import this where the CPU patches are applied: in functions that `tests.worlds.on_ranks` runs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation.engine import Engine
from mindspeed_mem.activation.ledger import LEDGER
from mindspeed_mem.device import Backend, get_backend
from mindspeed_mem.patching import REGISTRY
from mindspeed_mem.plan import load_memory_config

_ACTIVATION = ("checkpoint", "linear", "markers", "moe", "schedules", "transformer_block")
_RECOMPUTE = ("fused", "moe", "random")
SWAP = [
    *(f"mindspeed_mem.patches.activation_{name}" for name in _ACTIVATION),
    *(f"mindspeed_mem.patches.recompute_{name}" for name in _RECOMPUTE),
]
SDPA = ["mindspeed_mem.patches.sdpa_attention", "mindspeed_mem.patches.sdpa_latent_attention"]


def entry(**more: Any) -> dict[str, Any]:
    return {"swap_config": {"swap": True, **more}}


def op(name: str | list[str], prefetch: int, layers: Any = True, **more: Any) -> dict[str, Any]:
    return {"op_name": name, "backward_prefetch": prefetch, "layers": layers, **more}


EVERYTHING = entry(layer_swap=[{"backward_prefetch": 1, "layers": True}])
POLICIES: dict[str, dict[str, Any]] = {
    "default": entry(),
    "everything": EVERYTHING,
    "everything, far ahead": entry(layer_swap={"backward_prefetch": 30, "layers": True}, activations="both"),
    "some layers": entry(layer_swap=[{"backward_prefetch": 20, "layers": [0, 3]}]),
    "operators": entry(
        op_swap=[op("attention", 20, [0, 1, 2]), op("attention", 10, [3]), op("feed_forward", 15, [1, 2])]
    ),
    "saved": entry(activations="saved", op_swap=[op([r"self_attention\.linear_.*", "mlp", ".*norm"], 3)]),
    "both": entry(op_swap=[op(r".*\.core_attention", 2, activations="both"), op(".*_bda", 1, [1, 2])]),
}


_held_before = 0


@contextlib.contextmanager
def patched(modules: list[str]) -> Iterator[None]:
    """These patch modules applied, and undone afterwards."""
    for module in modules:
        importlib.import_module(module)
    REGISTRY.apply(modules)
    try:
        yield
    finally:
        REGISTRY.undo(modules)


@contextlib.contextmanager
def swap(plan: dict[str, Any], backend: Backend | None = None, host_limit: int | None = None, watch_only: bool = False):
    """The engine executes ``plan`` on models built inside; on leaving, nothing of it is left."""
    global _held_before
    gc.collect()
    _held_before = LEDGER.owned.now  # by models of earlier cases that are still alive
    with patched(SWAP):
        LEDGER.reset_peak()
        engine = engines.start(load_memory_config(plan), backend or get_backend("cpu"), host_limit, watch_only)
        try:
            yield engine
        finally:
            engines.stop()
            gc.collect()


def one_forward(engine: Engine, chunks: list[torch.nn.Module], micro_batch: int = 0) -> torch.Tensor:
    """The losses of one micro-batch, run as a schedule would: between `Engine.begin_forward` and `end_forward`."""
    text = torch.arange(33).expand(1, -1)
    positions = torch.arange(32).expand(1, -1)
    engine.begin_forward(micro_batch, 0)
    loss = chunks[0](text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous())
    engine.end_forward(loss)
    return loss


def difference(mine: Any, other: Any) -> list[str]:
    """Where two `tests.models.StepResult` differ in any bit; empty when they are identical."""
    found = []
    if len(mine.losses) != len(other.losses) or not all(map(torch.equal, mine.losses, other.losses)):
        found.append(f"losses {mine.losses} {other.losses}")
    if mine.grads.keys() != other.grads.keys():
        found.append("names of gradients")
    else:
        found += [name for name in mine.grads if not torch.equal(mine.grads[name], other.grads[name])]
    if mine.grad_norm != other.grad_norm:
        found.append(f"gradient norm {mine.grad_norm} {other.grad_norm}")
    return found


def forget_routing(chunks: list[torch.nn.Module]) -> None:
    """Drop the last micro-batch's indices from the token dispatchers of experts.

    Megatron keeps a trained model with experts alive after its last use, with or without swap.
    """
    for chunk in chunks:
        for module in chunk.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            if dispatcher is not None:
                vars(dispatcher).clear()


def owned_now() -> int:
    """Bytes on the device of activations that operators of layers produced inside this `swap`."""
    return LEDGER.owned.now - _held_before


def owned_peak() -> int:
    """The most `owned_now` has been since the ledger's last `reset_peak`."""
    return LEDGER.owned.peak - _held_before


def left_over(engine: Engine) -> dict[str, int]:
    """What the engine still holds; all zero when nothing is left."""
    gc.collect()
    return {
        "host bytes": engine.mover.slabs.bytes_in_use,
        "bytes on host": engine.mover.bytes_on_host,
        "device bytes": owned_now(),
    }
