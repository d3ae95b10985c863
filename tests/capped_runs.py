"""Training steps under --max-inflight-microbatches or --pipeline-schedule zb, with the order of passes that really ran.

Import this where the CPU patches are applied: in functions that `tests.worlds.on_ranks` runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from mindspeed_mem import features
from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT, Pass
from mindspeed_mem.schedule import order
from tests.worlds import applied, parallel


@contextlib.contextmanager
def capped(cap: int | None, split: bool = False) -> Iterator[None]:
    """The patch is applied and the setting in force; None: the patch without a cap. ``split``: with zb."""
    with applied("pipeline_cap", *(["pipeline_split", "pipeline_delayed"] if split else [])) as [module, *_]:
        import sys

        sys.modules[module]._said.clear()
        features.put_into_force(features.Settings(max_inflight=cap, zero_bubble=split))
        try:
            yield
        finally:
            features.put_into_force(features.Settings())


@contextlib.contextmanager
def recorded() -> Iterator[list[Pass]]:
    """The passes that run inside, from Megatron's two step functions and where gradients of weights are computed."""
    from megatron.core.pipeline_parallel import schedules

    from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS

    passes: list[Pass] = []
    of_output: dict[int, tuple[int, int]] = {}

    def plain(output):
        return output[0] if isinstance(output, list) else output

    def forward_step(original, *args, current_microbatch, vp_stage=None, **kwargs):
        result = original(*args, current_microbatch=current_microbatch, vp_stage=vp_stage, **kwargs)
        passes.append((FORWARD, current_microbatch, vp_stage or 0))
        of_output[id(plain(result[0]))] = current_microbatch, vp_stage or 0
        return result

    def backward_step(original, given, output, *args, **kwargs):
        passes.append((BACKWARD, *of_output.pop(id(plain(output)))))
        return original(given, output, *args, **kwargs)

    def weight(key):
        if isinstance(key, tuple):
            passes.append((WEIGHT, *key))
        compute(key)

    compute, WEIGHT_GRADIENTS.run = WEIGHT_GRADIENTS.run, weight
    originals = {"forward_step": schedules.forward_step, "backward_step": schedules.backward_step}
    schedules.forward_step = functools.partial(forward_step, originals["forward_step"])
    schedules.backward_step = functools.partial(backward_step, originals["backward_step"])
    try:
        yield passes
    finally:
        del WEIGHT_GRADIENTS.run
        vars(schedules).update(originals)


def trained(
    kind: str,
    model: dict[str, Any],
    micro_batches: int,
    *,
    evaluate: bool = False,
    align: bool = False,
    steps: int = 2,
    optimizer: dict[str, Any] | None = None,
) -> tuple[list, list[list[Pass]]]:
    """The results and the passes of a few steps of a new model.

    ``evaluate``: with a forward-only call before the last step. ``align``: gradients are reduced, and parameters
    gathered, when the schedule says so.
    """
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from tests.models import build_gpt, build_optimizer, train_step

    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    chunks = build_gpt(kind, **model)
    stepped = build_optimizer(chunks, **(optimizer or {}))
    gathered: list[Any] = []
    if align:
        config = chunks[0].config
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
        config.grad_sync_func = config.grad_sync_func if len(chunks) > 1 else config.grad_sync_func[0]
        if len(chunks) > 1:
            config.param_sync_func = [functools.partial(_gather, chunk, gathered) for chunk in chunks]
    results, passes = [], []
    for step in range(steps):
        if evaluate and step == steps - 1:
            results.append(train_step(chunks, micro_batches=micro_batches, micro_batch_size=1, forward_only=True))
        with recorded() as ran:
            results.append(
                train_step(chunks, micro_batches=micro_batches, micro_batch_size=1, step=step, optimizer=stepped)
            )
        passes.append(ran)
    if align and len(chunks) > 1:
        assert gathered == chunks * steps
    return results, passes


def _gather(chunk, gathered, parameters):
    gathered.append(chunk)
    return chunk.start_param_sync(parameters)


def departures(
    kind: str,
    layout: dict[str, Any],
    model: dict[str, Any],
    cases: list[tuple[int | None, int]],
    split: bool = False,
    **more: Any,
) -> list[str]:
    """What differs in any bit between Megatron's schedule and the one under each cap, and orders that are not those of
    `mindspeed_mem.schedule.order`. ``cases``: (cap, micro-batches of all data-parallel ranks). ``split``: with zb.
    ``more``: of `trained`."""
    from megatron.core import parallel_state

    from mindspeed_mem.schedule import executor
    from tests.swap_runs import difference

    found: list[str] = []
    with parallel(**layout):
        stages, stage = layout["pp"], parallel_state.get_pipeline_model_parallel_rank()
        chunks, ranks = layout.get("vpp") or 1, parallel_state.get_data_parallel_world_size()
        group = model.get("microbatch_group_size_per_vp_stage")
        plain: dict[int, tuple[list, list[list[Pass]]]] = {}
        for cap, micro_batches in cases:
            sizes = stages, chunks, micro_batches // ranks
            ordered = functools.partial(order, *sizes, group_size=group)
            if micro_batches not in plain:
                plain[micro_batches] = trained(kind, model, micro_batches, **more)
                if plain[micro_batches][1][0] != ordered()[stage]:
                    found.append(f"{sizes}: Megatron's own order is another one")
            runs: list[Any] = []
            with capped(cap, split), _counted(executor, runs):
                results, passes = trained(kind, model, micro_batches, **more)
            what = f"cap {cap}, {micro_batches} micro-batches"
            wanted = ordered(cap=cap, split=split)
            changes = wanted != ordered()
            if len(runs) != (len(passes) if changes else 0):
                found.append(f"{what}: our executor ran {len(runs)} times")
            found += [f"{what}: step {n} ran {ran}" for n, ran in enumerate(passes) if ran != wanted[stage]]
            for number, (one, other) in enumerate(zip(results, plain[micro_batches][0], strict=True)):
                found += [f"{what}, call {number}: {name}" for name in difference(one, other)]
    return found


@contextlib.contextmanager
def _counted(executor: Any, runs: list[Any]) -> Iterator[None]:
    original = executor.run

    def run(*args, **kwargs):
        runs.append(args[1])
        return original(*args, **kwargs)

    executor.run = run
    try:
        yield
    finally:
        executor.run = original
