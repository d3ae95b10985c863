"""Step time against device memory: recompute per layer and operator, swap beside it, and Megatron's own recompute.

    python benchmarks/recompute.py                                       # CPU, small layers
    python benchmarks/recompute.py --device cuda                         # 7B-shaped layers, bf16
    python benchmarks/recompute.py --json results.json --picture results.png   # the picture needs matplotlib

All variants run interleaved in one process on one model. Times (on the CPU: of the process, one thread) are medians of
the ratios to the plain model in the same round; the step is forward and backward without an optimizer, so that nothing
dilutes the ratios. Bytes are the most that a step of its own held above its start: activations and temporaries
(gradients have their memory all the time).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from timing import interleaved, summary, warm_up  # noqa: E402
from variants import Settings, Variant, add_common, chosen, device_bytes_at_peak, results, set_up, write  # noqa: E402

import mindspeed_mem.megatron_adaptor as mem  # noqa: E402  before megatron

SHAPES = {  # layers, hidden, heads, ffn, sequence, micro-batch, micro-batches, vocabulary
    "cpu": (4, 1024, 16, 2752, 1024, 1, 1, 512),
    "device": (8, 4096, 32, 11008, 4096, 1, 4, 32000),
}
NORMS, ACTIVATION, ATTENTION = r".*norm", r"mlp\.activation_func", r"self_attention\.core_attention"
CHEAP = [NORMS, ACTIVATION, r"self_attention\.rotary_pos_emb"]


def recompute(**config) -> dict:
    return {"recompute_config": config}


def mix(distance: int, swapped: list[str], layers: bool | list[int] = True, **config) -> dict:
    """Swap these operators in these layers (True: all), recompute others: a list of patterns for all layers, or
    patterns with their layers."""
    entry = [{"op_name": swapped, "backward_prefetch": distance, "layers": layers}] if swapped else []
    config = {key: dict.fromkeys(value, True) if isinstance(value, list) else value for key, value in config.items()}
    return {"swap_config": {"swap": True, "op_swap": entry}, "recompute_config": config}


def variants(layers: int, distance: int) -> dict:
    some = [count for count in (layers // 3, 2 * layers // 3, layers) if count]
    inputs_swapped = {
        "swap_config": {"swap": True, "op_swap": [], "swap_recompute_inputs": True, "default_prefetch": distance}
    }
    found = {"no recompute": Variant(peer=True)}
    found |= {f"Megatron full, {n} of {layers} layers": Variant(full=n, peer=True) for n in some}
    found |= {
        "Megatron selective: " + " ".join(modules): Variant(modules=modules, peer=True)
        for modules in (("core_attn",), ("layernorm",), ("mlp",), ("core_attn", "layernorm", "mlp"))
    }
    found |= {f"layers, {n} of {layers}": Variant(recompute(recompute=[n])) for n in some}
    found |= {
        "norms": Variant(recompute(select_recompute=[NORMS])),
        "activation": Variant(recompute(select_recompute=[ACTIVATION])),
        "activation, swap qkv of layer 0": Variant(
            mix(distance, [r"self_attention\.linear_qkv"], [0], select_recompute=[ACTIVATION])
        ),
        "activation, norms in layer 0": Variant(mix(distance, [], select_recompute={ACTIVATION: True, NORMS: [0]})),
        "mlp": Variant(recompute(select_recompute=["mlp"])),
        "norms, activation, rotary": Variant(recompute(select_recompute=CHEAP)),
        "the same and core attention": Variant(recompute(select_recompute=[*CHEAP, ATTENTION])),
        "mlp and norms": Variant(recompute(select_recompute=["mlp", NORMS])),
        "all but core attention": Variant(recompute(recompute=True, select_recompute_exclude=[ATTENTION])),
        "all layers, inputs swapped": Variant(inputs_swapped | recompute(recompute=True)),
        "swap everything": Variant(
            {"swap_config": {"swap": True, "layer_swap": {"backward_prefetch": distance, "layers": True}}}
        ),
        "swap linears, recompute cheap": Variant(
            mix(distance, [r"self_attention\.linear_.*", r"mlp\.linear_.*"], select_recompute=CHEAP)
        ),
        "swap attention, recompute mlp and norms": Variant(
            mix(distance, ["self_attention"], select_recompute=["mlp", NORMS])
        ),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mem.add_arguments(parser)
    add_common(parser)
    parser.add_argument("--prefetch", type=int, default=4, help="backward_prefetch of the swap variants")
    parser.add_argument("--picture", type=Path, help="draw throughput over memory there (PNG or SVG)")
    args = parser.parse_args()
    backend, model, step, shape = set_up(args, SHAPES, recompute(recompute=True))
    all_variants = chosen(variants(shape["layers"], args.prefetch), args.only)
    setting = Settings(model, backend, all_variants)
    clock = time.process_time if backend.is_host else time.perf_counter
    names, minutes = list(all_variants), args.minutes
    warm = warm_up(backend)
    seconds = interleaved(names, setting, step, args.rounds, backend.synchronize, clock, warm, minutes)
    rows, rounds, found = summary(seconds, "no recompute"), len(seconds["no recompute"]), {}
    for name, row in rows.items():
        row["peer"] = all_variants[name].peer
        row["device_bytes_at_peak"] = device_bytes_at_peak(setting, name, step)
        found[name] = results(setting, name, step)
        row["same"] = None if None in (found[name], found["no recompute"]) else found[name] == found["no recompute"]
    print(table(rows))
    write(args, "recompute", backend, shape, rounds, rows)
    if args.picture:
        from picture import draw

        draw(rows, args.picture, "{layers} layers, hidden {hidden}, sequence {seq}, ".format(**shape) + backend.type)


def table(rows: dict[str, dict]) -> str:
    lines = [f"{'variant':48} {'median ms':>10} {'ratio':>7} {'MiB':>9} {'results':>8}"]
    for name, row in rows.items():
        mib = row["device_bytes_at_peak"] / 2**20
        same = {True: "equal", False: "DIFFER", None: "-"}[row["same"]]
        lines.append(f"{name:48} {row['median_ms']:>10.1f} {row['median_of_ratios']:>7.3f} {mib:>9.1f} {same:>8}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
