"""Variants of one training step that a benchmark puts side by side: with the pack, or as Megatron can do it alone."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpt import IMPLEMENTATIONS, build, make_step, start_one_rank
from timing import bits, machine, reproducible

import mindspeed_mem.megatron_adaptor as mem
from mindspeed_mem.activation import engine as engines
from mindspeed_mem.device import get_backend
from mindspeed_mem.device.ledger import DeviceLedger
from mindspeed_mem.patching import REGISTRY
from mindspeed_mem.plan import load_memory_config

SHAPE = ("layers", "hidden", "heads", "ffn", "seq", "micro_batch", "micro_batches", "vocab")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PATCHES = mem.patch_modules(["pass_events", "activation_*", "recompute_*"])


@dataclass(frozen=True)
class Variant:
    """How one variant differs from the plain model; with all fields at their defaults it is the plain model."""

    plan: dict[str, Any] | None = None
    """A memory configuration; {} watches every operator and moves nothing."""
    full: int = 0
    """Megatron's full recompute of so many layers (method block)."""
    modules: tuple[str, ...] = ()
    """Megatron's selective recompute of these modules."""
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    peer: bool = False
    """Somebody else's way, to be compared with."""


def megatron_selective(model, modules: tuple[str, ...]) -> None:
    """Set on a built model what ``--recompute-modules`` sets when it is built."""
    for layer in model.decoder.layers:
        layer.self_attention.checkpoint_core_attention = "core_attn" in modules
        layer.recompute_input_layernorm = layer.recompute_pre_mlp_layernorm = "layernorm" in modules
        layer.recompute_mlp = "mlp" in modules


class Settings:
    """Puts variants in place and takes them away."""

    def __init__(self, model, backend, variants: dict[str, Variant]):
        self.model, self.backend, self.variants = model, backend, variants
        self.config = model.config
        self.engines, self.stalls = {}, Counter()
        self.last = ""
        """The variant put in place last."""
        for name, variant in variants.items():
            if variant.plan is not None:
                config = load_memory_config(variant.plan)
                self.engines[name] = engines.start(config, backend, watch_only=not variant.plan)
        engines.stop()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.last = name
        variant, engine = self.variants[name], self.engines.get(name)
        if engine is not None:
            REGISTRY.apply(PATCHES)
            engines.use(engine)
        if variant.full:
            self.config.recompute_granularity, self.config.recompute_method = "full", "block"
            self.config.recompute_num_layers = variant.full
        megatron_selective(self.model, variant.modules)
        stalled = self.backend.stall_seconds()
        try:
            with variant.around():
                yield
        finally:
            self.stalls[name] += self.backend.stall_seconds() - stalled
            engines.stop()
            REGISTRY.undo(PATCHES)
            megatron_selective(self.model, ())
            self.config.recompute_granularity = self.config.recompute_method = None
            self.config.recompute_num_layers = None


def set_up(args, shapes: dict[str, tuple[int, ...]], plan: dict[str, Any], **config: Any):
    """The device's backend, a model on it with no patch of ours left, its step, and the shape.

    The model is built under ``plan``, so that its operators are named. ``shapes``: of "cpu" and "device"; ``config``:
    more for Megatron's config of the model.
    """
    backend = get_backend(None if args.device in (None, "auto") else args.device)
    of_whom = getattr(args, "transformer_impl", "local")
    mem.configure({"device": backend.type, "sdpa_attention": of_whom == "local", "memory_config": plan})
    engines.stop()
    shape = dict(zip(SHAPE, args.shape or shapes["cpu" if backend.is_host else "device"], strict=True))
    layers, hidden, heads, ffn, seq, micro_batch, micro_batches, vocab = shape.values()
    device = start_one_rank(backend.type)
    if backend.is_host:
        torch.set_num_threads(1)
    dtype = DTYPES[getattr(args, "dtype", "bf16")]
    model = build(backend, layers, hidden, heads, ffn, seq, vocab, dtype, of_whom, **config)
    REGISTRY.undo([*PATCHES, "mindspeed_mem.patches.first_step"])
    gc.collect()
    gc.freeze()  # all that is imported: what is collected later need not look through it
    return backend, model, make_step(model, device, seq, micro_batch, micro_batches, vocab), shape


def add_common(parser: argparse.ArgumentParser) -> None:
    """The arguments of a benchmark that times variants."""
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minutes", type=float, help="begin no round that would end later, from the start")
    parser.add_argument("--only", help="only variants whose names contain one of these, separated by ; (and the first)")
    parser.add_argument("--shape", type=int, nargs=8, metavar="N", help="layers hidden heads ffn seq mbs n_mb vocab")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--transformer-impl", choices=IMPLEMENTATIONS, default="local", help="whose layers")


def chosen(variants: dict[str, Variant], only: str | None) -> dict[str, Variant]:
    """The first, and those that ``--only`` names; all if it is None."""
    if only is None:
        return variants
    first, words = next(iter(variants)), only.split(";")
    return {name: one for name, one in variants.items() if name == first or any(word in name for word in words)}


def write(args, name: str, backend, shape: dict[str, int], rounds: int, rows: dict[str, dict]) -> None:
    """Put the figures into the JSON file that was asked for, with the machine and what was run."""
    if args.json:
        record = {"benchmark": name, "machine": machine(backend.type), "rounds": rounds}
        record |= {"prefetch": args.prefetch, "shape": shape, "variants": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def results(setting: Settings, name: str, step: Callable[[], list[float]]) -> tuple | None:
    """The losses of a step and the bits of its gradients; None where this device cannot make them reproducible."""
    try:
        with setting(name), reproducible(setting.backend.type):
            return step(), [bits(parameter.grad) for parameter in setting.model.parameters()]
    except RuntimeError as error:
        if "determinis" not in str(error):
            raise
        print(f"{name}: {error}".splitlines()[0], flush=True)
        return None


def device_bytes_at_peak(setting: Settings, name: str, step: Callable[[], Any]) -> int:
    """The most that one step holds above what was there at its start: activations and temporaries.

    From the device's allocator; on the CPU from a ledger of every tensor's storage.
    """
    backend = setting.backend
    gc.collect()
    with setting(name):
        if not backend.is_host:
            backend.synchronize()
            backend.reset_peak()
            before = backend.allocated()
            step()
            backend.synchronize()
            return backend.peak() - before
        ledger = DeviceLedger()
        with _storages_that_shrink(ledger), ledger.watch():
            step()
        return ledger.peak


@contextlib.contextmanager
def _storages_that_shrink(ledger: DeviceLedger) -> Iterator[None]:
    """Megatron's selective recompute empties storages in place: let the ledger see that."""
    original = torch.UntypedStorage.resize_

    def resize_(storage, size):
        before = storage.nbytes()
        result = original(storage, size)
        ledger.allocated += storage.nbytes() - before
        ledger.peak = max(ledger.peak, ledger.allocated)
        return result

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original
