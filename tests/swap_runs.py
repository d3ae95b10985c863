"""Runs tiny GPT models with activation swap, for the tests of numerics, memory and asynchrony.

Import this where the CPU patches are applied: in functions that `tests.worlds.on_ranks` runs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation.engine import Engine
from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.device import Backend, get_backend
from mindspeed_mem.plan import load_memory_config
from tests.models import DEVICE
from tests.worlds import applied

_ACTIVATION = "checkpoint graphs markers moe passes saved_tensors stacks transforms unfinished".split()
_RECOMPUTE = ("distributed", "fused", "moe", "random")
SWAP = [
    *(f"mindspeed_mem.patches.activation_{name}" for name in _ACTIVATION),
    *(f"mindspeed_mem.patches.recompute_{name}" for name in _RECOMPUTE),
]
SDPA = ["mindspeed_mem.patches.sdpa_attention"]


def entry(**more: Any) -> dict[str, Any]:
    """Whatever its size is moved: on the simulated device all that these models keep would be too small."""
    return {"swap_config": {"swap": True, "smallest_bytes": 0, **more}}


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


def again(select: Any = None, swap_config: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A plan that recomputes what ``select`` names (``recompute=`` whole layers), beside ``swap_config`` if given."""
    section = more if select is None else {"select_recompute": select, **more}
    return {"swap_config": swap_config or {"swap": False}, "recompute_config": section}


_held_before = 0


@contextlib.contextmanager
def patched(modules: list[str]) -> Iterator[None]:
    """These patch modules applied, and undone afterwards."""
    with applied(*(module.rpartition(".")[2] for module in modules)):
        yield


@contextlib.contextmanager
def swap(
    plan: dict[str, Any],
    backend: Backend | None = None,
    host_limit: int | None = None,
    watch_only: bool = False,
    survive: bool = False,
):
    """The engine executes ``plan`` on models built inside; on leaving, nothing of it is left."""
    global _held_before
    gc.collect()
    _held_before = LEDGER.owned.now  # by models of earlier cases that are still alive
    with patched(SWAP):
        LEDGER.reset_peak()
        config = load_memory_config(plan)
        engine = engines.start(config, backend or get_backend(DEVICE), host_limit, watch_only, survive)
        try:
            yield engine
        finally:
            engines.stop()
            gc.collect()


def one_forward(engine: Engine, chunks: list[torch.nn.Module], micro_batch: int = 0) -> torch.Tensor:
    """The losses of one micro-batch, run as a schedule would: between `Engine.begin_forward` and `end_forward`."""
    text = torch.arange(33, device=DEVICE).expand(1, -1)
    positions = torch.arange(32, device=DEVICE).expand(1, -1)
    engine.passes.begin_forward(micro_batch, 0)
    loss = chunks[0](text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous())
    engine.passes.end_forward(loss)
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


def trained(layout: dict[str, Any], model: dict[str, Any], steps: int = 2, micro_batches: int = 2) -> tuple[list, dict]:
    """A few training steps of a new model, and what they leave behind besides: generators, statistics of experts."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from tests.models import build_gpt, build_optimizer, expert_losses, forget_routing, train_step
    from tests.worlds import parallel

    with parallel(**layout):
        expert_losses().clear()
        chunks = build_gpt(**model)
        optimizer = build_optimizer(chunks)
        run = functools.partial(train_step, chunks, micro_batches=micro_batches, optimizer=optimizer)
        results = [run(step=number) for number in range(steps)]
        besides = {"torch's generator": torch.get_rng_state()}
        besides |= {f"generator {name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
        kept = {name: one if isinstance(one, dict) else vars(one) for name, one in expert_losses().items()}
        besides |= {name: one["values"].clone() for name, one in kept.items()}
        besides |= {f"{i}.{name}": b.clone() for i, chunk in enumerate(chunks) for name, b in _buffers(chunk)}
        forget_routing(chunks)
        forget_tables()
        return results, besides


def forget_tables() -> None:
    """What Megatron keeps: the tables that layers of latent attention make, and up to 0.15 its own attention's mask."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.utils import get_default_causal_mask

    for kept_by in (RotaryEmbedding.forward, get_default_causal_mask):
        getattr(kept_by, "cache_clear", list)()


def _buffers(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return torch.nn.Module.named_buffers(chunk)  # Megatron's data parallel wrapper has a list called buffers


def mismatches(
    plans: dict[str, dict[str, Any]], layout: dict[str, Any], model: dict[str, Any], sdpa: bool = True, **more: Any
) -> list[str]:
    """What differs in any bit between a model without the engine and with each plan, what is left over, and plans
    that free nothing (named "idle...": something; named "maybe...": either is right). ``more``: of `trained`.
    """
    found = []
    with patched(SDPA if sdpa else []):
        without, besides = trained(layout, model, **more)
        with patched(SWAP):  # once for all plans
            for name, plan in plans.items():
                with swap(plan) as engine:
                    results, after = trained(layout, model, **more)
                    report, left = engine.report(), left_over(engine)
                for number, (one, other) in enumerate(zip(results, without, strict=True)):
                    found += [f"{name}, step {number}: {what}" for what in difference(one, other)]
                if after.keys() != besides.keys():
                    found.append(f"{name}: {after.keys() ^ besides.keys()}")
                found += [
                    f"{name}: {key}" for key in after if not torch.equal(after[key], besides.get(key, after[key]))
                ]
                if any(left.values()):
                    found.append(f"{name}: left over {left}")
                frees = report.peak_bytes < report.peak_bytes_without
                if frees == name.startswith("idle") and not name.startswith("maybe"):
                    found.append(f"{name}: {report.peak_bytes} of {report.peak_bytes_without} bytes")
    return found


@contextlib.contextmanager
def listening(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What the package warns of inside, or with another ``level`` says."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("mindspeed_mem")
    before = logger.level
    logger.setLevel(min(level, logger.getEffectiveLevel()))
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


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
        "device bytes": owned_now(),
    }
