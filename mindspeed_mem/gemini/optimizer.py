"""GeminiAdamOptimizer: Adam on the fp32 masters of a `ZeroDDP`, each stepped where it rests."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mem import optimizer_hooks
from mindspeed_mem.gemini.groups import tensor_parallel
from mindspeed_mem.gemini.loss_scaler import LossScaler
from mindspeed_mem.gemini.options import OptionError, refuse, refuse_unknown, say_once
from mindspeed_mem.gemini.zero_ddp import ZeroDDP
from mindspeed_mem.ranks import combined, count
from mindspeed_mem.zero.core.shard_memory import norm_on
from mindspeed_mem.zero.optimizer.placed import Place, PlacedOptimizer
from mindspeed_mem.zero.plain.built_chunk import BuiltChunk

logger = logging.getLogger(__name__)

_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
_MOMENTS = ("exp_avg", "exp_avg_sq")


class GeminiAdamOptimizer(torch.optim.Optimizer):
    """Adam for a `ZeroDDP` or `GeminiDDP`: with decoupled weight decay (AdamW), or as plain Adam if not `adamw_mode`.

    Call its `backward(loss)` instead of ``loss.backward()``. Gradients are unscaled, clipped and applied in fp32,
    wherever a chunk rests. A parameter without a gradient on any rank is not updated. Its groups hold the model's
    parameters, so learning rate schedulers work on it.

    Args:
        model: a ZeroDDP or GeminiDDP.
        lr, betas, eps, weight_decay: as for torch.optim.AdamW.
        params: some of its parameters, or groups of them with settings of their own; None: all trained parameters.
        initial_scale: the loss scale to begin with; None: 2^16 in fp16, no scaling in other types. With a number, the
            loss is scaled in any type: a step with a gradient that is not finite is skipped on all ranks, and the scale
            adapts.
        max_norm: clip gradients to this 2-norm over all parameters of all ranks; 0: do not clip.
        tensor_parallel_group: the ranks over which the model itself is split, for the norm. None: those of the model's
            `ProcessGroup`, if it was given one.
        step_on_host: update parameters that rest on the host there; False: copy them to the device for the update, in
            parts.
        growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale: see `LossScaler`.
        gpu_margin_mem_ratio: accepted for ColossalAI's scripts; has no effect.

    Raises:
        OptionError: a ValueError that lists everything that is wrong.
    """

    def __init__(
        self,
        model: ZeroDDP,
        lr: float = 1e-3,
        initial_scale: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        params: Iterable[Any] | None = None,
        adamw_mode: bool = True,
        max_norm: float = 0.0,
        tensor_parallel_group: Any = None,
        step_on_host: bool = True,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1.0,
        max_scale: float = 2.0**32,
        gpu_margin_mem_ratio: float = 0.0,
        **unknown: Any,
    ) -> None:
        wrong = refuse_unknown("GeminiAdamOptimizer", unknown, GeminiAdamOptimizer.__init__)
        if gpu_margin_mem_ratio:
            say_once("gpu_margin_mem_ratio has no effect: placement_policy='auto' finds out what fits")
        if not isinstance(model, ZeroDDP):
            wrong.append(f"model is a GeminiDDP or ZeroDDP, not {type(model).__name__}")
        wrong += _wrong_norm(max_norm)
        split_over = tensor_parallel(tensor_parallel_group) or tensor_parallel_group
        if split_over is not None and not (hasattr(split_over, "size") and hasattr(split_over, "rank")):
            wrong.append(f"tensor_parallel_group is one that this rank is in, or None, not {split_over!r}")
        self.scaler = LossScaler(
            scale=2.0**16 if initial_scale is None else float(initial_scale),
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        refuse(wrong + self.scaler.problems())
        self.model, self.max_norm = model, float(max_norm)
        half = any(one.chunk.whole.dtype is torch.float16 for one in model.chunks)
        self.scales_loss = half if initial_scale is None else True
        self._tensor_parallel_group = model.tensor_parallel_group if split_over is None else split_over
        if self._tensor_parallel_group is None:
            refuse(_unnamed_parts(model))
        self._norm: float | None = None
        self._clip: float | None = None
        self._decoupled = bool(adamw_mode)
        self._one_of = {param: one for one in model.chunks for param in one.chunk.params}
        self.counts = dict.fromkeys(self._one_of, 0)
        """Steps that each parameter has made."""
        chosen = [param for param in model.module.parameters() if param in self._one_of] if params is None else params
        defaults: dict[str, Any] = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(chosen, defaults)
        kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
        fused = model.chunk_manager.backend.fuses_adam
        groups = [{**self._settings(g), "params": self._masters(g["params"])} for g in self.param_groups]
        self.inner = kind(groups, **defaults, fused=fused or None)
        """What steps the masters: this rank's pieces of the parameters that have any elements here."""
        of_master = {one.masters[param]: one for param, one in self._one_of.items()}
        resting = Place.HOST if step_on_host else Place.SWAPPED
        self._placed = PlacedOptimizer(
            self.inner,
            lambda master: resting if of_master[master].chunk.grad_store.on_host else Place.DEVICE,
            model.chunk_manager.backend,
        )
        self._set_scale()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, of trained parameters of the model that are in no group yet."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        wrong = self._other_kind(group)
        foreign = [param for param in group["params"] if param not in self._one_of]
        if foreign:
            wrong.append(f"{len(foreign)} of params are not trained parameters of the model")
        if wrong:
            self.param_groups.pop()
            refuse(wrong)
        if hasattr(self, "inner"):  # else they are those that it is built of
            self.inner.add_param_group({**self._settings(group), "params": self._masters(group["params"])})

    # ---- training

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients."""
        self.model.zero_grad()
        self._norm = self._clip = None

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run the backward of `loss`, multiplied by the loss scale. Gradients of several backwards before a step are
        summed; the first backward after a step begins anew."""
        self._norm = self._clip = None
        self.model.backward(loss, retain_graph)

    def clip_grad_norm(
        self, model: ZeroDDP | None = None, max_norm: float | None = None, norm_type: float = 2.0
    ) -> float:
        """Make the next step clip gradients to `max_norm` (None: the optimizer's); returns their unscaled 2-norm.

        Call it after the last backward of a step. Collective. The norm is not finite if a gradient is not. Raises
        OptionError for another norm or another model.
        """
        if norm_type != 2.0 or model not in (None, self.model):
            raise OptionError("clip_grad_norm: it is the 2-norm of this optimizer's own model")
        refuse([] if max_norm is None else _wrong_norm(max_norm))
        self._clip = self.max_norm if max_norm is None else float(max_norm)
        return self._gradient_norm() / self.model.loss_scale

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients that are left, update the masters, and copy them to the parameters. Collective."""
        if closure is not None:
            raise OptionError("step takes no closure: gradients come from optimizer.backward(loss)")
        model, scale = self.model, self.model.loss_scale
        model.check_frozen()
        max_norm = self.max_norm if self._clip is None else self._clip
        if self.scales_loss or max_norm:
            norm = self._gradient_norm() / scale
        else:
            model.finish_gradients()
            norm = 0.0
        self._norm = self._clip = None
        # A forward that no backward has followed, or one of the module inside: nothing stays gathered as it was.
        model.gemini_manager.end(completed=False)
        model.chunk_manager.gathering.release_all()
        model.stepped = True
        overflow = self.scales_loss and not norm < float("inf")
        if not overflow:
            # As torch.nn.utils.clip_grad_norm_.
            self._update(scale, min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0)
        if self.scales_loss:
            self.scaler.update(overflow)
            self._set_scale()
            if overflow:
                logger.info("a gradient is not finite: the step is skipped; the loss scale is %g", self.scaler.scale)

    # ---- state

    @torch.no_grad()
    def state_dict(self, only_rank_0: bool = False) -> dict[str, Any]:
        """As torch's Adam on a plain model would have it, in host memory, with the loss scale. Collective.

        {"state": {number: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups", "loss_scaler"}. Numbers count the
        parameters in the order of the groups; those that have never been stepped have no state. only_rank_0: the other
        data-parallel ranks get {}. Hooks before it run on all ranks, hooks after it on those that get a state.
        """
        optimizer_hooks.before_saving(self)
        keep = not only_rank_0 or self.model.chunk_manager.group.rank() == 0
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = {param: number for number, param in enumerate(params)}
        state: dict[int, dict[str, Any]] = {}
        for one in self.model.chunks:
            if not any(self.counts[param] for param in one.chunk.params):
                continue
            assert one.master is not None, "model.chunks are trained"
            for moment in _MOMENTS:
                part = torch.zeros_like(one.master, device=one.chunk.whole.device)
                for param, master in one.masters.items():
                    held = self.inner.state.get(master, {}).get(moment)
                    if held is not None:
                        part[slice(*one.chunk.own_piece(param))].copy_(held)
                whole = one.whole_on_host(part)
                for param, piece in one.chunk.pieces.items():
                    if keep and self.counts[param] and param in numbers:
                        entry = state.setdefault(numbers[param], {"step": torch.tensor(float(self.counts[param]))})
                        entry[moment] = whole[slice(*piece)].view(param.shape)
        if not keep:
            return {}
        groups = []
        for group in self.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            groups.append({**settings, "params": [numbers[param] for param in group["params"]]})
        scaler = self.scaler.state_dict() if self.scales_loss else None
        found = {"state": dict(sorted(state.items())), "param_groups": groups, "loss_scaler": scaler}
        return optimizer_hooks.after_saving(self, found)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the same state on all ranks, saved at any number of them and in any placement; also torch's Adam's.

        Raises OptionError with all that does not fit, before anything changes.
        """
        state_dict = optimizer_hooks.before_loading(self, state_dict)
        groups = state_dict.get("param_groups", [])
        wrong = [problem for group in groups for problem in self._other_kind(group)]
        sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in self.param_groups]
        if sizes[0] != sizes[1]:
            wrong.append(f"the groups saved have {sizes[0]} parameters, the optimizer's {sizes[1]}")
        pairs = [
            (number, param)
            for group, own in zip(groups, self.param_groups, strict=False)
            for number, param in zip(group["params"], own["params"], strict=False)
        ]
        state = state_dict.get("state", {})
        for number, param in pairs:
            entry = state.get(number)
            if entry is None:
                continue
            if lacking := [name for name in ("step", *_MOMENTS) if name not in entry]:
                wrong.append(f"parameter {number} has no {', '.join(lacking)}: another optimizer than Adam saved it")
                continue
            for moment in _MOMENTS:
                if entry[moment].shape != param.shape:
                    wrong.append(f"{moment} of parameter {number} has shape {tuple(entry[moment].shape)}")
        if wrong:
            raise OptionError("state of the optimizer: " + "; ".join(wrong))
        for group, own in zip(groups, self.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        by_master = self.inner.state
        by_master.clear()
        for number, param in pairs:
            entry, one = state.get(number), self._one_of[param]
            self.counts[param] = 0 if entry is None else int(entry["step"])
            master = one.masters[param]
            if entry is None or not master.numel():
                continue
            by_master[master] = {"step": torch.tensor(float(entry["step"]), device=master.device)}
            for moment in _MOMENTS:
                by_master[master][moment] = torch.empty_like(master).copy_(
                    one.chunk.cut_own(param, entry[moment].reshape(-1))
                )
        self.settle()
        if state_dict.get("loss_scaler") and self.scales_loss:
            self.scaler.load_state_dict(state_dict["loss_scaler"])
        self._set_scale()
        optimizer_hooks.after_loading(self)

    def __deepcopy__(self, memo: Any) -> Any:
        raise OptionError("a copy of this optimizer would have no content; load its state_dict() into one built anew")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OptionError("this optimizer cannot be pickled: a rank has parts of it only; save optimizer.state_dict()")

    def settle(self) -> None:
        """Bring the moments to where their masters rest."""
        self._placed.settle()

    # ---- inside

    def _update(self, loss_scale: float, clip: float) -> None:
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(self._settings(group))
            for param in group["params"]:
                one = self._one_of[param]
                touched = param in self.model.touched
                one.masters[param].grad = one.chunk.own_gradient(param) if touched else None
                self.counts[param] += touched
        self._placed.scale_next(loss_scale, clip)
        self.inner.step()
        for param, one in self._one_of.items():
            one.masters[param].grad = None
        for one in self.model.chunks:
            if not self.model.touched.isdisjoint(one.chunk.pieces):
                one.publish()
        for store in {one.chunk.grad_store for one in self.model.chunks}:
            store.settle()  # anybody may write to masters now, or drop them

    def _gradient_norm(self) -> float:
        if self._norm is None:
            self.model.finish_gradients()
            manager = self.model.chunk_manager
            self._norm = _global_norm(self.model.chunks, manager.group, manager.device, self._tensor_parallel_group)
        return self._norm

    def _other_kind(self, group: dict[str, Any]) -> list[str]:
        """What the settings of a group ask for that this Adam does not do."""
        wrong = [f"{name}=True: this Adam has no such thing" for name in ("amsgrad", "maximize") if group.get(name)]
        decoupled = group.get("decoupled_weight_decay", self._decoupled)
        if decoupled != self._decoupled and group.get("weight_decay"):
            wrong.append(f"decoupled_weight_decay={decoupled}: this one was made with adamw_mode={self._decoupled}")
        return list(dict.fromkeys(wrong))

    def _settings(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in _HYPERPARAMETERS}

    def _masters(self, params: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
        return [one.masters[p] for p in params if (one := self._one_of[p]).masters[p].numel()]

    def _set_scale(self) -> None:
        self.model.loss_scale = self.scaler.scale if self.scales_loss else 1.0


def _unnamed_parts(model: ZeroDDP) -> list[str]:
    """What is wrong if nobody says over which ranks the model is split: norms would leave out what others have."""
    ranks = count()
    split = [name for name, param in model.named_parameters() if getattr(param, "tensor_model_parallel", False)]
    if not split or model.chunk_manager.group.size() == ranks:
        return []
    return [
        f"{len(split)} parameters ({split[0]}, ...) are marked as split over tensor-parallel ranks: name these, with "
        "tensor_parallel_group=..., or with process_group=ProcessGroup(tp_degree=...) for the model; if they are "
        "whole, give tensor_parallel_group=ProcessGroup(tp_degree=1)"
    ]


def _wrong_norm(max_norm: Any) -> list[str]:
    fits = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool) and max_norm >= 0
    return [] if fits else [f"max_norm is a number of at least 0, not {max_norm!r}"]


def _global_norm(
    chunks: Iterable[BuiltChunk], group: Any, device: torch.device, tensor_parallel_group: Any = None
) -> float:
    """The 2-norm over all parameters of all ranks, of gradients as they are: scaled, if the loss was. Collective.

    Not finite if a gradient somewhere is not. Squares are summed over the data-parallel `group`, and then over the
    tensor-parallel ranks. A parameter that each of the latter has a part of carries the attribute
    `tensor_model_parallel` = True (Megatron's layers set it); any other is the same on all of them and counts once.
    """
    ranks = 1 if tensor_parallel_group is None else tensor_parallel_group.size()
    first = ranks == 1 or tensor_parallel_group.rank() == 0
    norms = []
    for one in chunks:
        shard = one.chunk.grad_shard
        if shard is None:
            continue
        if first:
            norms.append(norm_on(device, shard))
        else:
            parts = (one.chunk.own_gradient(p) for p in one.chunk.params if getattr(p, "tensor_model_parallel", False))
            norms += [norm_on(device, part) for part in parts]
    # One wait for the device, not one for each chunk.
    squares = [norm**2 for norm in torch.stack(norms).tolist()] if norms else []
    total = math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf
    for over in (group, tensor_parallel_group):
        (total,) = combined([total], dist.ReduceOp.SUM, over, device)
    return math.sqrt(total) if total >= 0 else math.inf  # nan is neither
