"""What the pack costs the host: CPU time that it adds to Megatron's own, of a layer's forward and backward.

    python benchmarks/host_cost.py                     # about three minutes
    python benchmarks/host_cost.py --json host.json
    python benchmarks/host_cost.py --instructions      # counted by valgrind, which nobody else disturbs; half an hour
    python benchmarks/host_cost.py --device cuda       # what launching kernels takes as well

The tensors are so small that computing and copying them counts for nothing: what is left is Python and torch's own
calls. On a device that is what a step of small layers takes, however fast the device is: there the time is that of the
wall, until the device is done. All variants run interleaved in one process, on one thread and one model, each after
some steps that are not timed (``--warm``), as changing from one to another changes classes, and Python then runs what
it had specialized for them as it runs what is new; a figure is the median over rounds of the difference to the plain
model in the same round, divided by layers (micro-seconds), by the tensors that a layer saves for backward, and by the
plain model's time in that same round (the share, whatever speed the machine has in a round). What others cost stands
beside: Megatron's full recompute, and torch's own saved-tensor hooks that do nothing, its `save_on_cpu` and its
non-reentrant checkpoint (which stops early, as ours). Whether the engine's hot path in C++ is used (`python -m
mindspeed_mem build-native`) is said.

On a machine that others use, times scatter by more than some variants take. Instructions do not: ``--instructions``
runs each variant under valgrind, and the clock is how many it has executed. What is new to the caches takes longer than
its instructions say, so shares are smaller than those of time, and only comparable with each other. On a CPU all is in
fp32: products in bf16, for which not every CPU has instructions, and valgrind none, are most of all that is executed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import instructions  # noqa: E402
import torch  # noqa: E402
import torch.utils.checkpoint  # noqa: E402
from timing import interleaved  # noqa: E402
from variants import DTYPES, Settings, Variant, set_up, write  # noqa: E402

from mindspeed_mem.activation import hot_path  # noqa: E402
from mindspeed_mem.device import get_backend  # noqa: E402

LAYERS = 16
LAYER = 64, 4, 128, 16, 1, 1, 128
"""Hidden, heads, ffn, sequence, micro-batch, micro-batches, vocabulary."""
LARGE = 2048
"""Bytes from which on a tensor of this shape stands for a large one: not statistics of norms, or tables."""
UNITS = {False: "us", True: "instructions"}
"""Of what is measured, by whether it is instructions."""
NORMS, ACTIVATION = r".*norm", r"mlp\.activation_func"


def swap(prefetch: int, *operators: str) -> dict:
    entry = {"op_name": list(operators), "backward_prefetch": prefetch, "layers": True}
    # On any device as on a CPU: the sizes here stand for large ones.
    return {"swap_config": {"swap": True, "op_swap": [entry] if operators else [], "smallest_bytes": 0}}


def hooks_that_do_nothing() -> contextlib.AbstractContextManager:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@contextlib.contextmanager
def torch_checkpoints(calls: list[tuple[torch.nn.Module, str]]) -> Iterator[None]:
    """Each of these methods, or functions among a module's attributes, under torch's non-reentrant checkpoint."""
    natives = [(owner, name, vars(owner).get(name)) for owner, name in calls]
    for owner, name in calls:
        call = functools.partial(torch.utils.checkpoint.checkpoint, getattr(owner, name), use_reentrant=False)
        setattr(owner, name, call)
    try:
        yield
    finally:
        for owner, name, native in natives:
            delattr(owner, name)
            if native is not None:
                setattr(owner, name, native)


def variants(prefetch: int, layers: Sequence[Any]) -> dict[str, Variant]:
    everything = {"layer_swap": [{"backward_prefetch": prefetch, "layers": True}]}
    small = [(norm, "forward") for layer in layers for norm in (layer.input_layernorm, layer.pre_mlp_layernorm)]
    small += [(layer.mlp, "activation_func") for layer in layers]
    return {
        "no pack": Variant(),
        "nothing selected": Variant(swap(prefetch)),
        "core attention only": Variant(swap(prefetch, r"self_attention\.core_attention")),
        "one linear's output": Variant(swap(prefetch, r"self_attention\.linear_qkv")),
        "swap everything": Variant({"swap_config": {"swap": True, **everything, "smallest_bytes": LARGE}}),
        "swap everything, small ones too": Variant({"swap_config": {"swap": True, **everything, "smallest_bytes": 0}}),
        "recompute norms and activation": Variant(
            {"recompute_config": {"select_recompute": {NORMS: True, ACTIVATION: True}}}
        ),
        "recompute norms": Variant({"recompute_config": {"select_recompute": {NORMS: True}}}),
        "recompute whole layers": Variant({"recompute_config": {"recompute": True}}),
        "all through handles, kept": Variant({}),
        "Megatron full recompute": Variant(full=len(layers), peer=True),
        "Megatron's recompute of norms": Variant(modules=("layernorm",), peer=True),
        "torch checkpoint of layers": Variant(
            around=functools.partial(torch_checkpoints, [(layer, "forward") for layer in layers]), peer=True
        ),
        "torch checkpoint of norms and activation": Variant(
            around=functools.partial(torch_checkpoints, small), peer=True
        ),
        "torch hooks that do nothing": Variant(around=hooks_that_do_nothing, peer=True),
        "torch save_on_cpu": Variant(around=torch.autograd.graph.save_on_cpu, peer=True),
    }


def saved_per_layer(model, step) -> float:
    """How many tensors a layer saves for backward."""
    count = 0

    def pack(tensor):
        nonlocal count
        count += 1
        return tensor

    def saving(forward):
        def run(*args, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return forward(*args, **kwargs)

        return run

    for layer in model.decoder.layers:
        layer.forward = saving(layer.forward)
    step()
    for layer in model.decoder.layers:
        del layer.forward
    gc.collect()
    return count / len(model.decoder.layers)


def rows_of(
    taken: dict[str, list[float]], unit: str, steps: int, layers: int, saved: float
) -> dict[str, dict[str, float]]:
    """Per variant: how much of this unit per layer and per saved tensor, and the share of the plain model's own."""
    plain = taken["no pack"]
    own = statistics.median(plain) / steps / layers
    rows = {}
    for name, values in taken.items():
        rounds = list(zip(values, plain, strict=True))
        added = statistics.median(one - base for one, base in rounds) / steps / layers
        share = statistics.median(one / base - 1 for one, base in rounds)
        rows[name] = {f"added_{unit}_per_layer": added, f"added_{unit}_per_saved_tensor": added / saved, "share": share}
    rows["no pack"][f"own_{unit}_per_layer"] = own
    return rows


