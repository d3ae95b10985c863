"""--survive-oom beside chunk ZeRO: with less memory, on all ranks or on one, steps come through with the same bits.

Memory is really limited: torch's own out-of-memory error is raised inside operators (`LimitedMemory`), also where a
chunk gets its memory.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import weakref

import pytest
import torch

from mindspeed_mem.zero.core import hooks
from mindspeed_mem.zero.core.gathering import Gathering
from mindspeed_mem.zero.core.placement import Placement
from tests.worlds import RankError, on_ranks, parallel

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("limited_memory")]

LARGE = 100_000  # elements of a chunk: its memory, or that of its gradients, is the next thing that is not to be had
CASES = {  # stage, placement, reduced in each micro-batch, chunk -> limits as shares of what a step takes at its peak
    (1, "device", False, LARGE): (0.9, 0.4),
    (2, "device", True, LARGE): (0.8, 0.7),
    (3, "device", False, 16384): (0.75, 0.5),
    (3, "host", True, LARGE): (0.9, 0.8),
}
SEQUENCES = 6  # in a micro-batch: activations, which may leave, are most of what a step takes


class Training:
    """A model in chunks and its optimizer; limits hold from a step's forward to the end of its optimizer's."""

    def __init__(self, memory):
        from tests.chunk_runs import Case, built

        self.memory, self.case = memory, Case(model={"layers": 3})
        self.models, self.optimizer = built(self.case)
        self.number = self.peak = 0
        """Bytes above what was allocated before, at most, in the last step."""

    def step(self, above=None):
        """One step in which no more than ``above`` bytes beyond those allocated now can be had: all it computed."""
        import torch.distributed as dist
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from tests.chunk_runs import _forward, masters
        from tests.models import SEQUENCE, _texts

        ranks, first = dist.get_world_size(), self.number * 2 * dist.get_world_size() + dist.get_rank()
        texts = list(_texts(range(first, first + 2 * ranks, ranks), SEQUENCES))
        self.number += 1
        for model in self.models:
            model.zero_grad_buffer()
        gc.collect()
        before = self.memory.allocated
        self.memory.reset_peak()
        self.memory.limit = None if above is None else before + above
        try:
            done = get_forward_backward_func()(
                forward_step_func=functools.partial(_forward, self.case),
                data_iterator=[iter(texts)],
                model=self.models,
                num_microbatches=2,
                seq_length=SEQUENCE,
                micro_batch_size=SEQUENCES,
            )
            norm = self.optimizer.step()[1]
        finally:
            self.memory.limit = None
        self.peak = self.memory.peak - before
        self.optimizer.zero_grad()
        return [float(one["loss"]) for one in done], float(norm), masters(self.optimizer)


def sharded(stage, policy="device", reduce_each=False, chunk=16384):
    from tests.chunk_runs import chunked

    return chunked(stage, chunk=chunk, placement=Placement(policy), reduce_each=reduce_each)


def under_limits(cases):
    """What differs from the same training without a limit, all ranks limited and then the last one alone."""
    import torch.distributed as dist

    from mindspeed_mem.zero.buffers import runtime
    from tests.limited_runs import counted, surviving

    found = []
    last = dist.get_rank() == dist.get_world_size() - 1
    with counted() as memory, parallel():
        for how, shares in cases.items():
            with sharded(*how):
                training = Training(memory)
                expected = [training.step() for _ in range(2 + len(shares))]
                peak = training.peak
            with sharded(*how), surviving() as engine:
                training, name = Training(memory), str(how)
                results = [training.step()]  # the optimizer's states stay
                limits = [*shares, shares[-1] if last else None]
                for share in limits:
                    evicted = engine.mover.evictions
                    results.append(training.step(None if share is None else int(share * peak)))
                    if share is not None and engine.mover.evictions == evicted:
                        found.append(f"{name}, {share}: nothing was moved")
                    if share is not None and training.peak > share * peak:
                        found.append(f"{name}, {share}: {training.peak} of {peak} bytes")
                found += [f"{name}, step {n}" for n in range(len(results)) if results[n] != expected[n]]
                gathering = runtime.current().gathering
                if gathering.order.deviations or gathering.live_bytes:
                    found.append(f"{name}: {gathering.order.deviations} deviations, {gathering.live_bytes} gathered")
            del training
            gc.collect()
    return found


def test_with_less_memory_every_bit_is_the_same_also_on_one_rank_alone():
    assert on_ranks(2, under_limits, CASES, timeout=150) == [[], []]


def asking_unseen(training, nbytes):
    """In the second micro-batch of each attempt the last layer asks for memory where no operator is."""
    calls = []

    def ask(*_):
        calls.append(None)
        if len(calls) % 2 == 0:
            torch.empty(0).untyped_storage().resize_(nbytes)

    training.models[0].module.module.decoder.layers[2].register_forward_hook(ask)


def tried_again(stages):
    """Steps of which the last rank's fail half-way and are tried again: what differs, and the warnings."""
    import torch.distributed as dist

    from mindspeed_mem.zero.buffers import runtime
    from tests.limited_runs import counted, surviving
    from tests.swap_runs import listening

    found = []
    last = dist.get_rank() == dist.get_world_size() - 1
    with counted() as memory, listening() as messages, parallel():
        for stage in stages:
            with sharded(stage):
                training = Training(memory)
                expected = [training.step() for _ in range(3)]
                peak = training.peak
            with sharded(stage), surviving():
                training = Training(memory)
                results = [training.step()]
                if last:
                    asking_unseen(training, int(0.35 * peak))
                results += [training.step(int(0.85 * peak) if last else None) for _ in range(2)]
                found += [f"stage {stage}, step {n}" for n in range(3) if results[n] != expected[n]]
                gathering = runtime.current().gathering
                found += [f"stage {stage}: {gathering.order.deviations} deviations"] * bool(gathering.order.deviations)
            del training
            gc.collect()
    return found, [message for message in messages if "tried again with all activations swapped" in message]


