"""Chunks' optimizer from an ordinary one, as the first versions of ColossalAI's scripts and 0.2's make it.

optimizer = ZeroOptimizer(HybridAdam(model.parameters(), lr=1e-3), model, initial_scale=2**5)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mindspeed_mem import optimizer_hooks
from mindspeed_mem.gemini.optimizer import GeminiAdamOptimizer
from mindspeed_mem.gemini.options import refuse, refuse_unknown
from mindspeed_mem.gemini.zero_ddp import ZeroDDP
from mindspeed_mem.optimizer_kinds import decouples_decay, is_torch_adam

_TAKEN = ("params", "lr", "betas", "eps", "weight_decay", "initial_lr")


class HybridAdam(torch.optim.AdamW):
    """torch's AdamW, with ColossalAI's defaults: no weight decay. To be given to `ZeroOptimizer`."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        **unknown: Any,
    ) -> None:
        wrong = refuse_unknown("HybridAdam", unknown, HybridAdam.__init__)
        wrong += [f"bias_correction is True, not {bias_correction!r}"] * (not bias_correction)
        if not adamw_mode:
            wrong.append(f"adamw_mode is True, not {adamw_mode!r}; for plain Adam give ZeroOptimizer torch.optim.Adam")
        refuse(wrong)
        super().__init__(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class ZeroOptimizer(GeminiAdamOptimizer):
    """`GeminiAdamOptimizer` with the groups, settings and hooks of `optim`: HybridAdam, or torch's Adam or AdamW.

    optim has the parameters of `module`, and has not stepped yet. gpu_margin_mem_ratio: has no effect; "auto" decides.
    clipping_norm: `max_norm`. The rest: see `GeminiAdamOptimizer`. Raises OptionError with all that is wrong.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        module: ZeroDDP,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float | None = None,
        *,
        clipping_norm: float = 0.0,
        norm_type: float = 2.0,
        **more: Any,
    ) -> None:
        wrong = [] if norm_type == 2.0 else [f"norm_type is 2.0, not {norm_type!r}"]
        if not is_torch_adam(optim):
            wrong.append(f"optim is HybridAdam, or torch's Adam or AdamW, not {type(optim).__name__}")
        elif optim.state:
            wrong.append("optim has stepped already; load its state_dict() into this optimizer")
        refuse(wrong)
        settings = [{key: one for key, one in group.items() if key in _TAKEN} for group in optim.param_groups]
        for group in settings:
            group["params"] = [param for param in group["params"] if param.requires_grad]
        others = {name for group in optim.param_groups for name in ("amsgrad", "maximize") if group.get(name)}
        refuse([f"optim has {name}=True, which chunks do not support" for name in sorted(others)])
        super().__init__(
            module,
            initial_scale=initial_scale,
            params=settings,
            adamw_mode=decouples_decay(optim, optim.param_groups[0]),
            max_norm=clipping_norm,
            gpu_margin_mem_ratio=gpu_margin_mem_ratio,
            **more,
        )
        optimizer_hooks.take_over(self, optim, (*optimizer_hooks.STATE_HOOKS, *optimizer_hooks.STEP_HOOKS))
