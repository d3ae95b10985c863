"""Trains tiny GPT models while the memory of the device is limited, for the tests of --survive-oom.

Import this where the CPU patches are applied, or the accelerator is: in functions that `tests.worlds.on_ranks` runs.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.device import Backend, get_backend
from mindspeed_mem.device.limited_cpu import LimitedMemory
from mindspeed_mem.features import check
from mindspeed_mem.plan import load_memory_config
from tests.models import DEVICE, SEQUENCE, _texts, build_gpt, build_optimizer, global_parameters
from tests.swap_runs import patched
from tests.worlds import patch_modules


class DeviceMemory:
    """What `LimitedMemory` is for the CPU, of a device that counts by itself."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self.refused = 0

    @property
    def allocated(self) -> int:
        self.backend.synchronize()  # what waits for other streams is still allocated
        return self.backend.allocated()

    @property
    def peak(self) -> int:
        return self.backend.peak()

    def reset_peak(self) -> None:
        self.backend.reset_peak()

    @property
    def held(self) -> int:
        """What the allocator cannot give back: what is allocated, and the rest of its segments."""
        self.backend.give_back()
        self.backend.reset_peak()
        return self.backend.peak_held()

    @property
    def limit(self) -> int:
        return self.backend.limit()

    @limit.setter
    def limit(self, nbytes: int | None) -> None:
        self.backend.limit_memory(nbytes)


@contextlib.contextmanager
def counted() -> Iterator[LimitedMemory | DeviceMemory]:
    """The backend's memory is counted, and can be limited."""
    backend = get_backend(DEVICE)
    if not backend.is_host:
        yield DeviceMemory(backend)
        backend.limit_memory(None)
        return
    with LimitedMemory() as memory:
        backend.attach_ledger(memory)
        try:
            yield memory
        finally:
            backend.attach_ledger(None)


@contextlib.contextmanager
def surviving(
    plan: Any = None, host_limit: int | None = None, backend: Backend | None = None
) -> Iterator[engines.Engine]:
    """--survive-oom, beside a plan if one is given."""
    asked = {"survive_oom": True, "device": DEVICE} | ({} if plan is None else {"memory_config": plan})
    modules = patch_modules(*check(asked).patches)
    with patched([module for module in modules if module.rpartition(".")[2].partition("_")[0] != "cpu"]):
        engine = engines.start(load_memory_config(plan), backend or get_backend(DEVICE), host_limit, survive=True)
        try:
            yield engine
        finally:
            engines.stop()
            gc.collect()


class Training:
    """A model and its optimizer, trained step by step.

    Limits hold from the beginning of a step's forward to the end of its optimizer's step: what the test itself
    allocates is none of it. Gradients and parameters are kept by numpy, which is not counted.
    """

    def __init__(
        self,
        memory: LimitedMemory | DeviceMemory,
        kind: str = "dense",
        micro_batches: int = 2,
        optimizer: dict[str, Any] | None = None,
        **model: Any,
    ):
        self.memory, self.micro_batches = memory, micro_batches
        if isinstance(memory, DeviceMemory):  # else pieces of this model keep what an earlier one had
            gc.collect()
            memory.backend.give_back()
        self.chunks = build_gpt(kind, **model)
        self.optimizer = build_optimizer(self.chunks, **(optimizer or {}))
        self.number = 0
        self.samples = 2
        """Of a micro-batch."""
        self.tokens = SEQUENCE
        """Of a sample."""
        self.length: int | None = SEQUENCE
        """What schedules are told."""
        self.zero = True
        """Zero the gradients before each step."""
        self.peak = 0
        """Bytes above what was allocated before, at most, in the last step."""
        self.room = 0
        """Bytes that the last step could have above what was allocated before; 0: no limit."""
        self.total: int | None = None
        """If set, the limit of every step, in bytes of all that is allocated."""

    def step(self, above: int | None = None) -> dict[str, numpy.ndarray]:
        """One step in which no more than ``above`` bytes beyond those allocated now can be had: all it computed."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        ranks, mine = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        first = self.number * self.micro_batches * ranks
        numbers = range(first + mine, first + self.micro_batches * ranks, ranks)
        self.number += 1
        for chunk in self.chunks if self.zero else ():
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        texts = [list(_texts(numbers, self.samples)) for _ in self.chunks]
        gc.collect()
        before = floor = self.memory.allocated
        if isinstance(self.memory, DeviceMemory):
            floor = self.memory.held
        self.memory.reset_peak()
        self.room = 0 if above is None else floor + above - before
        self.memory.limit = self.total if above is None else floor + above
        try:
            losses = get_forward_backward_func()(
                forward_step_func=self.forward,
                data_iterator=[iter(batches) for batches in texts],
                model=self.chunks,
                num_microbatches=self.micro_batches,
                seq_length=self.length,
                micro_batch_size=self.samples,
            )
            if isinstance(self.memory, DeviceMemory) and self.number == 1:  # or the states keep activations' segments
                self.memory.backend.give_back()
            norm = self.optimizer.step()[1]
        finally:
            self.memory.limit = None
        self.peak = self.memory.peak - before
        found = {f"loss {n}": _kept(one["loss"]) for n, one in enumerate(losses)}
        found |= {name: _kept(p.main_grad) for name, p in global_parameters(self.chunks)}
        found |= {f"new {name}": _kept(p) for name, p in global_parameters(self.chunks)}
        return found | {"norm": numpy.array(float(norm))}

    def forward(self, batches: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        text = next(batches)[:, : self.tokens + 1]
        positions = torch.arange(self.tokens, device=DEVICE).unsqueeze(0).expand(len(text), -1)
        output = model(text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous())

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mean = output.float().mean()
            return mean, {"loss": mean.detach().clone()}

        return output, loss


def _kept(tensor: torch.Tensor) -> numpy.ndarray:
    return tensor.detach().float().cpu().numpy().copy()


def different(one: dict[str, numpy.ndarray], other: dict[str, numpy.ndarray]) -> list[str]:
    """What differs in any bit."""
    assert one.keys() == other.keys()
    return [name for name in one if one[name].tobytes() != other[name].tobytes()]
