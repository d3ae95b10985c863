"""Layouts from a profile: what was measured under one of them says what others take."""

import dataclasses
import math
import shlex

import pytest

from mindspeed_mem.__main__ import main
from mindspeed_mem.adaptive.layout import accounting
from mindspeed_mem.adaptive.layout.measured import Measured, OtherModelError
from mindspeed_mem.adaptive.layout.search import LayoutSearch
from mindspeed_mem.adaptive.problem import from_shape, profile_file
from mindspeed_mem.adaptive.problem.checks import problems_of
from mindspeed_mem.adaptive.problem.definition import Link
from mindspeed_mem.adaptive.problem.profile_file import Profile
from tests.unit.test_layout_command import SMALL
from tests.unit.test_layout_search import EXPERTS, LLAMA, devices, every, model

LINK = Link(out=7.0, back=8.0, slows=0.1)
LAYOUTS = [
    {"tensor": 2, "pipeline": 2, "virtual": 1, "micro_batch": 2},
    {"tensor": 1, "pipeline": 1, "virtual": 1, "micro_batch": 1},
]


def parts_of(problem):
    return [part for stage in problem.stages for part in stage.parts]


def unconnected(machine):
    return dataclasses.replace(machine, tensor_gbps=math.inf, network=None)


def measured(what, on, fixed, times=1.0, nbytes=1):
    """A profile of a layout in which computing takes ``times`` what it does by formula, and all bytes are ``nbytes``
    as many."""
    layout = every(what, on, **fixed)[0]
    split, shape = layout.split(what, on.devices), layout.shape(what)
    machine = on.machine_for(split)
    whole, alone = (from_shape.problem(shape, split, one) for one in (machine, unconnected(machine)))

    def slower(one, other):
        names = ("forward_seconds", "backward_seconds")
        return {name: getattr(one, name) + (times - 1) * getattr(other, name) for name in names}

    def named(one):  # as a real model's layer that predicts ahead: by the modules that it has
        return dataclasses.replace(one, name="eh_proj") if one.name == from_shape.PREDICTION else one

    def groups(kind, other):
        for group, another in zip(kind.groups, other.groups, strict=True):
            seconds = group.recompute_seconds
            if seconds is not None:
                seconds += (times - 1) * another.recompute_seconds
            more = {"bytes": nbytes * group.bytes, "recompute_seconds": seconds}
            if group.name == from_shape.PREDICTION:
                more |= {"operators": ("eh_proj",), "used_by": ("eh_proj",)}
            yield dataclasses.replace(named(group), **more)

    classes = [
        dataclasses.replace(
            kind,
            name=f"layers like {kind.name}",
            operators=tuple(
                dataclasses.replace(named(one), **slower(one, another))
                for one, another in zip(kind.operators, other.operators, strict=True)
            ),
            groups=tuple(groups(kind, other)),
        )
        for kind, other in zip(whole.classes, alone.classes, strict=True)
    ]
    other_parts = iter(parts_of(alone))
    stages = []
    for stage in whole.stages:
        parts = []
        for part in stage.parts:
            after = dataclasses.replace(part.after, **slower(part.after, next(other_parts).after))
            after = dataclasses.replace(after, bytes=nbytes * after.bytes)
            names = tuple(f"layers like {name}" for name in part.layers)
            parts.append(dataclasses.replace(part, layers=names, after=after))
        stages.append(dataclasses.replace(stage, parts=tuple(parts), static_bytes=nbytes * stage.static_bytes))
    problem = dataclasses.replace(whole, classes=tuple(classes), stages=tuple(stages), link=LINK)
    sizes = {name: getattr(split, name) for name in ("tensor", "context", "expert", "data", "expert_tensor")}
    flags = {name: getattr(split, name) for name in ("sequence_parallel", "distributed_optimizer")}
    of_shape = {"seq_length": shape.seq_length, "micro_batch_size": shape.micro_batch_size}
    return Profile(problem=problem, shapes={**sizes, **flags, **of_shape})


@pytest.mark.parametrize("fixed", LAYOUTS, ids=["two by two", "one"])
@pytest.mark.parametrize(
    "shape", [LLAMA, EXPERTS, dataclasses.replace(LLAMA, mtp_num_layers=1)], ids=["dense", "experts", "ahead"]
)
def test_what_is_measured_in_one_layout_is_expected_of_all(shape, fixed):
    """Where a profile computes three times as long and holds twice as much, all layouts do, and what travels between
    ranks takes as long as before."""
    what, on = model(shape, batch=16), devices()
    profile = measured(what, on, fixed, times=3.0, nbytes=2)
    assert problems_of(profile.problem) == []
    estimate = Measured(profile, what, on)
    there = [1e3 * (one.forward_seconds + one.backward_seconds) for one in profile.problem.classes]
    shown = [float(line.partition(" takes ")[2].split()[0]) for line in estimate.said()[1:]]
    assert shown == pytest.approx(there, rel=2e-3)
    tried = every(what, on)[::7]
    assert len(tried) > 10
    for layout in tried:
        split, of_layout = layout.split(what, on.devices), layout.shape(what)
        machine = on.machine_for(split)
        found = estimate.problem(of_layout, split, machine)
        whole, alone = (from_shape.problem(of_layout, split, one) for one in (machine, unconnected(machine)))
        assert problems_of(found) == [] and found.link == LINK
        for kind, usual, without in zip(found.classes, whole.classes, alone.classes, strict=True):
            for name in ("forward_seconds", "backward_seconds"):
                expected = getattr(usual, name) + 2 * getattr(without, name)
                assert getattr(kind, name) == pytest.approx(expected, rel=1e-9)
            for one, other, another in zip(kind.groups, usual.groups, without.groups, strict=True):
                assert one.bytes == 2 * other.bytes
                if other.recompute_seconds is None:
                    assert one.recompute_seconds is None
                else:
                    again = other.recompute_seconds + 2 * another.recompute_seconds
                    assert one.recompute_seconds == pytest.approx(again, rel=1e-9)
        head, usual = parts_of(found)[-1].after, parts_of(whole)[-1].after
        assert head.backward_seconds > 2.9 * usual.backward_seconds and head.bytes == 2 * usual.bytes
        assert [one.static_bytes for one in found.stages] == [2 * one.static_bytes for one in whole.stages]


