"""LowLevelZeroOptimizer, by ColossalAI's name: optimizer states of an unwrapped model split over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mem.gemini.options import refuse, refuse_unknown, say_once
from mindspeed_mem.optimizer_parallel.optimizer import ParallelOptimizer


class LowLevelZeroOptimizer(ParallelOptimizer):
    """`optimizer`, of which each rank steps a slice of every parameter: see `optimizer_parallel`. Parameters are fp32.

    Args:
        optimizer: any that `parallelize` takes.
        clip_grad_norm: the 2-norm to which all gradients together are clipped; 0: they are not.
        partition_grad, overlap_communication: have no effect, which is said; `GeminiDDP` splits gradients.
        verbose: has no effect.

    Raises:
        OptionError, OptimizerParallelError: with all that is wrong.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_grad_norm: float = 0.0,
        partition_grad: bool = False,
        overlap_communication: bool = False,
        verbose: bool = False,
        **unknown: Any,
    ) -> None:
        wrong = refuse_unknown("LowLevelZeroOptimizer", unknown, LowLevelZeroOptimizer.__init__)
        found = {param.dtype for group in optimizer.param_groups for param in group["params"] if param.requires_grad}
        if found - {torch.float32}:
            wrong.append(f"parameters of {', '.join(map(str, found - {torch.float32}))}: only GeminiDDP has masters")
        if not dist.is_initialized():
            wrong.append("torch.distributed is not initialised; call launch_from_torch first")
        refuse(wrong)
        for name, given in (("partition_grad", partition_grad), ("overlap_communication", overlap_communication)):
            if given:
                say_once(f"LowLevelZeroOptimizer: {name} has no effect; gradients are whole on each rank")
        super().__init__(optimizer, None, "sharding")
        self._max_norm, self._averaged = clip_grad_norm, False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        super().zero_grad(set_to_none)
        self._averaged = False

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """The backward of `loss`. Gradients of several of them, before a step, add up."""
        refuse(["backward after sync_grad: gradients are averaged already; zero_grad first"] * self._averaged)
        loss.backward(retain_graph=retain_graph)

    @torch.no_grad()
    def sync_grad(self) -> None:
        """Average gradients over the ranks, all of which have gradients of the same parameters. Collective."""
        if self._averaged:
            return
        self._averaged, ranks = True, dist.get_world_size()
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        for work in [dist.all_reduce(grad.div_(ranks), async_op=True) for grad in grads]:
            work.wait()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average gradients unless that is done, clip, and step. Collective."""
        refuse(["step takes no closure: gradients come from backward"] * (closure is not None))
        self.sync_grad()
        if self._max_norm:
            torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], self._max_norm)
        super().step()