def table(rows: dict[str, dict[str, float]], unit: str) -> str:
    lines = [f"{'variant':34} {unit + ' a layer':>20} {unit + ' a tensor':>21} {'share':>8}"]
    for name, row in rows.items():
        layer, tensor = row[f"added_{unit}_per_layer"], row[f"added_{unit}_per_saved_tensor"]
        lines.append(f"{name:34} {layer:>20.0f} {tensor:>21.1f} {row['share']:>8.1%}")
    return "\n".join(lines)


def microseconds(of_process: bool) -> Callable[[], float]:
    clock = time.process_time if of_process else time.perf_counter
    return lambda: 1e6 * clock()


def say(rows: dict[str, dict[str, float]], unit: str) -> None:
    own = rows["no pack"][f"own_{unit}_per_layer"]
    print(f"the engine's hot path is in {'Python' if hot_path.native is None else 'C++'}")
    print(f"a layer's own: {own:.0f} {unit}")
    print(table(rows, unit))


def one_by_one(args: argparse.Namespace) -> int:
    """Count each variant in a process of its own beside the plain model. Returns the exit status.

    Whoever changes from one to another in one process changes classes, and Python then runs what it had specialized for
    them as it runs what is new: as no training does.
    """
    rows: dict[str, dict[str, float]] = {}
    names = [name for name in variants(args.prefetch, ()) if name != "no pack" and (not args.only or name in args.only)]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            target = Path(folder) / "one.json"
            given = [word for word in sys.argv[1:] if word != "--only" and word not in (args.only or ())]
            status = instructions.run_counted(__file__, [*given, "--only", name, "--json", str(target)])
            if status:
                return status
            record = json.loads(target.read_text())
            rows = {"no pack": record["variants"]["no pack"], **rows, name: record["variants"][name]}
            print(f"counted: {name}: {rows[name]['share']:.1%}", file=sys.stderr, flush=True)
            if args.json:  # so far: it takes long, and may be interrupted
                args.json.write_text(json.dumps(record | {"variants": rows}, indent=1) + "\n")
    say(rows, UNITS[True])
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "npu"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="of the model; fp32 on a CPU, bf16 elsewhere")
    parser.add_argument("--rounds", type=int, help="15; with --instructions, which do not scatter, 1")
    parser.add_argument("--minutes", type=float, help="begin no round that would end later, from the start")
    parser.add_argument("--steps", type=int, default=2, help="timed together, after as many that are not")
    parser.add_argument("--warm", type=int, help="so often as many before each; 6, with --instructions 3")
    parser.add_argument("--prefetch", type=int, default=4, help="backward_prefetch of the swap variants")
    parser.add_argument("--layers", type=int, default=LAYERS, help="what a pass takes once is shared out among these")
    parser.add_argument("--only", nargs="+", help="these variants, besides the plain model")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument(
        "--instructions", action="store_true", help="count them instead, by valgrind: on a CPU, one round"
    )
    parser.add_argument(
        "--counts", type=Path, help=argparse.SUPPRESS
    )  # where valgrind, under which this runs, has them
    args = parser.parse_args()
    if unknown := set(args.only or ()) - set(variants(args.prefetch, ())):
        known = ", ".join(f'"{name}"' for name in variants(args.prefetch, ()))
        parser.error(f"--only does not know {', '.join(sorted(unknown))}; there are {known}")
    if args.instructions and args.counts is None:
        if args.device != "cpu" or instructions.missing():
            parser.error(
                "--instructions counts those of a CPU, and needs valgrind's " + " and ".join(instructions.PROGRAMS)
            )
        sys.exit(one_by_one(args))
    args.shape = args.layers, *LAYER
    args.dtype = args.dtype or (
        "fp32" if get_backend(None if args.device == "auto" else args.device).is_host else "bf16"
    )
    logging.getLogger("mindspeed_mem").setLevel(logging.WARNING)
    plan = swap(args.prefetch) | {"recompute_config": {"recompute": True}}  # patches of both are to be there
    # Fused, the activation is no call that torch's checkpoint could be put around.
    backend, model, step, shape = set_up(args, {}, plan, bias_activation_fusion=False)
    saved = saved_per_layer(model, step)
    every = variants(args.prefetch, model.decoder.layers)
    chosen = {name: one for name, one in every.items() if not args.only or name in ("no pack", *args.only)}
    setting = Settings(model, backend, chosen)

    def steps() -> None:
        for _ in range(args.steps):
            step()

    for name in chosen:  # what is learnt or tried in the first steps is no part of it
        with setting(name):
            steps()
    gc.collect()
    gc.freeze()
    unit, clock, rounds = UNITS[args.instructions], microseconds(backend.is_host), args.rounds or 15
    if args.instructions:
        clock, rounds = instructions.Instructions(args.counts), args.rounds or 1
    warm = args.warm if args.warm is not None else 3 if args.instructions else 6
    taken = interleaved(list(chosen), setting, steps, rounds, backend.synchronize, clock, warm, args.minutes)
    rows = rows_of(taken, unit, args.steps, args.layers, saved)
    if not args.instructions:
        say(rows, unit)
    write(args, "host_cost", backend, shape, len(taken["no pack"]), rows)


if __name__ == "__main__":
    main()