def test_the_search_goes_by_the_profile():
    what, on = model(batch=16), devices(gib=8.0)
    plain = LayoutSearch(what, on, reserve_bytes=0)
    slow = Measured(measured(what, on, LAYOUTS[0], times=3.0), what, on)
    search = LayoutSearch(what, on, reserve_bytes=0, estimate=slow.problem)
    tried = every(what, on, micro_batch=1)
    by_formula, by_profile = (one.run(tried, enough=2) for one in (plain, search))
    for one in by_profile.planned:
        spent, usual = accounting.seconds(one, search), accounting.seconds(one, plain)
        assert sum(spent) == pytest.approx(one.seconds) and min(spent) > -1e-9
        assert spent.optimizer == usual.optimizer and spent.compute > 2 * usual.compute
    # Where computing is slow, links matter less: a layout that sends more is no longer worse by as much.
    assert by_profile.planned[0].seconds > 2 * by_formula.planned[0].seconds


def test_a_shallower_model_with_shorter_sequences_will_do():
    what, on = model(batch=16), devices()
    less = dataclasses.replace(what, shape=dataclasses.replace(LLAMA, num_layers=2, seq_length=2048))
    estimate = Measured(measured(less, on, LAYOUTS[1], times=2.0), what, on)
    layout = every(what, on, **LAYOUTS[0])[0]
    split, shape = layout.split(what, on.devices), layout.shape(what)
    machine = on.machine_for(split)
    found, usual = estimate.problem(shape, split, machine), from_shape.problem(shape, split, unconnected(machine))
    assert found.num_layers == LLAMA.num_layers
    assert found.classes[0].forward_seconds > 2 * usual.classes[0].forward_seconds
    assert "micro-batches of 1 sequences of 2048 tokens" in estimate.said()[0]


def test_another_model_is_told():
    what, on = model(), devices()
    profile = measured(what, on, LAYOUTS[1])
    with pytest.raises(OtherModelError, match=r"another model, which has no .*mlp\.router"):
        Measured(profile, model(EXPERTS), on)
    without = dataclasses.replace(profile, shapes={"seq_length": 4096, "micro_batch_size": 1})
    with pytest.raises(OtherModelError, match="its sizes \\(tensor, context, expert, data\\): profile again"):
        Measured(without, what, on)
    experts = measured(model(EXPERTS), on, LAYOUTS[1])
    sizes = {name: size for name, size in experts.shapes.items() if name != "expert_tensor"}
    with pytest.raises(OtherModelError, match="its sizes \\(expert_tensor\\)"):
        Measured(dataclasses.replace(experts, shapes=sizes), model(EXPERTS), on)
    with pytest.raises(OtherModelError, match="its sizes \\(data\\)"):
        Measured(dataclasses.replace(profile, shapes={**profile.shapes, "data": 0}), what, on)
    ahead = model(dataclasses.replace(LLAMA, mtp_num_layers=LLAMA.num_layers))
    with pytest.raises(OtherModelError, match="its last part has 4 layers, and the model 4 to predict ahead"):
        Measured(profile, ahead, on)
    fp32 = Measured(measured(what, on, LAYOUTS[1], nbytes=2), what, on).said()
    assert "is it this model, in bf16" in fp32[-1]
    assert not any("is it this model" in line for line in Measured(profile, what, on).said())


def command(capsys, words):
    status = main(["layout", *shlex.split(words)])
    return status, *capsys.readouterr()


def test_the_command_takes_a_profile(capsys, tmp_path):
    trace = tmp_path / "profile.json"
    of_model = SMALL.partition("--device-memory-gib")[0]
    of_plan = SMALL.partition("--inter-node")[0].format(gib=4).replace("--tensor-gbps 100", "")
    assert main(["plan", *shlex.split(f"{of_plan} --write-trace {trace} --micro-batch-size 2")]) == 0
    capsys.readouterr()
    more = f"{of_model} --devices 4 --top 3 --transformer-impl local --allow recompute --trace {trace}"
    status, out, err = command(capsys, f"{more} --tensor-gbps 100 --inter-node-gbps 10")
    assert (status, err) == (0, "")
    assert "on 4 devices of 4.00 GiB" in out  # its memory, and its link
    assert "assumed --tflops 400, --memory-gbps 2500 (" in out  # for the optimizer, and what hides behind computing
    assert "100 GB/s within a node, 10 to others, 10 to the host. Layers are scaled from the profile" in out
    assert "It was measured with one device, micro-batches of 2 sequences of 2048 tokens." in out
    status, out, err = command(capsys, f"{more} --link-gbps 5 --device-memory-gib 2")
    assert status == 2 and "--trace says what --link-gbps would; give either" in err
    status, out, err = command(capsys, more.replace(str(trace), str(tmp_path / "none.json")))
    assert status == 2 and "none.json" in err and "cannot be read" in err
    written = profile_file.read(trace)
    profile_file.write(dataclasses.replace(written, shapes={}), trace)
    status, out, err = command(capsys, more)
    assert status == 2 and f"--trace {trace}: it does not say its sizes" in err
