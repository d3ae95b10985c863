"""Training steps of one model under a memory cap that the device (on a CPU: its allocator) enforces."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence

import torch
from policies import Policy
from timing import bits, interleaved, reproducible, summary, warm_up
from variants import Settings, Variant

import mindspeed_mem.megatron_adaptor as mem
from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation.observe.rank_profile import RankProfile
from mindspeed_mem.device import Backend
from mindspeed_mem.patching import REGISTRY
from mindspeed_mem.plan import load_memory_config

RATE = 1e-2


def count_memory(backend: Backend) -> None:
    """Let a CPU's memory be counted and limited like a device's. Before the model is built; raises SystemExit where
    that cannot be done."""
    if backend.is_host:
        backend.limit_memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if backend.allocated() is None:
        raise SystemExit("the memory of this device cannot be counted: on a CPU that needs a C++ compiler")


class Bench:
    """One model on one rank, its step, and policies put on and taken off."""

    def __init__(self, backend: Backend, model: torch.nn.Module, step, layers: int):
        self.backend, self.model, self.step, self.layers = backend, model, step, layers
        self.whole = backend.limit()
        self._saved = [_on_host(backend, parameter) for parameter in model.parameters()]
        step()  # gradients have their memory from here on
        gc.collect()
        self.static = backend.allocated()
        """Bytes between steps."""
        self.warm = warm_up(backend)

    def profile(self) -> RankProfile:
        """What the profiler of --adaptive-memory-optimization measures in a few steps."""
        from mindspeed_mem.activation.observe.profiler import Profiler
        from mindspeed_mem.device.link_speed import measure_link

        patches = mem.patch_modules(["pass_events", "activation_*", "recompute_*", "survive_*"])
        REGISTRY.apply(patches)
        engine = engines.start(load_memory_config(None), self.backend, survive=True)
        engine.in_force.num_layers = self.layers
        try:
            self.step()
            profiler = Profiler(engine)
            while not profiler.done:
                profiler.begin_call()
                self.step()
                profiler.end_call(True)
            profiler.detach()
            return profiler.rank_profile(0, measure_link(self.backend))
        finally:
            engines.stop()
            REGISTRY.undo(patches)

    def settings(self, policies: dict[str, Policy], cap: int | None, uncapped: Sequence[str] = ()) -> Settings:
        """``cap``: bytes of everything on the device, or None."""
        found = {}
        for name, policy in policies.items():
            around = contextlib.nullcontext if cap is None or name in uncapped else lambda: self._capped(cap)
            found[name] = Variant(policy.plan, policy.full, policy.modules, around, policy.peer)
        return Settings(self.model, self.backend, found)

    @contextlib.contextmanager
    def _capped(self, nbytes: int) -> Iterator[None]:
        gc.collect()
        self.backend.limit_memory(nbytes)
        try:
            yield
        finally:
            self.backend.limit_memory(self.whole)

    def peak(self, setting: Settings, name: str) -> int | None:
        """The most bytes on the device during a step; None if they did not suffice."""
        gc.collect()
        try:
            with setting(name):
                self.backend.synchronize()
                self.backend.reset_peak()
                self.step()
                self.backend.synchronize()
                return self.backend.peak()
        except (RuntimeError, MemoryError) as error:
            if not self.backend.is_out_of_memory(error):
                raise
        self._let_go()
        return None

    def _let_go(self) -> None:
        """After a step that failed: Megatron's layers still hold what their selective recompute had begun."""
        from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

        for module in self.model.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, CheckpointWithoutOutput):
                    setattr(module, name, None)
        gc.collect()

    def allocator(self) -> dict[str, int]:
        """Figures of an accelerator's caching allocator about the last step measured by `peak`."""
        if self.backend.is_host:
            return {}
        held, retries = self.backend.peak_held(), self.backend.allocation_retries()
        return {"reserved_bytes_at_peak": held or 0, "allocation_retries": retries}

    def losses(self, setting: Settings, name: str, steps: int) -> list[float] | None:
        """The losses of the first steps of a training by plain gradient descent, and the bits of the last gradients;
        the parameters are put back. None where this device cannot make them reproducible."""
        found: list[float] = []
        try:
            for _ in range(steps):
                with setting(name), reproducible(self.backend.type):
                    found += self.step()
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.add_(parameter.grad, alpha=-RATE)
            return [*found, *(bits(parameter.grad) for parameter in self.model.parameters())]
        except RuntimeError as error:
            if "determinis" not in str(error):
                raise
            print(f"{name}: {error}".splitlines()[0], flush=True)
            return None
        finally:
            for parameter, saved in zip(self.model.parameters(), self._saved, strict=True):
                _bytes(parameter).copy_(saved)

    def times(
        self, setting: Settings, names: Sequence[str], base: str, rounds: int, clock, minutes: float | None = None
    ) -> dict[str, dict]:
        """Name -> figures; without those for which, unlike when they ran alone, the cap does not suffice."""
        fitting = list(names)
        while True:
            try:
                synchronize = self.backend.synchronize
                found = interleaved(fitting, setting, self.step, rounds, synchronize, clock, self.warm, minutes)
                return {name: {"rounds": len(found[name])} | row for name, row in summary(found, base).items()}
            except (RuntimeError, MemoryError) as error:
                if setting.last == base or not self.backend.is_out_of_memory(error):
                    raise
            print(f"{setting.last}: does not fit beside the others", flush=True)
            fitting.remove(setting.last)
            self._let_go()


def _bytes(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().view(-1).view(torch.uint8)


def _on_host(backend: Backend, parameter: torch.Tensor) -> torch.Tensor:
    return backend.host_empty(parameter.numel() * parameter.element_size()).copy_(_bytes(parameter))
