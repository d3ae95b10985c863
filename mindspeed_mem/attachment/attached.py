"""Puts a memory plan into force on a plain torch model, and takes it off again.

The engine is the one that runs Megatron's layers. What Megatron's patches tell it is said here: which modules are
layers (`blocks`), and that a forward of the model is a pass. No schedule tells when a backward begins: gradients do.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib
import inspect
import logging
import os
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mindspeed_mem import features, ranks, requirements
from mindspeed_mem.activation import asked, compiled_calls, regions
from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation.engine import Engine
from mindspeed_mem.activation.rerun.module_rerun import under_way
from mindspeed_mem.activation.stacks import mark_static
from mindspeed_mem.activation.storage import marks
from mindspeed_mem.activation.storage.records import local_of
from mindspeed_mem.activation.wording import ATTACH
from mindspeed_mem.activation.wrappers import region_forward
from mindspeed_mem.attachment import blocks, checks, compiled, gathering, optimizers, second_attempt, shared
from mindspeed_mem.nested import tensors_in
from mindspeed_mem.parallel.recompute import recompute
from mindspeed_mem.patching import REGISTRY
from mindspeed_mem.plan import MemoryConfig, MemoryConfigError
from mindspeed_mem.plan.checks import given
from mindspeed_mem.report import log
from mindspeed_mem.report.swap_report import format_report

if TYPE_CHECKING:
    from mindspeed_mem.attachment.adapting import Steps

logger = logging.getLogger(__name__)

_MODEL = "_mindspeed_mem_model"
"""On the attached model: its forward is a pass."""
_OWN = "_mindspeed_mem_forward"
"""On a module that had a forward of its own: that."""
_OURS = "mindspeed_mem_ours"
"""On a forward that we have put on a module. Copies of models have them, and modules that are added to one."""
_REPLICATE = "_replicate_for_data_parallel"
"""By which torch copies a module to another device. Our forward on the copy would be that of the original."""
_PATCHES = ("mindspeed_mem.patches.activation_saved_tensors", "mindspeed_mem.patches.activation_transforms")
"""Under saved-tensor hooks custom functions read what they saved through the first; the second lets torch.func run."""

_Result = TypeVar("_Result")


class Attached:
    """A memory plan in force on a model; `attach` returns it. Used as a context manager, it detaches at the end."""

    def __init__(
        self, model: nn.Module, engine: Engine, layers: Mapping[str, Sequence[nn.Module]], limited: bool = False
    ):
        self.model = model
        self.engine = engine
        self.layers = {name: list(members) for name, members in layers.items()}
        """The layers of each list by its name; the plan counts on from list to list."""
        self._ours: dict[nn.Module, types.MethodType] = {}  # the forwards that we have put on modules
        self._changed: set[nn.Module] = set()  # what we go around, compiled or not
        self._traced = compiled.inside(model)
        self._limited = limited  # the device's memory, by us
        self._detached = self._said = False  # the latter: to whoever goes on as before
        self._steps: Steps | None = None  # where a plan is searched
        engine.attached_to = weakref.ref(model)
        self._before_step = optimizers.before_second_step_of(model, _say_if_unseen)
        try:
            self._put_on()
        except BaseException:
            self.detach()
            raise

    def _search(self, target: Path | None) -> None:
        """Find a plan in the steps that come."""
        from mindspeed_mem.attachment.adapting import Steps

        self._steps = Steps(self.model, self.engine, target)

    @property
    def operators(self) -> dict[int, tuple[str, ...]]:
        """The names of each layer's operators, by the layer's number: what a plan can name."""
        return {index: tuple(sorted(paths)) for index, paths in regions.tagged_layers().items()}

    def report(self) -> str:
        """A table of what was swapped and recomputed so far, a row for each rank; empty on ranks other than 0, and if
        there is neither a plan nor survival. Collective."""
        everyone = ranks.gather(self.engine.report())
        text = format_report(everyone) if ranks.number() == 0 else ""
        return f"{text}\n{_UNSEEN}" if text and not self.engine.passes.alone_so_far else text

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Put this around a training step: forwards with their loss, backwards, and the optimizer's step.

        With ``survive``, an operator inside that finds no device memory runs again after activations have moved to the
        host. With the plan "auto", this is a step that is profiled and planned for. Otherwise it does nothing.

        Raises NoRoomError, a torch.OutOfMemoryError that says what holds the memory, if no room can be made.
        """
        if self._is_off():
            yield
            return
        try:
            with self._followed(), self._guarded():
                yield
        except (RuntimeError, MemoryError) as error:
            survival = self.engine.survival
            if survival is None or not survival.backend.is_out_of_memory(error):
                raise
            failed = survival.explained(error)
            if failed is error:
                raise
            raise failed from error

    def run_step(self, call: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        """Run ``call(*args, **kwargs)`` as a `step`. If it runs out of memory, it runs once more as a whole, with
        everything swapped.

        A second run is possible only if all gradients were None when the step began, no optimizer has begun to step,
        and the step has taken part in no collective. The step must take its data from its arguments: iterators among
        them are rewound for the second run. Random numbers and buffers are restored, too, but nothing else that the
        step changes.

        Returns what ``call`` returns. Raises NoRoomError, a torch.OutOfMemoryError that says why the step was not
        tried again.
        """
        survival = self.engine.survival
        if survival is None or self._is_off():
            return call(*args, **kwargs)
        with self._followed():
            return second_attempt.run(survival, self.model, self._guarded, self._begins_again, call, args, kwargs)

    def _is_off(self) -> bool:
        """Whether it was detached, which is said at the first step after that."""
        if self._detached and not self._said:
            self._said = True
            logger.warning("a step after detach() is a step without a plan: attach the model again for one")
        return self._detached

    def _followed(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._steps is None else self._steps.following()

    def _begins_again(self) -> None:
        if self._steps is not None:
            self._steps.begin_again()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        survival = self.engine.survival
        if survival is None:
            yield
            return
        with survival.guarded(parts=2), survival.holding_all():
            yield

    def detach(self) -> None:
        """Remove the plan from the model, between two steps. Activations that have left still come back for a backward.

        Raises RuntimeError if a forward was wrapped after `attach`: remove that wrapper first.
        """
        for module, forward in self._ours.items():
            if module.__dict__.get("forward") is not forward and not _is_below(module, forward):
                who = type(module).__name__
                raise RuntimeError(f"the forward of a {who} was replaced after attach: take that off, then detach")
        _undo_patches()
        for module in (self.model, *(self._changed - set(self.model.modules()))):  # those too that have left it
            _take_off(module)
        self._ours.clear()
        self._detached = True
        self._before_step.remove()
        self.engine.passes.given = self._steps = None
        if engines.current() is self.engine:
            engines.stop()
            if self._limited:
                self.engine.backend.limit_memory(None)
        for module in self.model.modules():
            if asked.RECOMPUTE in module.__dict__:  # asked for meanwhile: it does so by itself from now on
                recompute(module)

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _models(self) -> list[nn.Module]:
        """What has a forward that is a pass."""
        several = isinstance(self.model, (nn.ModuleList, nn.ModuleDict))
        return list(self.model.children()) if several else [self.model]

    def _put_on(self) -> None:
        for patch in _PATCHES:
            importlib.import_module(patch)
        REGISTRY.apply(_PATCHES)
        index = 0
        for members in self.layers.values():
            for layer in members:
                regions.tag_layer(layer, index)
                for path, module in layer.named_modules():
                    if regions.TAG in module.__dict__:
                        module.__dict__[regions.TAG] = (index, blocks.in_layer(path))
                index += 1
        everything = [layer for members in self.layers.values() for layer in members]
        for line in shared.note(everything, blocks.in_layer):
            if ranks.number() == 0:
                logger.warning(line)
        for number, layer in enumerate(everything):
            if compiled_calls.is_compiled(layer):
                self._wrap(layer, compiled.as_operator(layer, number))
            if regions.SHARED in layer.__dict__:
                self._wrap(layer, shared.layer_forward)
        for module in blocks.outside(self.model, everything):
            index += 1  # the plan does not reach it: it may only save what a layer made
            regions.tag_tail(module, index)
        for module in self.model.modules():
            if regions.TAG in module.__dict__:
                self._wrap(module, region_forward.make)
        for module in self._models():
            module.__dict__[_MODEL] = True
            self._wrap(module, pass_forward)
        in_force, first = self.engine.in_force, 0
        for name, members in self.layers.items():
            if name:
                in_force.stacks[name] = range(first, first + len(members))
            first += len(members)
        in_force.num_layers, in_force.followers, self.engine.takes_asked = first, set(range(index + 1)), True
        in_force.config = asked.joined(in_force.config)
        if (survival := self.engine.survival) is not None:  # how many layers run may depend on data, or on chance
            self.engine.passes.layer_given = lambda *given: survival.given(tensors_in(given), told_by="layers")
        self.engine.resolve(lambda mine: [mine])
        mark_static([self.model])

    def _wrap(self, module: nn.Module, around: Callable[[Callable], Callable]) -> None:
        """Go around its forward: on the module, since its class may look at what its own forward is."""
        if module in self._traced:
            return
        self._changed.add(module)
        if (call := compiled_calls.call_of(module)) is not None:
            compiled_calls.go_around(module, around, compiled_calls.finding_room(_of_compiled(call)))
            return
        original = _of_class
        if module in self._ours:
            original = self._ours[module].__func__
        elif "forward" in module.__dict__:
            module.__dict__[_OWN], original = module.__dict__["forward"], _of_module
        if module not in self._ours and compiled_calls.is_compiled(module):  # by a wrapper, which it is
            original = compiled_calls.finding_room(original)
        forward = functools.update_wrapper(around(original), module.__dict__.get(_OWN, type(module).forward))
        forward.__dict__[_OURS] = True
        if _OWN in module.__dict__:
            _with_self(forward, module.__dict__[_OWN], module)
        # a method, so that copies have theirs
        self._ours[module] = module.__dict__["forward"] = types.MethodType(forward, module)
        module.__dict__[_REPLICATE] = types.MethodType(_replicate_for_data_parallel, module)


def _is_below(module: nn.Module, forward: types.MethodType) -> bool:
    """Whether somebody has taken our forward off the module, and left what it goes around, or what that does."""
    now, below = module.forward, forward.__func__
    while hasattr(below, "__wrapped__"):
        below = below.__wrapped__
        if below is getattr(now, "__func__", now):
            return True
    return False


def _undo_patches() -> None:
    """But for what the flags of megatron_adaptor ask for, too."""
    wanted = features.in_force().patches
    names = {patch: patch.rpartition(".")[2] for patch in _PATCHES}
    REGISTRY.undo([one for one, name in names.items() if not any(fnmatch.fnmatch(name, each) for each in wanted)])


def _take_off(model: nn.Module) -> None:
    regions.untag(model)
    for module in model.modules():
        module.__dict__.pop(_MODEL, None)
        module.__dict__.pop(regions.SHARED, None)
        module.__dict__.pop(_REPLICATE, None)
        compiled_calls.take_off(module)
        if hasattr(module.__dict__.get("forward"), _OURS):
            del module.__dict__["forward"]
            if _OWN in module.__dict__:
                module.__dict__["forward"] = module.__dict__[_OWN]
        module.__dict__.pop(_OWN, None)  # also of one that somebody has unwrapped meanwhile
    for tensor in (*model.parameters(), *model.buffers()):
        marks.forget(local_of(tensor))


def _replicate_for_data_parallel(module: nn.Module) -> nn.Module:  # its name is what pickles look for
    raise RuntimeError(
        f"a {type(module).__name__} of an attached model is to be copied to several devices, as DataParallel does; "
        f"{_DATA_PARALLEL}, or detach the model first"
    )


def _with_self(forward: Any, own: Callable, of: nn.Module) -> None:
    """What `own` takes, after the module."""
    if getattr(own, "__self__", None) is of:  # whoever unwraps it binds what is below to the module, as accelerate does
        forward.__wrapped__ = own.__func__  # type: ignore[attr-defined]
    else:
        del forward.__wrapped__
    with contextlib.suppress(TypeError, ValueError):  # C functions have no signature
        signature = inspect.signature(own)
        module = inspect.Parameter("module", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = signature.replace(parameters=[module, *signature.parameters.values()])


def _say_if_unseen() -> None:
    """The model is trained."""
    engine = engines.current()
    if engine is None or engine.attached_to is None or ranks.number() != 0:
        return
    if not engine.in_force.idle and not engine.passes.alone_so_far:
        logger.warning(_UNSEEN)


def _gather(module: nn.Module) -> None:
    engine = engines.current()
    if engine is not None and engine.attached_to is not None:
        gathering.for_second_run(module, engine.attached_to())


def _again() -> bool:
    """Whether this is a second run. Compiled code would be compiled anew for it: who calls it gathers for all in it."""
    return not torch.compiler.is_dynamo_compiling() and bool(under_way)


def _of_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of its class, which may be another one since (`fully_shard`)."""
    if _again():
        _gather(module)
    return type(module).forward(module, *args, **kwargs)


def _of_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward that somebody had put on it."""
    if _again():
        _gather(module)
    return module.__dict__[_OWN](*args, **kwargs)


def _of_compiled(call: Callable) -> Callable:
    """Its compiled calls; copies of a module have none."""

    def calls(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _again():
            _gather(module)
        return call(*args, **kwargs)

    return calls


def pass_forward(original: Callable) -> Callable:
    current, compiling = engines.current, torch.compiler.is_compiling

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if compiling() or _MODEL not in module.__dict__:
            return original(module, *args, **kwargs)
        engine = current()
        if engine is None:
            return original(module, *args, **kwargs)
        if not engine.in_force.partners and ranks.is_initialized():
            engine.in_force.partners = frozenset(range(torch.distributed.get_world_size()))
        if engine.backend.is_capturing() and not engine.in_force.idle and regions.may_save():
            raise RuntimeError(_CAPTURED)
        if engine.survival is not None:
            engine.survival.given(tensors_in((args, kwargs)))
        if engine.passes.given is not None and torch.is_grad_enabled():
            engine.passes.given(args, kwargs)
        given = _nodes_of((args, kwargs))  # before it changes them in place; they may be given to it again
        return engine.passes.alone(
            lambda: original(module, *args, **kwargs),
            lambda found: [node for node in _nodes_of(found) if node not in given],
        )

    return forward


_AT_ONCE = "swap_config.output_gradients has no effect: only Megatron's linear layers put gradients of weights off"
_UNSEEN = (
    "no forward of the model with gradients was seen: none has run, or it is compiled as a whole, and the plan has no "
    "effect"
)
_CAPTURED = (
    "a CUDA graph is being captured of a forward of the attached model, which cannot be: what a plan moves and makes "
    "again is no part of a graph; make graphs of parts of its layers, before attach (each is one operator), or detach "
    "the model first"
)
_DATA_PARALLEL = "use torch's DistributedDataParallel, a process for each device, in place of DataParallel"


def attach(
    model: nn.Module,
    plan: checks.Plan | MemoryConfig | None,
    *,
    layers: Sequence[str] | None = None,
    host_memory_gib: float | None = None,
    device_memory_gib: float | None = None,
    survive: bool = False,
    adaptive_plan_file: str | os.PathLike[str] | None = None,
) -> Attached:
    """Swap and recompute activations of any torch model by a plan. Losses and gradients stay bit-identical.

    Call it when the model is on the current device, before or after wrapping it (DistributedDataParallel,
    `fully_shard`); in a distributed job, on all ranks. Only one model can be attached at a time: to attach several,
    put them into an `nn.ModuleList`.

    Args:
        model: the model. Each of its forwards is one micro-batch of the plan.
        plan: a YAML file, or a mapping with the contents of one, as for ``--memory-config``. Its layers are the members
            of the model's lists of blocks, numbered from 0; its operators are the modules in a layer, by name. None:
            no plan, for ``survive`` or single modules (`swap`, `recompute`). "auto": steps (`Attached.step`) survive a
            lack of memory, some are profiled, and the fastest plan that fits is found.
        layers: names of lists of blocks, and of single modules, to use as layers instead, in the order they run in.
        host_memory_gib: host memory that activations may fill on this rank, in GiB; None: no limit.
        device_memory_gib: device memory that this process may use from now on, in GiB; None: all there is.
        survive: when an operator inside `Attached.step` finds no device memory, move activations to the host and run it
            again. The plan "auto" always does this.
        adaptive_plan_file: file to keep the plan in that "auto" settles on. A plan that is there already is used if it
            was made for the same model, input, device, limits, ranks and versions.

    Returns the plan in force; `Attached.detach` removes it.

    Raises:
        MemoryConfigError: a ValueError that lists everything wrong with the model, the plan, or the two together.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise MemoryConfigError(
            [f"model: got a {type(model).__name__}; allowed: a torch.nn.Module in Python"], "attach"
        )
    log.set_up(ranks.number())
    problems = _why_not(model)
    backend = checks.backend_of(model, problems)
    host_bytes, device_bytes = (
        checks.bytes_of(name, value, problems)
        for name, value in (("host_memory_gib", host_memory_gib), ("device_memory_gib", device_memory_gib))
    )
    if layers is not None and (isinstance(layers, str) or not layers):
        problems.append(f"layers: got {given(layers)}; allowed: a list of names of modules, or None")
        layers = None
    found = blocks.lists_of_blocks(model) if layers is None else blocks.named_layers(model, layers, problems)
    searches = isinstance(plan, str) and plan == "auto"
    config = checks.config_of(None if searches else plan, found, problems)
    if searches:
        problems += _why_no_search(model)
    elif adaptive_plan_file is not None:
        problems.append(f"adaptive_plan_file: got {given(adaptive_plan_file)}; allowed with plan='auto' only")
    if not isinstance(adaptive_plan_file, (str, os.PathLike, type(None))):
        problems.append(f"adaptive_plan_file: got {given(adaptive_plan_file)}; allowed: a path, or None")
    if problems or config is None or backend is None:
        raise MemoryConfigError(problems, "attach" if config is None else config.source)
    if device_bytes is not None:
        try:
            backend.limit_memory(device_bytes)
        except ValueError as error:
            raise MemoryConfigError([f"device_memory_gib: {error}"], config.source) from error
    if searches and backend.limit() is None:
        why = "got None, and this device does not say how much memory it has; with plan='auto', give it in GiB"
        raise MemoryConfigError([f"device_memory_gib: {why}"], config.source)
    engine = engines.start(config, backend, host_bytes, survive=survive or searches, wording=ATTACH)
    attached = Attached(model, engine, found, device_bytes is not None)
    if searches:
        attached._search(None if adaptive_plan_file is None else Path(adaptive_plan_file))
    everything = [layer for members in found.values() for layer in members]
    idle = [compiled.AS_ONE] if compiled.are_one(model, everything) else []
    at_once = [_AT_ONCE] if config.swap.swap and config.swap.output_gradients else []
    for notice in [*config.notices, *at_once, *idle] if ranks.number() == 0 else ():
        logger.warning(notice)
    return attached


def _why_not(model: nn.Module) -> list[str]:
    if lazy := [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]:
        several = f" and {len(lazy) - 1} more" if len(lazy) > 1 else ""
        return [f"model: {lazy[0]}{several} has no shape yet; run the model once, as torch's lazy modules need it"]
    problems = []
    before = engines.current()
    if before is not None and before.attached_to is not None and engines.attached_model() is None:
        engines.stop()
        _undo_patches()
    if engines.current() is None:
        _take_off(model)  # a copy of one that was attached
    if _MODEL in model.__dict__ or any(regions.TAG in module.__dict__ for module in model.modules()):
        problems.append("model: it is attached already; call detach() of what attach returned first")
    elif engines.current() is not None:
        problems.append(
            "model: another memory plan is in force, of an attached model (detach it; for two models at a time attach "
            "an nn.ModuleList of both) or of megatron_adaptor"
        )
    if isinstance(model, nn.DataParallel):
        problems.append(f"model: got a DataParallel; {_DATA_PARALLEL}")
    return problems


def _why_no_search(model: nn.Module) -> list[str]:
    problems = []
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        problems.append(
            f"plan: got 'auto' for a {type(model).__name__}, whose models run one by one; allowed: a model that "
            "runs as a whole, or a plan written by hand"
        )
    no_solver = requirements.without_solver()
    problems += [f"plan: got 'auto', which decides itself about {name}" for name in asked.marked(model)]
    return problems + ([f"plan: got 'auto'; {no_solver}"] if no_solver else [])


def _nodes_of(value: Any) -> dict[Any, None]:
    """The nodes of the graph that made tensors in ``value``, each once."""
    return dict.fromkeys(one.grad_fn for one in tensors_in(value) if one.grad_fn is not None)
