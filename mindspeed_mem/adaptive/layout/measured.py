"""Layouts from a profile: what was measured under one of them, for all others.

The formulas (`from_shape`) say how seconds and bytes change from layout to layout, a profile what they really are in
one. So what each operator computes there is compared with the formula's, without what the formula has for collectives;
in every other layout an operator takes the formula's seconds by this factor, and its own collectives. Bytes of layers,
of the head, of states and of temporaries are taken by one factor each. A step's end (optimizer, reductions) is in no
pass, and stays the formula's. The link is the profile's.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mindspeed_mem.activation.observe.rank_profile import Outside
from mindspeed_mem.adaptive.layout.cluster import Cluster
from mindspeed_mem.adaptive.layout.enumeration import Model
from mindspeed_mem.adaptive.problem import from_shape
from mindspeed_mem.adaptive.problem.definition import LayerClass, Part, PlannedOperator, Problem
from mindspeed_mem.adaptive.problem.profile_file import Profile
from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Shape
from mindspeed_mem.plan import operators as op

_MIB = 2**20
_NEAR = 0.05
"""Bytes of a layer that are further off may be those of another model."""
_NEEDED = ("seq_length", "micro_batch_size", "tensor", "context", "expert", "data")
_SECONDS = ("forward_seconds", "backward_seconds")
_MANY = 5
"""Operators that are named at most."""


class OtherModelError(ValueError):
    """A profile does not say what it was measured on, or that was another model; `problems` has a line for each."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


class _Ratio(NamedTuple):
    """What was measured of seconds that the formula knows."""

    forward: float
    backward: float

    def scaled(self, whole: PlannedOperator | Outside, alone: PlannedOperator | Outside) -> dict[str, Any]:
        """Fields of an operator; ``alone``: the same without collectives, which stay as they are."""
        forward = whole.forward_seconds + (self.forward - 1) * alone.forward_seconds
        backward = whole.backward_seconds + (self.backward - 1) * alone.backward_seconds
        later = whole.weight_seconds * self.backward
        return {"forward_seconds": forward, "backward_seconds": backward, "weight_seconds": min(later, backward)}


class _Layers(NamedTuple):
    """What was measured of layers of one class."""

    ratios: Mapping[str, _Ratio]
    """By operator."""
    between: tuple[float, float]
    """Seconds, forward and backward, of the layer and of modules around operators: the host's, whatever the layout."""
    more: tuple[float, float]
    """Those of operators that the formula has nothing for, for each token and tensor-parallel rank."""
    again: Mapping[str, float]
    """By group: as a ratio, of its second run."""
    nbytes: float
    """For each byte by the formula."""


