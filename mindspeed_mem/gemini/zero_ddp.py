"""ZeroDDP and GeminiDDP: a plain torch model whose parameters lie in chunks, each rank keeping its part.

    model = GeminiDDP(model, device, placement_policy="auto", mixed_precision=torch.bfloat16)
    optimizer = GeminiAdamOptimizer(model, lr=1e-4)
    for batch in batches:
        optimizer.zero_grad()
        loss = criterion(model(batch))
        optimizer.backward(loss)
        optimizer.step()

Ranks run the same modules in the same order. A parameter is gathered while a module reads it: its own, one that it is
called with, and one that its code takes from another module's attribute. References to parameters kept elsewhere are
not followed. Between passes a parameter has a shape but no memory: reading it ends the process. `state_dict` has the
values.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from mindspeed_mem.gemini import model_state
from mindspeed_mem.gemini.chunk_manager import ChunkManager, init_chunk_manager
from mindspeed_mem.gemini.gemini_manager import GeminiManager
from mindspeed_mem.gemini.layer_parallel import of_others, process_group_of, split_layers
from mindspeed_mem.gemini.lazy import settle_buffers, settle_parameters
from mindspeed_mem.gemini.options import OptionError, refuse, refuse_unknown
from mindspeed_mem.ranks import Alone, combined
from mindspeed_mem.zero.core.chunk import Chunk, storage_of
from mindspeed_mem.zero.core.gradients import GradientShards
from mindspeed_mem.zero.core.use_order import Act, Intent

logger = logging.getLogger(__name__)

_ALL_GRADIENTS = Intent(Act.REDUCE_LAST, -1)
TRAINED = (torch.float16, torch.bfloat16, torch.float32)
PRECISIONS = (*TRAINED, None)


class ZeroDDP(torch.nn.Module):
    """A plain torch model whose parameters, gradients and fp32 masters lie in chunks, split over the ranks.

    Gradients are averaged over the ranks and accumulated in fp32. Parameters that are frozen now have to stay frozen.

    Args:
        module: the model, built as usual on any device, or inside `lazy_init`; the same on all ranks.
        gemini_manager: a manager with a ChunkManager that has no parameters yet.
        force_outputs_fp32: cast floating-point outputs to fp32.
        mixed_precision: the type of floating-point parameters, buffers and inputs; fp32 masters keep the values that
            the module came with. None: types stay as they are. The default, fp16, is ColossalAI's.

    Raises:
        OptionError: a ValueError that lists everything that is wrong.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        gemini_manager: GeminiManager,
        force_outputs_fp32: bool = False,
        *,
        mixed_precision: torch.dtype | None = torch.float16,
        **unknown: Any,
    ) -> None:
        wrong = refuse_unknown(type(self).__name__, unknown, ZeroDDP.__init__) + of_others(module)
        if mixed_precision not in PRECISIONS:
            wrong.append(f"mixed_precision is one of {', '.join(map(str, PRECISIONS))}, not {mixed_precision!r}")
        elif found := {one.dtype for one in module.parameters() if one.requires_grad} - set(TRAINED):
            kept = [one for one in found if not (mixed_precision and one.is_floating_point)]
            wrong += [f"parameters of {one} cannot be trained: masters and gradients are fp32" for one in kept]
        refuse(wrong + _sharing_memory(module))
        super().__init__()
        self.module, self.gemini_manager = module, gemini_manager
        self.chunk_manager: ChunkManager = gemini_manager.chunk_manager
        self.force_outputs_fp32, self.mixed_precision = force_outputs_fp32, mixed_precision
        self.touched: set[torch.nn.Parameter] = set()
        """Parameters that have got a gradient since `zero_grad`, on this rank."""
        self.loss_scale = 1.0
        """By what the optimizer multiplies a loss before its backward."""
        self.tensor_parallel_group = self.chunk_manager.tensor_parallel_group
        """Ranks that the model is split over, if known; what an optimizer takes unless it is told others."""
        named = process_group_of(module)
        if named is not None and named.tp_world_size() != (self.tensor_parallel_group or Alone()).size():
            raise OptionError(
                f"the parameters' process group has tp_degree {named.tp_world_size()}; give it to the ChunkManager, too"
            )
        split_layers(module, self.chunk_manager.process_group)
        split = any(getattr(param, "tensor_model_parallel", False) for param in module.parameters())
        if self.tensor_parallel_group is not None and self.tensor_parallel_group.size() > 1 and not split:
            logger.warning(
                "the process group has %d tensor-parallel ranks, but no parameter of this model is split over them "
                "(attribute tensor_model_parallel): each trains a copy, and they stay equal only on equal batches",
                self.tensor_parallel_group.size(),
            )
        self.stepped = False
        """Whether an optimizer has used the gradients, which are of no use after that: scaled, clipped, or neither."""
        self._scaled_backward = self._accumulates = False
        self._unreduced: dict[Chunk, None] = {}
        self._build()

    def _build(self) -> None:
        manager = self.chunk_manager
        settle_buffers(self.module, self._cast_buffer)
        settle_parameters(self.module)
        for param in self.module.parameters():
            dtype = self._dtype(param)
            group = f"{dtype}, {'trainable' if param.requires_grad else 'frozen'}"
            if group not in manager.groups:
                manager.create_group(group)
            manager.append_tensor(param, group, dtype)
        self.gemini_manager.build()
        self.chunks = [one for one in manager.built.values() if one.trainable]
        for one in manager.built.values():
            for param in one.chunk.params if one.sharded else ():
                vars(param).update(__deepcopy__=_no_copy, __reduce_ex__=_no_copy)
        self.gradients = GradientShards([one.chunk for one in self.chunks], self._reduce, manager.gathering.order)
        for param in self.module.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._take_gradient)
        self.gemini_manager.follow(self.module)

    # ---- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        training, manager = torch.is_grad_enabled(), self.gemini_manager
        begins = not manager.in_pass
        if begins:
            manager.begin(("training" if training else "evaluation", self.training), training)
        try:
            args, kwargs = tree_map(self._cast_input, (args, kwargs))
            outputs = self.module(*args, **kwargs)
        except BaseException:
            manager.end(completed=False)
            raise
        if begins and not training:
            manager.end(completed=True)
        return tree_map(_to_fp32, outputs) if self.force_outputs_fp32 else outputs

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run `loss.backward()`, with the loss multiplied by `loss_scale`; the optimizer's `backward` calls it.

        Then all its gradients are reduced, of incomplete chunks as well: of parameters that have none on any rank.
        """
        self._forget_stepped()
        self._scaled_backward = True
        try:
            (loss * self.loss_scale if self.loss_scale != 1.0 else loss).backward(retain_graph=retain_graph)
            if not self._accumulates:
                self._reduce_the_rest()
        except BaseException:
            self.gemini_manager.end(completed=False)
            raise
        finally:
            self._scaled_backward = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards inside are kept whole on each rank, and reduced with those of the next one outside.

        Without it every backward's gradients are reduced at once, which takes less memory and more communication.
        """
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients."""
        self.gradients.begin_step()
        self.touched.clear()
        self._unreduced.clear()
        self.stepped = False

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Reduce what has not been: parameters without gradient keep a chunk waiting. Collective; ends the pass.

        Afterwards `touched` is the same on all ranks.
        """
        self._reduce_the_rest()
        self.gemini_manager.end(completed=True)
        params = [param for one in self.chunks for param in one.chunk.params]
        flags = self._of_any_rank([param in self.touched for param in params])
        self.touched = {param for param, flag in zip(params, flags, strict=True) if flag}
        for one in self.chunks:
            if not self.touched.isdisjoint(one.chunk.pieces):
                self.gradients.finish(one.chunk)

    def check_frozen(self) -> None:
        """Refuse parameters that have been unfrozen: they have neither masters nor gradients here."""
        trained = [(name, param) for name, param in self.module.named_parameters() if param.requires_grad]
        names = [name for name, param in trained if self.chunk_manager.of(param).master is None]
        if names:
            raise OptionError(f"frozen when the model was wrapped, and not any more: {', '.join(names)}; wrap it anew")

    # ---- state

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator:
        """Those of the module, by its names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator:
        """Those of the module, by its names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(  # type: ignore[override]  # as ColossalAI's
        self, *, prefix: str = "", only_rank_0: bool = False, dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """All values, in host memory, by the module's names; trained ones from the fp32 masters. Collective.

        only_rank_0: the other data-parallel ranks get {}, which saves their host memory. dtype: cast to it. Modules'
        hooks and overridden methods take part as in a plain model, on ranks that get the values.
        """
        keep = not only_rank_0 or self.chunk_manager.group.rank() == 0
        return model_state.complete(self.module, self.chunk_manager.built.values(), keep, dtype, prefix)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load `state_dict`, of any model of this shape, the same on all ranks. Collective where modules have code of
        their own for it. See `model_state.load`."""
        if assign:
            raise OptionError("assign=True would take parameters out of their chunks; leave it out")
        self.gemini_manager.end(completed=False)
        chunk_of = {param: one for one in self.chunk_manager.built.values() for param in one.chunk.params}
        return model_state.load(self.module, chunk_of, state_dict, strict, self._cast_buffer)

    # Hooks around state dicts are the module's, which makes and takes them; they are given this model as theirs.

    def register_state_dict_pre_hook(self, hook: Callable) -> Any:
        return self.module.register_state_dict_pre_hook(self._with_this(hook))

    def register_state_dict_post_hook(self, hook: Callable) -> Any:
        return self.module.register_state_dict_post_hook(self._with_this(hook))

    def _register_state_dict_hook(self, hook: Callable) -> Any:
        return self.module._register_state_dict_hook(self._with_this(hook))

    def register_load_state_dict_post_hook(self, hook: Callable) -> Any:
        return self.module.register_load_state_dict_post_hook(self._with_this(hook))

    def _register_load_state_dict_pre_hook(self, hook: Callable, with_module: bool = False) -> Any:
        hook = self._with_this(hook) if with_module else hook
        return self.module._register_load_state_dict_pre_hook(hook, with_module)

    def _with_this(self, hook: Callable) -> Callable:
        return lambda module, *rest: hook(self, *rest)

    def _apply(self, *unused: Any, **more: Any) -> Any:
        raise OptionError(
            "to(), half(), cuda() and their like cannot move chunks; GeminiDDP(device=..., mixed_precision=...) says "
            "where and of what type a model is"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        _no_copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OptionError("this model cannot be pickled: a rank has parts of it only; save model.state_dict()")

    # ---- inside

    def _dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self.mixed_precision if self.mixed_precision and tensor.is_floating_point() else tensor.dtype

    def _cast_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.to(device=self.chunk_manager.device, dtype=self._dtype(buffer))

    def _cast_input(self, one: Any) -> Any:
        return one.to(self._dtype(one)) if isinstance(one, torch.Tensor) else one

    def _forget_stepped(self) -> None:
        if self.stepped:
            self.zero_grad()

    @torch.no_grad()
    def _take_gradient(self, param: torch.nn.Parameter) -> None:
        grad, param.grad = param.grad, None
        if self.loss_scale != 1.0 and not self._scaled_backward:
            raise OptionError("this optimizer scales losses; call optimizer.backward(loss), not loss.backward()")
        assert grad is not None, "torch calls this when there is one"
        self._forget_stepped()
        one = self.chunk_manager.of(param)
        self.chunk_manager.gathering.settled(param)
        self.gradients.before(param)
        self._unreduced[one.chunk] = None
        one.chunk.grad[slice(*one.chunk.pieces[param])].view(param.shape).add_(grad)
        self.touched.add(param)
        self.gradients.after(param, last=not self._accumulates)

    @torch.no_grad()
    def _reduce_the_rest(self) -> None:
        """Start to reduce what has been waiting for gradients that do not come. Collective."""
        manager, order = self.chunk_manager, self.chunk_manager.gathering.order
        by_number = {one.chunk.index: one.chunk for one in self.chunks}
        while (number := order.next_reduction()) in by_number:
            self._reduce_incomplete(by_number[number])
        # Other ranks may be about to reduce a chunk that is complete there only: this tells them to put it off.
        order.may_do(_ALL_GRADIENTS, manager.group, manager.device)
        waiting = self._of_any_rank([one.chunk in self._unreduced for one in self.chunks])
        for one, waits in zip(self.chunks, waiting, strict=True):
            if waits:
                self._reduce_incomplete(one.chunk)

    def _reduce_incomplete(self, chunk: Chunk) -> None:
        self.gradients.before(chunk.params[0])  # also where none of its gradients came
        self.gradients.start(chunk)

    def _of_any_rank(self, flags: list[bool]) -> list[bool]:
        """Each flag is set if it is on any data-parallel rank. Collective."""
        manager = self.chunk_manager
        return list(map(bool, combined(list(map(float, flags)), dist.ReduceOp.MAX, manager.group, manager.device)))

    def _reduce(self, chunk: Chunk) -> Any:
        self._unreduced.pop(chunk, None)
        return self.chunk_manager.start_reduction(chunk)


def _no_copy(*unused: Any) -> Any:
    raise OptionError("a copy of this model would have no content; load its state_dict() into a model built anew")


def _sharing_memory(module: torch.nn.Module) -> list[str]:
    """Parameters that lie in the memory of other parameters or buffers, which chunks would part."""
    placed = []
    for name, one in (*module.named_parameters(), *module.named_buffers()):
        if one.layout is torch.strided and not one.is_nested and one.numel():
            last = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
            if last + 1 == one.numel():  # dense
                begin = int(one.storage_offset()) * one.element_size()
                placed.append((storage_of(one), begin, begin + one.nbytes, name, one.requires_grad))
    wrong: list[str] = []
    memory, end, other, trained = 0, 0, "", False
    for storage, begin, until, name, needs in sorted(placed):
        if storage == memory and begin < end and (needs or trained):
            wrong.append(f"{name} lies in the memory of {other}: tie them by being one Parameter, or clone one")
        if storage != memory or until > end:
            memory, end, other, trained = storage, until, name, needs
    return wrong


class GeminiDDP(ZeroDDP):
    """A `ZeroDDP` that makes its managers itself: chunk ZeRO for a plain torch model.

    Args:
        module: the model, see `ZeroDDP`.
        device: where the model computes; None: the accelerator, or the CPU if there is none.
        placement_policy, shard_param_frac, offload_optim_frac, offload_param_frac, gather_budget_mb, max_prefetch: see
            `GeminiManager`.
        pin_memory: host memory is always pinned where that exists; False is refused on an accelerator.
        search_range_mb, hidden_dim, min_chunk_size_mb: see `init_chunk_manager`; search_range_m and min_chunk_size_m
            are newer names.
        process_group: the data-parallel ranks; None: those that the parameters name (`tensor_spec`), or else all. A
            `ProcessGroup` also names the tensor-parallel ranks.
        force_outputs_fp32, mixed_precision: see `ZeroDDP`.

    Raises:
        OptionError: a ValueError that lists everything that is wrong.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device: torch.device | str | None = None,
        placement_policy: str = "static",
        pin_memory: bool = True,
        force_outputs_fp32: bool = False,
        search_range_mb: float = 32,
        hidden_dim: int | None = None,
        min_chunk_size_mb: float = 32,
        *,
        mixed_precision: torch.dtype | None = torch.float16,
        process_group: Any = None,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        gather_budget_mb: float | None = None,
        max_prefetch: int = 1,
        **unknown: Any,
    ) -> None:
        newer = {"search_range_m": search_range_mb, "min_chunk_size_m": min_chunk_size_mb}
        search_range_mb, min_chunk_size_mb = (unknown.pop(name, value) for name, value in newer.items())
        refuse(refuse_unknown("GeminiDDP", unknown, GeminiDDP.__init__, newer) + of_others(module))
        process_group = process_group_of(module) if process_group is None else process_group
        split_layers(module, process_group)
        chunks = init_chunk_manager(module, device, hidden_dim, search_range_mb, min_chunk_size_mb, process_group)
        if not pin_memory and chunks.backend.index() is not None:
            raise OptionError(
                "pin_memory=False is not supported: copies to and from pageable memory would hold up the device"
            )
        manager = GeminiManager(
            placement_policy,
            chunks,
            shard_param_frac=shard_param_frac,
            offload_optim_frac=offload_optim_frac,
            offload_param_frac=offload_param_frac,
            gather_budget_mb=gather_budget_mb,
            max_prefetch=max_prefetch,
        )
        super().__init__(module, manager, force_outputs_fp32, mixed_precision=mixed_precision)


def _to_fp32(one: Any) -> Any:
    return one.float() if isinstance(one, torch.Tensor) and one.is_floating_point() else one
