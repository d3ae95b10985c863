"""What `mindspeed_mem.attach` does for a model of Hugging Face: seconds of a training step and device memory, side by
side with the model as it is, its own gradient checkpointing, and torch's `save_on_cpu`.

    python benchmarks/attach.py --device cuda --json attach.json
    python benchmarks/attach.py --device cpu --tiny

It needs transformers; the model is a Llama made from a configuration, its text random numbers. First a plan is searched
(`"auto"`) under each cap: a share of the way from what a step with gradient checkpointing takes to what the plain one
does. Then all variants run interleaved in one process, each with the memory that it may take: fixed plans, those that
were found, and the others. A step is forwards and backwards of all micro-batches and AdamW's step with a learning rate
of 0, so that all variants compute the same; losses and gradients of one step with reproducible kernels are compared bit
for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from timing import bits, interleaved, machine, progress, reproducible, summary, warm_up  # noqa: E402

import mindspeed_mem  # noqa: E402
from mindspeed_mem.device import Backend, get_backend  # noqa: E402

SHAPE = ("layers", "hidden", "heads", "groups", "ffn", "seq", "micro_batch", "micro_batches", "vocab")
LARGE, TINY = (16, 2048, 32, 8, 8192, 4096, 4, 2, 32000), (3, 64, 4, 2, 128, 64, 2, 2, 256)
PLAIN, CHECKPOINTS = "no pack", "gradient checkpointing"
STEPS = 60
"""In which a plan must be found."""
NORMS = r".*norm"
GiB = 2**30


def swapped(*names: str) -> dict[str, Any]:
    return {"swap": True, "op_swap": [{"op_name": list(names), "backward_prefetch": 2, "layers": True}]}


PLANS: dict[str, dict[str, Any]] = {
    "nothing selected": {"swap_config": {"swap": True, "op_swap": []}},
    "recompute norms and activation": {
        "recompute_config": {"select_recompute": {NORMS: True, r"mlp\.act_fn": True}},
    },
    "recompute norms and activation, swap up": {
        "swap_config": swapped(r"mlp\.up_proj"),
        "recompute_config": {"select_recompute": {NORMS: True, r"mlp\.act_fn": True}},
    },
    "recompute mlp": {"recompute_config": {"select_recompute": {"mlp": True}}},
    "recompute layers": {"recompute_config": {"recompute": True}},
    "swap everything": {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": True}]}},
}


class Bench:
    """One model, its optimizer and its step."""

    def __init__(self, backend: Backend, shape: dict[str, int], dtype: torch.dtype):
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(1)
        config = LlamaConfig(
            hidden_size=shape["hidden"],
            intermediate_size=shape["ffn"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["groups"],
            vocab_size=shape["vocab"],
            max_position_embeddings=shape["seq"],
            use_cache=False,
            attn_implementation="sdpa",
        )
        self.backend = backend
        self.model = LlamaForCausalLM(config).to(backend.type, dtype).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0, foreach=True)
        size = (shape["micro_batches"], shape["micro_batch"], shape["seq"])
        self.texts = torch.randint(shape["vocab"], size).to(backend.type)
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.losses = []
        for text in self.texts:
            loss = self.model(input_ids=text, labels=text).loss
            loss.backward()
            self.losses.append(loss.detach())
        self.optimizer.step()

    def peak(self) -> int:
        """The most bytes on the device in a step."""
        gc.collect()
        self.backend.synchronize()
        self.backend.reset_peak()
        self.step()
        self.backend.synchronize()
        return int(self.backend.peak() or 0)

    def result(self) -> list[int | float]:
        """The losses of a step, and its gradients' bits."""
        with reproducible(self.backend.type):
            self.step()
        return [*map(float, self.losses), *(bits(one.grad) for one in self.model.parameters() if one.grad is not None)]

    def search(self, cap: int, target: Path) -> int | None:
        """Find a plan under this many bytes of everything on the device; the steps that it took, None if none was."""
        with mindspeed_mem.attach(self.model, "auto", device_memory_gib=cap / GiB, adaptive_plan_file=target) as found:
            for number in range(STEPS):
                with found.step():
                    self.step()
                if target.exists():
                    return number + 1
        return None