class Measured:
    """Estimates of all layouts of a model by what a profile has of one.

    Args:
        profile: measured, with the sizes of its layout (`Profile.shapes`).
        model: the same model; it may have another number of layers, or other sequences.
        cluster: what there is to train on. How fast ranks reach each other is taken from it, in the profile's layout,
            too.

    Raises:
        OtherModelError: the profile does not say what it was measured on, or that was another model.
    """

    def __init__(self, profile: Profile, model: Model, cluster: Cluster):
        self._there = there = profile.problem
        self._shape, self._split = _layout_of(profile, model)
        machine = cluster.machine_for(self._split)
        self._whole = whole = from_shape.problem(self._shape, self._split, machine)
        self._alone = alone = from_shape.problem(self._shape, self._split, _unconnected(machine))
        share = self._shape.tokens / self._split.tensor
        self._layers = {kind.name: _of_layers(there, kind, alone.class_of[kind.name], share) for kind in whole.classes}
        (first, last), (first_by_formula, last_by_formula), (_, last_alone) = map(_ends, (there, whole, alone))
        self._head = _ratio(last, last_by_formula, last_alone)
        self._head_bytes = _share(last.bytes, last_by_formula.bytes)
        self._first = (
            max(0.0, first.forward_seconds - first_by_formula.forward_seconds) / self._shape.tokens,
            max(0.0, first.backward_seconds - first_by_formula.backward_seconds) / self._shape.tokens,
        )
        self._static, self._temporary = (
            _share(*(sum(getattr(stage, name) for stage in one.stages) for one in (there, whole)))
            for name in ("static_bytes", "temporary_bytes")
        )
        if self._split.chunk_zero_stage:  # it does not say how much of them rests on the host
            self._static = 1.0

    def problem(self, shape: Shape, split: Degrees, machine: Machine) -> Problem:
        """As `from_shape.problem`."""
        whole, alone = (from_shape.problem(shape, split, one) for one in (machine, _unconnected(machine)))
        end = _parts(whole)[-1].first_layer
        stages = []
        for stage, other in zip(whole.stages, alone.stages, strict=True):
            pairs = zip(stage.parts, other.parts, strict=True)
            stages.append(
                dataclasses.replace(
                    stage,
                    parts=tuple([self._part(part, one, part.first_layer == end, shape.tokens) for part, one in pairs]),
                    static_bytes=int(stage.static_bytes * self._static),
                    temporary_bytes=int(stage.temporary_bytes * self._temporary),
                )
            )
        share = shape.tokens / split.tensor
        classes = [_scaled(kind, alone.class_of[kind.name], self._layers[kind.name], share) for kind in whole.classes]
        whole = dataclasses.replace(whole, classes=tuple(classes), stages=tuple(stages))
        return dataclasses.replace(whole, link=self._there.link, host=self._there.host)

    def said(self) -> list[str]:
        """What was measured beside what the formula says of it, for readers."""
        split, shape = self._split, self._shape
        sizes = {"tp": split.tensor, "cp": split.context, "ep": split.expert, "pp": split.pipeline, "dp": split.data}
        named = ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one device"
        lines = [
            f"It was measured with {named}, micro-batches of {shape.micro_batch_size} sequences of {shape.seq_length} "
            "tokens."
        ]
        for kind in self._whole.classes:
            layers = self._layers[kind.name]
            here = _scaled(kind, self._alone.class_of[kind.name], layers, shape.tokens / split.tensor)
            times = [1e3 * (one.forward_seconds + one.backward_seconds) for one in (here, kind)]
            sizes_there = [sum(group.bytes for group in one.groups) / _MIB for one in (here, kind)]
            text = "There a {} takes {:.4g} ms (by formula {:.4g}) and keeps {:.4g} MiB ({:.4g})"
            lines.append(text.format(kind.name, *times, *sizes_there))
            if abs(layers.nbytes - 1) > _NEAR:
                lines[-1] += ": is it this model, in bf16, with this --transformer-impl and --attention-backend?"
        return lines

    def _part(self, part: Part, alone: Part, last: bool, tokens: int) -> Part:
        before, after = part.before, part.after
        if last:
            after = dataclasses.replace(
                after,
                **self._head.scaled(after, alone.after),
                bytes=int(after.bytes * self._head_bytes),
                weight_bytes=int(after.weight_bytes * self._head_bytes),
                gradient_bytes=int(after.gradient_bytes * self._head_bytes),
            )
        if part.first_layer == 0 and part.layers:
            before = dataclasses.replace(
                before,
                forward_seconds=before.forward_seconds + tokens * self._first[0],
                backward_seconds=before.backward_seconds + tokens * self._first[1],
            )
        return dataclasses.replace(part, before=before, after=after)


def _unconnected(machine: Machine) -> Machine:
    """The same where nothing is lost on the way to other ranks."""
    return dataclasses.replace(machine, tensor_gbps=math.inf, network=None)


def _parts(problem: Problem) -> list[Part]:
    """In the model's order."""
    return sorted((part for stage in problem.stages for part in stage.parts), key=lambda part: part.first_layer)


def _ends(problem: Problem) -> tuple[Outside, Outside]:
    """The embedding, and head and loss."""
    parts = _parts(problem)
    return parts[0].before, parts[-1].after