def with_too_little(stage):
    """The last rank has too little memory for a step, whatever leaves, and its process ends."""
    import torch.distributed as dist

    from mindspeed_mem.activation.survive.survival import NoRoomError
    from tests.limited_runs import counted, surviving

    last = dist.get_rank() == dist.get_world_size() - 1
    with counted() as memory, parallel():
        with sharded(stage):
            training = Training(memory)
            limit = [training.step() and int(0.3 * training.peak) for _ in range(2)][-1]
        with sharded(stage), surviving():
            training = Training(memory)
            training.step()
            try:
                training.step(limit if last else None)
            except NoRoomError as error:
                print(f"NoRoomError: {error}", flush=True)
                os._exit(1)


def test_a_step_that_failed_half_way_is_tried_again_where_no_collective_was():
    (others, none), (mine, warnings) = on_ranks(2, tried_again, (1, 2), timeout=150)
    assert others == mine == none == []
    assert len(warnings) == 4
    assert [(found, len(warnings)) for found, warnings in on_ranks(1, tried_again, (3,))] == [([], 2)]


def test_what_follows_a_module_does_not_hold_its_inputs():
    """They could not leave, and would stay to the end of backward though nothing has saved them."""

    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x + self.bias

    model = Shifted()
    hooks.attach(model, Gathering())
    given = torch.ones(4, requires_grad=True) * 2
    held = weakref.ref(given)
    output = model(given)
    del given
    assert held() is None
    output.sum().backward()


def test_what_cannot_be_rescued_is_an_error_on_all_ranks():
    with pytest.raises(RankError) as caught:
        on_ranks(2, with_too_little, 3, timeout=100)
    told, mine = str(caught.value).split("rank 1 died (1)")
    assert "RuntimeError: rank 1 ran out of device memory: " in told
    assert re.search(r"NoRoomError: CPU out of memory\. \d+ bytes of device memory are needed in \w+\.", mine)
    assert "the step was not tried again: it has taken part in a collective" in mine