@contextlib.contextmanager
def checkpoints(model: Any) -> Iterator[None]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


def variants(bench: Bench, plans: dict[str, Any], caps: dict[str, int]) -> Callable[[str], Any]:
    """Puts a variant in place by its name, under its cap if it has one."""

    def setting(name: str) -> contextlib.AbstractContextManager:
        if name == PLAIN:
            return contextlib.nullcontext()
        if name == CHECKPOINTS:
            return checkpoints(bench.model)
        if name == "save_on_cpu":
            return torch.autograd.graph.save_on_cpu(pin_memory=not bench.backend.is_host)
        cap = caps.get(name)
        return mindspeed_mem.attach(bench.model, plans[name], device_memory_gib=None if cap is None else cap / GiB)

    return setting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--shape", type=int, nargs=len(SHAPE), metavar=tuple(one.upper() for one in SHAPE))
    parser.add_argument("--tiny", action="store_true", help="sizes that say nothing: to try the command itself out")
    parser.add_argument("--caps", default="0.3,0.7", help="shares of the way from full recompute to the plain model")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--minutes", type=float, help="begin no round that would end later")
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args()
    logging.getLogger("mindspeed_mem").setLevel(logging.ERROR)
    backend = get_backend(args.device)
    if backend.is_host:  # then its memory is counted
        backend.limit_memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    shape = dict(zip(SHAPE, args.shape or (TINY if args.tiny else LARGE), strict=True))
    bench = Bench(backend, shape, {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype])
    bench.step()
    static = int(backend.allocated() or 0)
    whole = bench.peak()
    with checkpoints(bench.model):
        bench.step()
        least = bench.peak()
    progress(f"{whole / GiB:.2f} GiB as it is, {least / GiB:.2f} with {CHECKPOINTS}, {static / GiB:.2f} between steps")

    plans: dict[str, Any] = dict(PLANS)
    caps: dict[str, int] = {}
    searches = {}
    with tempfile.TemporaryDirectory() as folder:
        for share in map(float, args.caps.split(",")):
            name, target = f"found under a cap of {share:.0%}", Path(folder) / f"plan{share}.yaml"
            cap = int(least + share * (whole - least))
            searches[name] = {"cap_bytes": cap, "steps": bench.search(cap, target)}
            progress(f"{name}, {cap / GiB:.2f} GiB: {searches[name]['steps']} steps")
            if target.exists():
                plans[name], caps[name] = target, cap
                searches[name]["plan"] = target.read_text()
        names = [PLAIN, CHECKPOINTS, "save_on_cpu", *plans]
        setting = variants(bench, plans, caps)
        rows: dict[str, dict[str, Any]] = {name: {} for name in names}
        with setting(PLAIN):
            expected = bench.result()
        for name in names:
            with setting(name) as inside:
                same = bench.result() == expected
                bench.step()
                rows[name] = {
                    "peak_bytes": bench.peak(),
                    "same": same,
                    **({"cap_bytes": caps[name]} if name in caps else {}),
                }
                if isinstance(inside, mindspeed_mem.attachment.Attached):
                    figures = inside.engine.report()
                    rows[name] |= {"swapped": figures.bytes_out, "recomputed": figures.recomputed_bytes}
            progress(f"{name}: {rows[name]}")
        warm = warm_up(backend)
        seconds = interleaved(
            names, setting, bench.step, args.rounds, backend.synchronize, warm=warm, minutes=args.minutes
        )
    for name, row in summary(seconds, PLAIN).items():
        rows[name] |= row | {"rounds": len(seconds[name])}
    print(f"{'variant':44s} {'ms':>8s} {'ratio':>7s} {'GiB':>7s}  bits")
    for name, row in rows.items():
        figures = f"{row['median_ms']:8.1f} {row['median_of_ratios']:7.3f} {row['peak_bytes'] / GiB:7.2f}"
        print(f"{name:44s} {figures}  {'equal' if row['same'] else 'DIFFER'}")
    if args.json:
        about = {"machine": machine(backend.type), "shape": shape, "dtype": args.dtype, "static_bytes": static}
        args.json.write_text(json.dumps({**about, "searches": searches, "variants": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