def _layout_of(profile: Profile, model: Model) -> tuple[Shape, Degrees]:
    """What the profile was measured on."""
    known: dict[str, Any] = {**profile.model, **profile.shapes}  # a profile by formula has some in either
    needed = (*_NEEDED, "expert_tensor") if model.shape.num_experts else _NEEDED
    missing = [name for name in needed if type(known.get(name)) is not int or known[name] < (name != "expert_tensor")]
    if missing:
        raise OtherModelError([f"it does not say its sizes ({', '.join(missing)}): profile again with this version"])
    size = {name: known[name] for name in _NEEDED}
    there, ahead = profile.problem, model.shape.mtp_num_layers
    counts = [len(part.layers) for part in _parts(there)]
    counts[-1] -= ahead
    if counts[-1] < 1:
        raise OtherModelError(
            [f"its last part has {counts[-1] + ahead} layers, and the model {ahead} to predict ahead"]
        )
    which = model.shape.with_experts
    if sum(counts) != model.shape.num_layers and len(set(which)) > 1:
        text = f"it has {sum(counts)} layers of {model.shape.num_layers}, and which have experts differs"
        raise OtherModelError([text])
    shape = dataclasses.replace(
        model.shape,
        num_layers=sum(counts),
        with_experts=(which[:1] * sum(counts)) if len(set(which)) == 1 else which,
        seq_length=size["seq_length"],
        micro_batch_size=size["micro_batch_size"],
        context=size["context"],
        vocab_size=model.padded(size["tensor"]),
    )
    line = there.pipeline
    split = dataclasses.replace(
        model.split,
        **{name: size[name] for name in ("tensor", "context", "expert", "data")},
        expert_tensor=known.get("expert_tensor") or 0,
        pipeline=len(there.stages),
        virtual=there.virtual_stages,
        stage_layers=",".join(map(str, counts)),
        micro_batches=line.micro_batches,
        sequence_parallel=bool(known.get("sequence_parallel", size["tensor"] > 1)),
        distributed_optimizer=bool(known.get("distributed_optimizer")),
        chunk_zero_stage=known.get("chunk_zero_stage") or 0,
        schedule=line.schedule,
        split_backward=line.split_backward,
    )
    return shape, split


def _of_layers(there: Problem, whole: LayerClass, alone: LayerClass, share: float) -> _Layers:
    """What was measured of the layers that are most like these. Who predicts ahead has a decoder's layer, and around it
    what nobody could name: that is taken to be as much slower as that layer.

    alone: these without collectives. share: tokens of a tensor-parallel rank, there.
    """
    names = [name for name in whole.index if name != from_shape.PREDICTION]
    groups = [one for one in whole.groups if one.name != from_shape.PREDICTION and not one.from_previous]
    counts = Counter(name for part in _parts(there) for name in part.layers)
    some = [one for one in there.classes if counts[one.name]]
    alike = {one.name: (len(one.index.keys() & names), -len(one.index.keys() - names)) for one in some}
    like = [one for one in some if alike[one.name] == max(alike.values())]
    missing = [one.name for one in groups if not any(one.name in kind.index for kind in like)]
    if missing:
        few = ", ".join(missing[:_MANY]) + " and others" * (len(missing) > _MANY)
        raise OtherModelError([f"it was measured on another model, which has no {few}"])
    found, between, more, again, kept = _summed(like, counts, names)
    ratios: dict[str, _Ratio] = {}
    for operator, other in zip(whole.operators, alone.operators, strict=True):
        mine = Outside(forward_seconds=found[operator.name][0], backward_seconds=found[operator.name][1])
        ratios[operator.name] = _ratio(mine, operator, other)
        more[0] += mine.forward_seconds * (operator.forward_seconds == 0)
        more[1] += mine.backward_seconds * (operator.backward_seconds == 0)
    if from_shape.PREDICTION in whole.index:
        of_all = [
            [sum(getattr(one, field) for one in kind.operators if one.name in names) for kind in (whole, alone)]
            for field in _SECONDS
        ]
        sums = [sum(column) for column in zip(*(found[name] for name in names), strict=True)]
        ratios[from_shape.PREDICTION] = _Ratio(*(_factor(mine, *one) for mine, one in zip(sums, of_all, strict=True)))
    pairs = [pair for pair in zip(whole.groups, alone.groups, strict=True) if again[pair[0].name]]
    return _Layers(
        ratios,
        (between[0], between[1]),
        (more[0] / share, more[1] / share),
        {
            one.name: _factor(again[one.name], one.recompute_seconds, other.recompute_seconds or 0.0)
            for one, other in pairs
            if one.recompute_seconds
        },
        _share(kept, sum(group.bytes for group in groups)),
    )


