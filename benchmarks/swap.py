"""Step time and activation bytes of swap variants and their peers, interleaved in one process.

    python benchmarks/swap.py                       # CPU, small layers
    python benchmarks/swap.py --device cuda         # 7B-shaped layers, bf16
    python benchmarks/swap.py --json results.json

Figures are ratios of medians to the same model without the pack (``no pack``: no symbol replaced). The step is forward
and backward without an optimizer, so that nothing dilutes the ratios. Bytes are measured in a step of their own: on a
device, what the allocator had at most above the step's start; on the CPU, the ledger's peak of activations kept for
backward (``save_on_cpu`` keeps its copies in the same memory there, so it has no figure).
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from timing import interleaved, summary, warm_up  # noqa: E402
from variants import Settings, Variant, add_common, chosen, device_bytes_at_peak, results, set_up, write  # noqa: E402

import mindspeed_mem.megatron_adaptor as mem  # noqa: E402  before megatron
from mindspeed_mem.activation.observe.meter import ActivationMeter  # noqa: E402
from mindspeed_mem.activation.storage.ledger import LEDGER  # noqa: E402

SHAPES = {  # layers, hidden, heads, ffn, sequence, micro-batch, micro-batches, vocabulary
    "cpu": (4, 512, 8, 1376, 512, 1, 2, 512),
    "device": (8, 4096, 32, 11008, 4096, 1, 4, 32000),
}


def entry(**more) -> dict:
    return {"swap_config": {"swap": True, **more}}


def variants(prefetch: int, layers: int, backend) -> dict:
    everywhere = {"backward_prefetch": prefetch, "layers": True}
    half = {"op_name": r".*\.core_attention", "backward_prefetch": prefetch, "layers": list(range(0, layers, 2))}
    return {
        "no pack": Variant(),
        "nothing selected": Variant(entry(layer_swap=[{"backward_prefetch": 1, "layers": []}])),
        "handles, all kept": Variant({}),
        "swap core attention": Variant(entry(default_prefetch=prefetch)),
        "swap core attention, half the layers": Variant(entry(op_swap=[half])),
        "swap everything": Variant(entry(layer_swap=[everywhere])),
        "save_on_cpu": Variant(
            around=lambda: torch.autograd.graph.save_on_cpu(not backend.is_host, device_type=backend.tensor_type)
        ),
        "Megatron full recompute": Variant(full=layers),
    }


def held_at_peak(name: str, setting: Settings, step) -> int | None:
    """Bytes of one step's activations at their peak."""
    if not setting.backend.is_host:
        return device_bytes_at_peak(setting, name, step)
    if name == "save_on_cpu":
        return None
    gc.collect()
    with setting(name), ActivationMeter(setting.backend):
        LEDGER.reset_peak()
        step()
        return LEDGER.held.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mem.add_arguments(parser)
    add_common(parser)
    parser.add_argument("--prefetch", type=int, default=4, help="backward_prefetch of the swap variants")
    args = parser.parse_args()
    backend, model, step, shape = set_up(args, SHAPES, entry())
    all_variants = chosen(variants(args.prefetch, shape["layers"], backend), args.only)
    setting = Settings(model, backend, all_variants)
    names = list(all_variants)
    how = {"warm": warm_up(backend), "minutes": args.minutes}
    seconds, found = interleaved(names, setting, step, args.rounds, backend.synchronize, **how), {}
    rows, rounds = summary(seconds, "no pack"), len(seconds["no pack"])
    steps = (rounds + 1) * (1 + how["warm"]) + 2
    for name in names:
        rows[name]["peak_bytes"] = held_at_peak(name, setting, step)
        found[name] = results(setting, name, step)
        rows[name]["same"] = None if None in (found[name], found["no pack"]) else found[name] == found["no pack"]
        if name in setting.engines:
            engine = setting.engines[name].report()
            rows[name]["stall_ms_per_step"] = 1e3 * setting.stalls[name] / steps
            rows[name]["bytes_out_per_step"] = engine.bytes_out // steps
    print(table(rows))
    write(args, "swap", backend, shape, rounds, rows)


def table(rows: dict[str, dict]) -> str:
    lines = [f"{'variant':38} {'median ms':>10} {'ratio':>7} {'peak MiB':>9} {'results':>8}"]
    for name, row in rows.items():
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.1f}"
        same = {True: "equal", False: "DIFFER", None: "-"}[row["same"]]
        lines.append(f"{name:38} {row['median_ms']:>10.1f} {row['ratio_of_medians']:>7.3f} {peak:>9} {same:>8}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
