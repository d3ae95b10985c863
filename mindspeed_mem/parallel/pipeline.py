"""Pipeline stages of a plain module: ``layer.pipeline_stage = k`` says where it is cut, `pipeline` runs the parts.

`torch.distributed.pipelining` cuts the exported model and carries tensors between stages; the order of passes is the
one that the pack gives Megatron's pipelines (`mindspeed_mem.schedule`), caps on what is in flight included.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import SplitPoint
from torch.distributed.pipelining import pipeline as cut
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mindspeed_mem import ranks
from mindspeed_mem.device import get_backend
from mindspeed_mem.parallel.meshes import agree, mesh_in_use, of_other_kinds, old_torch
from mindspeed_mem.parallel.recompute import Recomputed, recompute
from mindspeed_mem.parallel.stages import stages_of
from mindspeed_mem.parallel.strategy import StrategyError
from mindspeed_mem.passes import BACKWARD, FORWARD, Pass
from mindspeed_mem.schedule import order

SCHEDULES = ("1f1b", "gpipe")
_cutting = logging.getLogger("torch.distributed.pipelining")


def pipeline(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    micro_batches: int = 1,
    schedule: str = "1f1b",
    *,
    loss: Callable[[Any, Any], torch.Tensor],
    axis: str = "pp",
    max_inflight_micro_batches: int | None = None,
) -> Pipeline:
    """Cut `model` into the stages that its layers' ``pipeline_stage`` name, and keep this rank's.

    A module without a number is of the stage of the module it is in, or else of the one that was registered before it;
    the first are of stage 0. With more stages than ranks along `axis`, rank r has the stages r, r + ranks, ... (virtual
    stages). Ranks along all other axes are replicas, and each takes its part of the batch.

    Args:
        model: one that torch.export can trace, in training mode and on this rank's device. Its parameters are trained,
            and those of other ranks' stages are freed if nobody else holds them. Replicas begin as the first of them.
            Modules with ``recompute()`` run again in backward.
        mesh: None: the one made last.
        micro_batches: of a replica's part of the batch, of one size.
        schedule: "1f1b": each micro-batch's backward as early as it can, interleaved where there are virtual stages;
            "gpipe": all forwards first.
        loss: of the model's output and a micro-batch's target, a mean over it.
        axis: of the mesh, along which the stages lie.
        max_inflight_micro_batches: how many a rank holds activations of at most; None: as many as `schedule` does.

    Raises StrategyError, with all that is wrong, or ScheduleError for what is wrong with the schedule's numbers.
    Collective.
    """
    mesh = mesh_in_use(mesh)
    if wrong := of_other_kinds(model, mesh):
        raise StrategyError(wrong)
    problems = old_torch("pipeline")
    if axis not in (mesh.mesh_dim_names or ()):
        names = ", ".join(mesh.mesh_dim_names or ()) or "no names"
        problems.append(f"the mesh has no axis {axis!r} (it has {names}): make it with parallel.mesh({axis}=2)")
    if schedule not in SCHEDULES:
        problems.append(f"schedule: got {schedule!r}; allowed: {', '.join(SCHEDULES)}")
    if schedule == "gpipe" and max_inflight_micro_batches is not None:
        problems.append("max_inflight_micro_batches is for schedule='1f1b': gpipe holds all micro-batches")
    if problems:
        raise StrategyError(problems)
    return Pipeline(model, mesh, micro_batches, schedule, loss, axis, max_inflight_micro_batches)


class Pipeline:
    """This rank's stages of a model, and how they train."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        micro_batches: int,
        schedule: str,
        loss: Callable[[Any, Any], torch.Tensor],
        axis: str,
        cap: int | None,
    ) -> None:
        self.mesh, self.micro_batches = mesh, micro_batches
        self._loss, self._axis = loss, axis
        self._group = mesh.get_group(axis)
        self._rank, self._ranks = mesh.get_local_rank(axis), mesh.size((mesh.mesh_dim_names or ()).index(axis))
        self._stages = stages_of(model, self._ranks)
        self._parts = self._stages.count // self._ranks
        self.orders = _orders(self._ranks, self._parts, micro_batches, schedule, cap)
        """The passes of each rank, as (direction, micro-batch, model chunk)."""
        self._schedules: dict[Any, _PipelineScheduleRuntime] = {}
        """By whether they train, and the inputs' shapes."""
        self._guard = _Guard()
        mine = {name for name, stage in self._stages.of.items() if stage % self._ranks == self._rank}
        self._parameters = {name: one for name, one in model.named_parameters() if name in mine}
        self._buffers = {name: one for name, one in model.named_buffers() if name in mine}
        self._state = {name: one for name, one in model.state_dict(keep_vars=True).items() if name in mine}
        self._model = _shell(model, mine)
        self._replicas = [name for name in mesh.mesh_dim_names or () if name != axis]
        self._device = next(chain(model.parameters(), model.buffers()), torch.empty(0)).device
        for tensors in (self._parameters, self._buffers):  # as of the first replica, whatever was drawn here
            for name in self._replicas:
                first = dist.get_global_rank(mesh.get_group(name), 0)
                for one in tensors.values():
                    dist.broadcast(one.detach(), first, group=mesh.get_group(name))

    # ---- what this rank has
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of this rank's stages, by their names in the model."""
        yield from self._parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of this rank's stages, for its optimizer. To clip their gradients see `clip_grad_norm_` here."""
        yield from self._parameters.values()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this rank's stages, by their names in the model."""
        return {name: one.detach() for name, one in self._state.items()}

    def whole_state_dict(self) -> dict[str, torch.Tensor]:
        """Those of all stages, on the host: what the model itself loads. Collective along the stages."""
        mine = {name: one.to("cpu", copy=True) for name, one in self.state_dict().items()}
        return {name: one for part in ranks.gather(mine, self._group) for name, one in part.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Take parameters and buffers over, by their names in the model.

        Args:
            state: of the whole model, as from `whole_state_dict` or the model itself, from which each rank takes what
                it has; or of this rank's stages, as from `state_dict` with stages cut alike. The same for all replicas.
            strict: what this rank has is all there, and nothing that the model has not.

        Raises StrategyError with all that does not fit, before anything is taken over.
        """
        wrong = []
        if strict:
            wrong = [f"{name}: it is missing, and this rank has it" for name in self._state if name not in state]
            wrong += [f"{name}: the model has no such tensor" for name in state if name not in self._stages.of]
        for name, mine in self._state.items():
            given = state.get(name, mine)
            if not isinstance(given, torch.Tensor):
                wrong.append(f"{name}: got {type(given).__name__}; a tensor")
            elif given.shape != mine.shape:
                wrong.append(f"{name}: got shape {tuple(given.shape)}; the model's is {tuple(mine.shape)}")
        if wrong:
            raise StrategyError(wrong)
        for name, mine in self._state.items():
            mine.copy_(state.get(name, mine))

    # ---- training and evaluation
    def step(self, *inputs: Any, target: torch.Tensor) -> torch.Tensor:
        """Forward and backward of a batch; gradients are added to ``.grad`` as of the mean loss.

        Args:
            inputs: of the model, the same on all ranks; tensors are cut along dimension 0, for replicas and
                micro-batches. Other shapes than before take the time of another export.
            target: of the loss, cut likewise.

        Returns the mean loss over the batch, the same on all ranks. Collective.

        Raises StrategyError for what cannot be cut, before anything is sent; and on all other ranks, after the step, of
        what the model or the loss raised on one. Then ``.grad`` is as before.
        """
        problems = [] if torch.is_grad_enabled() else ["step trains, and gradients are off here: see evaluate"]
        before = {name: one.grad for name, one in self._parameters.items()}
        for one in self._parameters.values():  # what a step adds is divided by the number of micro-batches
            one.grad = None
        done = False
        try:
            losses = self._run(True, inputs, target, problems)
            self._reduce()
            done = True
        finally:  # what was there before stays, whatever happens
            for name, gradient in before.items():
                parameter = self._parameters[name]
                if not done or parameter.grad is None:
                    parameter.grad = gradient
                elif gradient is not None:
                    parameter.grad = gradient.add_(parameter.grad)
        return self._mean(losses)

    def evaluate(self, *inputs: Any, target: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch without gradients, of the model in evaluation mode: arguments as of `step`."""
        with torch.no_grad():
            return self._mean(self._run(False, inputs, target, []))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As torch's `clip_grad_norm_`, of all stages: their gradients are scaled alike. After the last `step`.

        Args:
            max_norm: that the norm is to be at most.
            norm_type: 2.0, any other number above 0, or infinity for the largest element.

        Returns the norm before, the same on all ranks; not finite if a gradient of any stage is not. Collective.

        Raises StrategyError for numbers that are none of these, before anything is sent.
        """
        problems = []
        if not isinstance(max_norm, Real) or isinstance(max_norm, bool) or not max_norm >= 0:
            problems.append(f"max_norm: got {max_norm!r}; a number from 0 on")
        if not isinstance(norm_type, Real) or isinstance(norm_type, bool) or not norm_type > 0:
            problems.append(f"norm_type: got {norm_type!r}; a number above 0, or float('inf')")
        if problems:
            raise StrategyError(problems)
        kind = torch.float64 if get_backend(self._device.type).sums_float64 else torch.float32
        gradients = [one.grad for one in self._parameters.values() if one.grad is not None]
        failed: Exception | None = None
        try:
            own = nn.utils.get_total_norm(gradients, float(norm_type)).to(self._device, kind)
        except (RuntimeError, NotImplementedError) as error:  # of a sparse gradient: the others wait for this rank
            own, failed = torch.tensor(math.nan, device=self._device, dtype=kind), error
        norms = [torch.empty_like(own) for _ in range(self._ranks)]
        dist.all_gather(norms, own, group=self._group)
        if failed is not None:
            raise failed
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        nn.utils.clip_grads_with_norm_(self._parameters.values(), max_norm, total)
        return total

    def _run(self, trains: bool, inputs: tuple, target: Any, problems: list[str]) -> list[torch.Tensor]:
        """The losses of this rank's micro-batches, if it has the last stage."""
        parts = self._own_parts((*inputs, target), problems)
        shapes = tuple(one.shape if isinstance(one, torch.Tensor) else repr(one) for one in parts)
        agree(self.mesh, problems, f"{trains} {shapes}", "pipeline")
        schedule = self._schedules.get((trains, shapes))
        if schedule is None:
            try:
                schedule = self._cut(parts[:-1], trains)
            except StrategyError as error:
                problems += error.problems
            agree(self.mesh, problems)
            assert schedule is not None
            self._schedules[trains, shapes] = schedule
        losses: list[torch.Tensor] = []
        self._guard.error = None
        (schedule.step if trains else schedule.eval)(
            *(parts[:-1] if any(stage.is_first for stage in schedule._stages) else ()),
            target=parts[-1] if any(stage.is_last for stage in schedule._stages) else None,
            losses=losses,
            return_outputs=False,
        )
        raised = self._guard.error
        why = raised and (raised.__cause__ or raised)
        try:
            agree(self.mesh, [f"rank {ranks.number()} raised {type(why).__name__}: {why}"] if why else [])
        except StrategyError:
            if raised is not None:
                raise raised from raised.__cause__
            raise
        return losses

    def _own_parts(self, values: tuple, problems: list[str]) -> tuple:
        """Of tensors, this replica's part; the last one is the target."""
        *inputs, target = values
        if not isinstance(target, torch.Tensor):
            problems.append(f"target is a tensor, which is cut into micro-batches, not {type(target).__name__}")
        for number, one in enumerate(inputs):
            if not isinstance(one, torch.Tensor) and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(one)):
                problems.append(f"input {number} holds tensors in a {type(one).__name__}: pass each by itself")
        replicas, number = self._replica()
        sizes = {len(one): None for one in values if isinstance(one, torch.Tensor) and one.dim()}
        if len(sizes) > 1:
            problems.append(
                f"inputs and target have batches of {', '.join(map(str, sizes))}: dimension 0 is of one size"
            )
        elif any(size % (replicas * self.micro_batches) or not size for size in sizes):
            problems.append(
                f"a batch of {[*sizes][0]} does not divide by {replicas} replicas times {self.micro_batches} "
                "micro-batches"
            )
        if problems:
            return ()
        return tuple(
            one.chunk(replicas)[number] if isinstance(one, torch.Tensor) and one.dim() else one for one in values
        )

    def _replica(self) -> tuple[int, int]:
        """How many there are, and which one this rank is of."""
        count, number = 1, 0
        for name in self._replicas:
            size = self.mesh.size((self.mesh.mesh_dim_names or ()).index(name))
            count, number = count * size, number * size + self.mesh.get_local_rank(name)
        return count, number

    def _cut(self, inputs: tuple, trains: bool) -> _PipelineScheduleRuntime:
        """Export the model with a first micro-batch, and keep this rank's stages of it."""
        model = self._model
        example = tuple(
            one[: len(one) // self.micro_batches] if isinstance(one, torch.Tensor) and one.dim() else one
            for one in inputs
        )
        again = [name for name, one in model.named_modules() if isinstance(one.__dict__.get("forward"), Recomputed)]
        for name in again:  # the export would look through it
            recompute(model.get_submodule(name), active=False)
        modes = {one: one.training for one in model.modules()}
        plain, forms = model.forward, []

        @functools.wraps(plain)
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            forms.append(tree_flatten(result)[1])
            return result

        level = _cutting.level
        _cutting.setLevel(logging.WARNING)
        try:
            if not trains:
                model.eval()
            model.forward = noted
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch's export, of its own names
                pipe = cut(model, example, split_spec=dict.fromkeys(self._stages.begins, SplitPoint.BEGINNING))
        except Exception as error:
            why = str(error.__cause__ or error).strip().splitlines()[0]  # torch's own words are of no help
            raise StrategyError(f"torch.export cannot trace the model, so it cannot be cut ({why})") from error
        finally:
            _cutting.setLevel(level)
            model.forward = plain
            for path in self._stages.begins:
                module = model.get_submodule(path)
                module.forward = module.__dict__.pop("_orig_forward", module.forward)
            for name in again:
                recompute(model.get_submodule(name))
            for module, mode in modes.items():
                module.training = mode
        self._check(pipe)
        output = _output(pipe.split_gm.graph, forms[-1])
        stages = []
        for part in range(self._parts):
            number = part * self._ranks + self._rank
            stage = pipe.build_stage(number, self._device, self._group)
            names = {name for name, _ in stage.submod.named_modules()}
            for name in again:
                if name in names:
                    recompute(stage.submod.get_submodule(name))
            self._guard.around(stage)
            stages.append(stage)
        schedule = _PipelineScheduleRuntime(
            stages, self.micro_batches, lambda made, target: self._guard.loss(lambda: self._loss(output(made), target))
        )
        schedule._prepare_schedule_with_comms(_actions(self.orders))
        if not trains:  # torch takes no order without backwards
            kept = (_ComputationType.FORWARD, _ComputationType.SEND_F, _ComputationType.RECV_F)
            for rank, actions in schedule.pipeline_order_with_comms.items():
                schedule.pipeline_order_with_comms[rank] = [one for one in actions if one.computation_type in kept]
        return schedule

    def _check(self, pipe: Any) -> None:
        """Every tensor has to be where its number says."""
        problems = []
        numbers = range(self._stages.count)
        if any(not hasattr(pipe.split_gm, f"submod_pp_{number}") for number in numbers):
            begins = ", ".join(self._stages.begins)
            problems.append(
                f"{pipe.num_stages} of {len(numbers)} stages run: of {begins}, one is called first or never"
            )
            numbers = range(0)
        for number in numbers:
            module = pipe.get_stage_module(number)
            for name in (name for name, _ in [*module.named_parameters(), *module.named_buffers()]):
                wanted = self._stages.of.get(name, number)
                if wanted != number:
                    problems.append(f"{name} is of stage {wanted}, but it is used in stage {number}")
        if problems:
            problems.append("stages follow one another in the order in which the model calls its layers")
        else:
            problems = _far(pipe.split_gm.graph)
        if problems:
            raise StrategyError(problems)

    # ---- replicas
    def _reduce(self) -> None:
        """Gradients become means over the replicas."""
        gradients = [one.grad for one in self._parameters.values() if one.grad is not None]
        if not gradients or not self._replicas:
            return
        flat = torch._utils._flatten_dense_tensors(gradients)
        self._average(flat)
        for gradient, part in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(part)

    def _average(self, tensor: torch.Tensor) -> None:
        for name in self._replicas:
            dist.all_reduce(tensor, group=self.mesh.get_group(name))
        tensor.div_(self._replica()[0])

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """The loss of the whole batch, which the last stage's ranks know their parts of."""
        device = self._device
        mean = torch.stack(losses).detach().mean() if losses else torch.zeros((), device=device)
        mean = mean.to(torch.float64 if mean.dtype == torch.float64 else torch.float32)
        last = dist.get_global_rank(self._group, (self._stages.count - 1) % self._ranks)
        kind = torch.tensor(float(mean.dtype == torch.float64), device=device)
        dist.broadcast(kind, last, group=self._group)
        mean = mean.to(torch.float64 if kind.item() else torch.float32)
        dist.broadcast(mean, last, group=self._group)
        if self._replicas:
            self._average(mean)
        return mean


class _Guard:
    """Runs what the stages compute. After an exception nothing more is, and zeros are sent, so that the other ranks get
    to the end of the step."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def _try(self, compute: Callable[[], Any], instead: Callable[[], Any]) -> Any:
        if self.error is None:
            try:
                return compute()
            except Exception as error:
                self.error = error
        return instead()

    def loss(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self._try(compute, lambda: torch.zeros((), requires_grad=True))

    def around(self, stage: Any) -> None:
        """Have `stage` compute here. What it sends and gets is contiguous, as gloo wants it."""
        plain = stage.backward_one_chunk
        for node in stage.submod.graph.nodes:
            if isinstance(node.meta.get("val"), torch.Tensor):
                node.meta["val"] = node.meta["val"].contiguous()

        def forward(*args: Any, **kwargs: Any) -> Any:
            made = stage.submod(*args, **kwargs)
            return made.contiguous() if isinstance(made, torch.Tensor) else tuple(one.contiguous() for one in made)

        def zeros() -> tuple[torch.Tensor, ...]:
            return tuple(
                torch.zeros(one.shape, dtype=one.dtype, device=stage.device).requires_grad_(one.requires_grad)
                for one in stage._stage_meta.outputs
            )

        def backward(number: int, **more: Any) -> None:
            plain(number, **more)
            stage.bwd_cache[number] = tuple(
                None if one is None else one.contiguous() for one in stage.bwd_cache[number]
            )

        def nothing(number: int) -> None:
            stage.bwd_cache[number] = (None,) * len(stage.args_recv_info[number])

        stage.forward_maybe_with_nosync = lambda *args, **kwargs: self._try(lambda: forward(*args, **kwargs), zeros)
        stage.backward_one_chunk = lambda number, **more: self._try(
            lambda: backward(number, **more), lambda: nothing(number)
        )


def _shell(model: nn.Module, mine: Collection[str]) -> nn.Module:
    """A copy of the model with these of its very parameters, to be exported; the others hold nothing."""
    memo: dict[int, Any] = {id(one): one for one in model.buffers()}  # exports write to them
    for name, one in model.named_parameters():
        hollow = one.detach().new_zeros(()).expand(one.shape)
        memo[id(one)] = one if name in mine else nn.Parameter(hollow, one.requires_grad)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise StrategyError(f"the model cannot be copied, as pipelines have to: {error}") from error


def _output(graph: torch.fx.Graph, form: Any) -> Callable[[Any], Any]:
    """What makes the model's output of the last stage's."""
    (made,) = next(node for node in graph.nodes if node.op == "output").args
    leaves = list(made) if isinstance(made, (tuple, list)) else [made]
    last = [node for node in graph.nodes if node.op == "call_module"][-1]
    places = []
    for number, leaf in enumerate(leaves):
        single = leaf is last
        if isinstance(leaf, torch.fx.Node) and not single and last not in leaf.all_input_nodes:
            raise StrategyError(f"output {number} of the model is not made by the last stage, which has the loss")
        places.append((leaf, None if not isinstance(leaf, torch.fx.Node) else 0 if single else leaf.args[1]))

    def whole(parts: Any) -> Any:
        parts = parts if isinstance(parts, (tuple, list)) else (parts,)
        return tree_unflatten([leaf if place is None else parts[place] for leaf, place in places], form)

    return whole


def _far(graph: torch.fx.Graph) -> list[str]:
    """What a stage takes of another than the one before it: torch's pipelines carry nothing further."""
    made: dict[torch.fx.Node, int] = {}
    found = []
    number = -1
    for node in graph.nodes:
        if node.op == "call_module":
            number += 1
            for taken in node.all_input_nodes:
                if taken.op == "placeholder" and number:
                    found.append(f"stage {number} takes the model's input {taken.name}")
                elif made.get(taken, number - 1) != number - 1:
                    found.append(f"stage {number} takes a tensor that stage {made[taken]} made")
            made[node] = number
        elif node.op == "call_function":  # one of several outputs
            made[node] = made[node.all_input_nodes[0]]
    hint = "a stage takes only what the one before it returns: choose other layers to begin with, or hand it through"
    return [*dict.fromkeys(found), hint] if found else []


def _orders(stages: int, parts: int, micro_batches: int, schedule: str, cap: int | None) -> list[list[Pass]]:
    if schedule == "gpipe":
        forwards = order(stages, parts, micro_batches, forward_only=True)
        return [
            [*one, *((BACKWARD, micro_batch, chunk) for _, micro_batch, chunk in reversed(one))] for one in forwards
        ]
    return order(stages, parts, micro_batches, cap=cap)


def _actions(orders: list[list[Pass]]) -> dict[int, list[_Action | None]]:
    """The same in torch's words: "3F0" is the forward of micro-batch 0 in stage 3."""
    return {
        rank: [
            _Action.from_str(f"{chunk * len(orders) + rank}{'F' if direction == FORWARD else 'B'}{micro_batch}")
            for direction, micro_batch, chunk in passes
        ]
        for rank, passes in enumerate(orders)
    }
