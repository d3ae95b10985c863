"""Pipeline schedules beside each other, as run and as simulated: time of a step, idle share, micro-batches held.

    python benchmarks/schedules.py                                # CPU: 4 gloo ranks, 16 micro-batches, a minute
    python benchmarks/schedules.py --stages 8 --micro-batches 32 --json schedules.json

Each rank is a stage of one linear layer of Megatron's, whose passes are made longer by sleeping: a forward, the
gradient of its input and that of its weight take equally long, on as few cores as there are. So this measures the
loops, what stages send each other and the order of passes, and not how fast anything computes. Ranks keep to a core
each, as far as there are any. Variants take turns in the same processes; Megatron's schedules run in Megatron's loops.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from chunk_zero import on_ranks  # noqa: E402
from timing import interleaved, machine  # noqa: E402

from mindspeed_mem.schedule import order, peak, simulate  # noqa: E402

HIDDEN, SEQUENCE = 8, 4


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


def variants(stages: int) -> dict[str, Variant]:
    return {
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


def predicted(stages: int, micro_batches: int, one: Variant, seconds: float) -> dict[str, float]:
    """Of a simulation in which sending takes no time; ``seconds``: of a third of a micro-batch on a stage."""
    sizes, unit = (stages, one.virtual_stages, micro_batches), seconds / one.virtual_stages
    backward = {"backward": unit, "weight": unit} if one.split else {"backward": 2 * unit}
    timeline = simulate(order(*sizes, **one.limits), one.virtual_stages, v=one.v, forward=unit, **backward)
    held = max(peak(*sizes, **one.limits)) / one.virtual_stages
    return {"seconds": timeline.makespan, "idle": timeline.idle_share(), "micro_batches_held": held}


def _stage(config, first: bool, seconds: float) -> torch.nn.Module:
    from megatron.core.enums import ModelType
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.module import MegatronModule

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            time.sleep(seconds)
            return inputs.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(seconds)
            return gradient

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
            inputs = self.embedding if self.embedding is not None else self.given
            return self.linear(Slow.apply(inputs))[0]

    return Stage()


@contextlib.contextmanager
def _in_place(stages: int, one: Variant, seconds: float, state: dict) -> Iterator[None]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    import mindspeed_mem.megatron_adaptor as mem

    chunks = one.virtual_stages
    mem.configure(one.flags)
    parallel_state.initialize_model_parallel(1, stages, chunks if chunks > 1 else None)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=stages * chunks,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
    )
    first = parallel_state.get_pipeline_model_parallel_rank() == 0
    state["model"] = [_stage(config, first and not chunk, seconds / chunks) for chunk in range(chunks)]
    original = layers.prepare_input_tensors_for_wgrad_compute

    def slow(*tensors):
        time.sleep(seconds / chunks)
        return original(*tensors)

    layers.prepare_input_tensors_for_wgrad_compute = slow
    try:
        yield
    finally:
        layers.prepare_input_tensors_for_wgrad_compute = original
        state.clear()
        mem.configure(Variant().flags)
        parallel_state.destroy_model_parallel()


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


def _rank(rank: int, ranks: int, meeting: str, given: argparse.Namespace) -> None:
    sys.argv[1:] = ["--device", "cpu"]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import mindspeed_mem.megatron_adaptor  # noqa: F401

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if cores:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    known, state = variants(ranks), {}
    found = interleaved(
        list(known),
        lambda name: _in_place(ranks, known[name], given.seconds, state),
        functools.partial(_step, state, given.micro_batches),
        given.rounds,
        dist.barrier,
        warm=1,  # connections between these stages
    )
    if rank == 0:
        _tell(known, found, given)
    dist.barrier()
    dist.destroy_process_group()


def _tell(known: dict[str, Variant], found: dict[str, list[float]], given: argparse.Namespace) -> None:
    work = 3 * given.seconds * given.micro_batches
    rows = {}
    for name, one in known.items():
        expected = predicted(given.stages, given.micro_batches, one, given.seconds)
        seconds = statistics.median(found[name])
        rows[name] = {
            "seconds": seconds,
            "of_1f1b": statistics.median(map(float.__truediv__, found[name], found[next(iter(known))])),
            "of_simulated": seconds / expected["seconds"],
            "idle": 1 - work / seconds,
            "idle_simulated": expected["idle"],
            "micro_batches_held": expected["micro_batches_held"],
        }
    print(
        f"{given.stages} stages, {given.micro_batches} micro-batches, {1e3 * given.seconds:g} ms each for a forward, "
        f"its input's and its weight's gradient; median of {given.rounds}\n"
        f"{'':48}{'held':>6}{'step, s':>9}{'of 1F1B':>9}{'simulated':>11}{'idle':>8}{'simulated':>11}"
    )
    for name, row in rows.items():
        print(
            f"{name:48}{row['micro_batches_held']:6g}{row['seconds']:9.3f}{row['of_1f1b']:9.2f}"
            f"{row['seconds'] / row['of_simulated']:11.3f}{row['idle']:8.1%}{row['idle_simulated']:11.1%}"
        )
    if given.json is not None:
        about = {key: getattr(given, key) for key in ("stages", "micro_batches", "seconds", "rounds")}
        given.json.write_text(json.dumps({"machine": machine("cpu"), **about, "variants": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.02, help="of each of a pass's three parts; default 0.02")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    if given.stages < 2 or given.micro_batches < 1 or given.rounds < 1 or given.seconds <= 0:
        parser.error("--stages is at least 2, --micro-batches and --rounds at least 1, --seconds more than 0")
    on_ranks(given.stages, _rank, given)


if __name__ == "__main__":
    main()
