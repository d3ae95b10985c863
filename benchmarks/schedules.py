"""Pipeline schedules beside each other, as run and as simulated: time of a step, idle share, micro-batches held.

    python benchmarks/schedules.py                                # CPU: 4 gloo ranks, 16 micro-batches, two minutes
    python benchmarks/schedules.py --sizes 2x8 4x16 8x32 --json schedules.json
    python benchmarks/schedules.py --real-time                    # as root, on a machine that does other things, too

Each rank is a stage of one linear layer of Megatron's. A pass is made as long as it is said to be by sleeping for what
is left of that: a forward, the gradient of its input and that of its weight take equally long, on as few cores as there
are. So this measures the loops, what stages send each other and the order of passes, and not how fast anything
computes. Ranks keep to a core each, as far as there are any. Variants take turns in the same processes; Megatron's
schedules run in Megatron's loops.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from chunk_zero import on_ranks  # noqa: E402
from timing import interleaved, machine  # noqa: E402

from mindspeed_mem.ranks import gather  # noqa: E402
from mindspeed_mem.schedule import order, peak, simulate  # noqa: E402

HIDDEN, SEQUENCE = 8, 4
_OVERSLEPT = 3e-4
"""Seconds by which a sleep may be longer than asked for; the rest is waited for by looking at the clock."""


class Variant(NamedTuple):
    virtual_stages: int = 1
    cap: int | None = None
    """Passes in flight."""
    split: bool = False
    """Zero bubble."""
    v: bool = False

    @property
    def limits(self) -> dict:
        return {"cap": self.cap, "split": self.split, "v": self.v}

    @property
    def flags(self) -> dict:
        schedule = "v" if self.v else "zb" if self.split else "1f1b"
        return {"max_inflight_microbatches": self.cap, "pipeline_schedule": schedule}


def variants(stages: int, only: Sequence[str] | None = None) -> dict[str, Variant]:
    """``only``: those in whose names one of these texts is, besides Megatron's 1F1B."""
    every = {
        "1F1B, Megatron's": Variant(),
        "interleaved, 2 virtual stages, Megatron's": Variant(2),
        "interleaved, capped at the memory of 1F1B": Variant(2, 2 * stages),
        "zero bubble at the memory of 1F1B": Variant(1, stages, True),
        "zero bubble, 2 virtual stages, at that memory": Variant(2, 2 * stages, True),
        "V at the memory of 1F1B": Variant(2, 2 * stages, True, True),
        "capped at half of it": Variant(1, stages // 2),
        "zero bubble at half of it": Variant(1, stages // 2, True),
        "V at half of it": Variant(2, stages // 2 * 2, True, True),
    }
    first = next(iter(every))
    return {name: one for name, one in every.items() if only is None or name == first or any(x in name for x in only)}


def predicted(stages: int, micro_batches: int, one: Variant, seconds: float) -> dict[str, float]:
    """Of a simulation in which sending takes no time; ``seconds``: of a third of a micro-batch on a stage."""
    sizes, unit = (stages, one.virtual_stages, micro_batches), seconds / one.virtual_stages
    backward = {"backward": unit, "weight": unit} if one.split else {"backward": 2 * unit}
    timeline = simulate(order(*sizes, **one.limits), one.virtual_stages, v=one.v, forward=unit, **backward)
    held = max(peak(*sizes, **one.limits)) / one.virtual_stages
    return {"seconds": timeline.makespan, "idle": timeline.idle_share(), "micro_batches_held": held}


def _stage(config, first: bool) -> torch.nn.Module:
    from megatron.core.enums import ModelType
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.module import MegatronModule

    class Stage(MegatronModule):
        model_type = ModelType.encoder_or_decoder

        def __init__(self) -> None:
            super().__init__(config)
            self.linear = ColumnParallelLinear(
                HIDDEN, HIDDEN, config=config, init_method=torch.nn.init.ones_, bias=False, gather_output=True
            )
            self.embedding = torch.nn.Parameter(torch.ones(SEQUENCE, 1, HIDDEN)) if first else None
            self.given: torch.Tensor | None = None

        def set_input_tensor(self, given) -> None:
            self.given = given[0] if isinstance(given, list) else given

        def forward(self) -> torch.Tensor:
            return self.linear(self.embedding if self.embedding is not None else self.given)[0]

    return Stage()


def _lasting(function: Callable, seconds: float) -> Callable:
    """The same, but it takes so long."""

    @functools.wraps(function)
    def lasts(*args, **kwargs):
        until = time.perf_counter() + seconds
        result = function(*args, **kwargs)
        time.sleep(max(0.0, until - time.perf_counter() - _OVERSLEPT))
        while time.perf_counter() < until:
            pass
        return result

    return lasts


@contextlib.contextmanager
def _passes_last(seconds: float, split: bool) -> Iterator[None]:
    """Inside, a forward takes so long, a backward once more or, where it is not split, twice."""
    from megatron.core.pipeline_parallel import schedules

    from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS

    lengths: list[tuple[Any, str, int]] = [
        (schedules, "forward_step", 1),
        (schedules, "backward_step", 1 if split else 2),
        (WEIGHT_GRADIENTS, "run", 1),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, parts in lengths:
            stack.enter_context(mock.patch.object(owner, name, _lasting(getattr(owner, name), parts * seconds)))
        yield


@contextlib.contextmanager
def _in_place(stages: int, one: Variant, seconds: float, state: dict) -> Iterator[None]:
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    import mindspeed_mem.megatron_adaptor as mem

    chunks = one.virtual_stages
    mem.configure(one.flags)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else None)
    config = TransformerConfig(
        num_layers=stages * chunks,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
    )
    first = parallel_state.get_pipeline_model_parallel_rank() == 0
    state["model"] = [_stage(config, first and not chunk) for chunk in range(chunks)]
    _step(state, stages)  # connections between these stages
    try:
        with _passes_last(seconds / chunks, one.split):
            yield
    finally:
        state.clear()
        mem.configure(Variant().flags)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


def _step(state: dict, micro_batches: int) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data_iterator, model):
        return model(), lambda output: (output.sum(), {})

    model = state["model"]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[None] * len(model),
        model=model if len(model) > 1 else model[0],
        num_microbatches=micro_batches,
        seq_length=SEQUENCE,
        micro_batch_size=1,
        forward_only=False,
    )


def _rank(rank: int, ranks: int, meeting: str, given: argparse.Namespace, micro_batches: int, found: Path) -> None:
    sys.argv[1:] = ["--device", "cpu"]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import mindspeed_mem.megatron_adaptor  # noqa: F401

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if cores:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if given.real_time:  # the threads of gloo, too, which begin later
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    # Once for all variants: each group of gloo has threads that look for work all the time, until the process ends.
    parallel_state.initialize_model_parallel(1, ranks)
    model_parallel_cuda_manual_seed(1)
    known, state = variants(ranks, given.only), {}
    steps: list[tuple[float, float]] = []

    def step():
        begin = time.perf_counter()
        _step(state, micro_batches)
        steps.append((begin, time.perf_counter()))

    names: list[str] = []

    @contextlib.contextmanager
    def setting(name):
        names.append(name)
        with _in_place(ranks, known[name], given.seconds, state):
            yield

    interleaved(list(known), setting, step, given.rounds, dist.barrier)
    everyone = gather(steps)  # all by one clock; what a barrier takes is no part of a step
    if rank == 0:
        seconds: dict[str, list[float]] = {name: [] for name in known}
        for name, of_step in list(zip(names, zip(*everyone, strict=True), strict=True))[len(known) :]:
            seconds[name].append(max(end for _, end in of_step) - min(begin for begin, _ in of_step))
        found.write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def _rows(stages: int, micro_batches: int, seconds: float, found: dict[str, list[float]]) -> dict[str, dict]:
    work, rows, known = 3 * seconds * micro_batches, {}, variants(stages)
    for name in found:
        expected, measured = predicted(stages, micro_batches, known[name], seconds), statistics.median(found[name])
        rows[name] = {
            "seconds": measured,
            "of_1f1b": statistics.median(map(float.__truediv__, found[name], found[next(iter(found))])),
            "of_simulated": measured / expected["seconds"],
            "idle": 1 - work / measured,
            "idle_simulated": expected["idle"],
            "micro_batches_held": expected["micro_batches_held"],
        }
    return rows


def _tell(stages: int, micro_batches: int, given: argparse.Namespace, rows: dict[str, dict]) -> None:
    print(
        f"{stages} stages, {micro_batches} micro-batches, {1e3 * given.seconds:g} ms each for a forward, "
        f"its input's and its weight's gradient; median of {given.rounds}\n"
        f"{'':48}{'held':>6}{'step, s':>9}{'of 1F1B':>9}{'simulated':>11}{'ratio':>8}{'idle':>8}{'simulated':>11}"
    )
    for name, row in rows.items():
        print(
            f"{name:48}{row['micro_batches_held']:6g}{row['seconds']:9.3f}{row['of_1f1b']:9.2f}"
            f"{row['seconds'] / row['of_simulated']:11.3f}{row['of_simulated']:8.3f}{row['idle']:8.1%}"
            f"{row['idle_simulated']:11.1%}"
        )


def _sizes(text: str) -> tuple[int, int]:
    """``4x16`` -> (4, 16)."""
    stages, _, micro_batches = text.partition("x")
    if not (stages.isdecimal() and micro_batches.isdecimal() and int(stages) >= 2 and int(micro_batches) >= 1):
        raise argparse.ArgumentTypeError(f"{text} has to be stages x micro-batches, of at least 2x1, such as 4x16")
    return int(stages), int(micro_batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = "stages x micro-batches, one after the other; default 4x16"
    parser.add_argument("--sizes", type=_sizes, nargs="+", default=[(4, 16)], metavar="PxM", help=what)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each of a pass's three parts; default 0.05")
    parser.add_argument("--rounds", type=int, default=3)
    what = "besides Megatron's 1F1B, those in whose names one of these texts is, such as zero"
    parser.add_argument("--only", nargs="+", metavar="TEXT", help=what)
    what = "ranks come before all other processes of the machine, which takes rights for that (SCHED_FIFO)"
    parser.add_argument("--real-time", action="store_true", help=what)
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    if given.rounds < 1 or given.seconds <= 0:
        parser.error("--rounds is at least 1, --seconds more than 0")
    names = list(variants(2))
    if unknown := [text for text in given.only or () if not any(text in name for name in names)]:
        parser.error(f"--only {' '.join(unknown)}: in no name; there are {'; '.join(names)}")
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for stages, micro_batches in given.sizes:
            found = Path(folder) / "seconds.json"
            on_ranks(stages, _rank, given, micro_batches, found)
            rows = _rows(stages, micro_batches, given.seconds, json.loads(found.read_text()))
            _tell(stages, micro_batches, given, rows)
            runs.append({"stages": stages, "micro_batches": micro_batches, "variants": rows})
            if given.json is not None:
                about = {"seconds": given.seconds, "rounds": given.rounds, "real_time": given.real_time}
                given.json.write_text(json.dumps({"machine": machine("cpu"), **about, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