def _summed(
    like: Sequence[LayerClass], counts: Mapping[str, int], names: Sequence[str]
) -> tuple[defaultdict[str, list[float]], list[float], list[float], defaultdict[str, float], float]:
    """Of the mean layer of these classes: seconds, forward and backward, of each operator in ``names`` with what is
    inside it, of what is around some of them, and of all others; of second runs by group; bytes kept of its own.

    counts: layers of each class.
    """
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    between, more = [0.0, 0.0], [0.0, 0.0]
    again: defaultdict[str, float] = defaultdict(float)
    kept, layers = 0.0, sum(counts[kind.name] for kind in like)
    for kind in like:
        weight = counts[kind.name] / layers
        for operator in kind.operators:
            around = [name for name in names if name and (name == operator.name or op.within(operator.name, name))]
            if around:
                sums = found[max(around, key=len)]
            else:
                sums = between if any(op.within(name, operator.name) for name in names) else more
            sums[0] += weight * operator.forward_seconds
            sums[1] += weight * operator.backward_seconds
        for group in kind.groups:
            again[group.name] += weight * (group.recompute_seconds or 0.0)
            kept += weight * group.bytes * (not group.from_previous)
    return found, between, more, again, kept


def _ratio(there: Outside, whole: PlannedOperator | Outside, alone: PlannedOperator | Outside) -> _Ratio:
    """``whole``, ``alone``: by the formula, with collectives and without."""
    return _Ratio(
        _factor(there.forward_seconds, whole.forward_seconds, alone.forward_seconds),
        _factor(there.backward_seconds, whole.backward_seconds, alone.backward_seconds),
    )


def _factor(there: float, whole: float, alone: float) -> float:
    """What computing takes for each second by the formula. Where all that was measured is less than the formula has
    for collectives, these were faster, too."""
    if not alone:
        return 1.0
    computing = there - (whole - alone)
    return computing / alone if computing > 0 else there / whole


def _share(there: float, by_formula: float) -> float:
    return there / by_formula if there and by_formula else 1.0


def _scaled(whole: LayerClass, alone: LayerClass, layers: _Layers, share: float) -> LayerClass:
    """The formula's class by what was measured; ``share``: tokens of a tensor-parallel rank."""
    operators = []
    for operator, other in zip(whole.operators, alone.operators, strict=True):
        fields = layers.ratios[operator.name].scaled(operator, other)
        if not operator.name:
            for name, between, more in zip(_SECONDS, layers.between, layers.more, strict=True):
                fields[name] += between + more * share
        for name in ("weight_bytes", "gradient_bytes"):
            fields[name] = int(getattr(operator, name) * layers.nbytes)
        operators.append(dataclasses.replace(operator, **fields))
    groups = []
    for group, apart in zip(whole.groups, alone.groups, strict=True):
        again = group.recompute_seconds
        if again and apart.recompute_seconds:
            factor = layers.again.get(group.name)
            if factor is None:
                names = group.recompute_operators or group.operators
                seconds = {name: alone.operators[alone.index[name]].forward_seconds for name in names}
                scaled = sum(layers.ratios[name].forward * one for name, one in seconds.items())
                factor = scaled / sum(seconds.values()) if any(seconds.values()) else 1.0
            again += (factor - 1) * apart.recompute_seconds
        names = ("bytes", "recompute_keeps", "weight_bytes")
        sizes: dict[str, Any] = {name: int(getattr(group, name) * layers.nbytes) for name in names}
        leaves = tuple((name, int(size * layers.nbytes)) for name, size in group.leaves)
        groups.append(dataclasses.replace(group, **sizes, leaves=leaves, recompute_seconds=again))
    return dataclasses.replace(
        whole,
        operators=tuple(operators),
        groups=tuple(groups),
        input_bytes=int(whole.input_bytes * layers.nbytes),
    )
