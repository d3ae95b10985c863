"""A planning problem from what ranks measured: which layers are one class, which tensors one group, what recomputing
each of them takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mindspeed_mem.activation.observe.rank_profile import HostCost
from mindspeed_mem.adaptive import Search
from mindspeed_mem.adaptive.problem import from_profile, profile_file
from mindspeed_mem.adaptive.problem.checks import problems_of
from mindspeed_mem.adaptive.problem.definition import Group, LayerClass, Pipeline, Problem
from mindspeed_mem.device.link_speed import LinkSpeed
from tests.observed import SECONDS, Layer, Seen, chunk, rank

NORM = Seen(reads=["in"], makes={"n": 64}, saved={"n": ["up"]})
UP = Seen(reads=["n"], makes={"u": 256}, saved={"u": ["act"]}, flops=100)
ACT = Seen(reads=["u"], makes={"a": 256}, saved={"a": ["down"]})
DOWN = Seen(reads=["a"], makes={"d": 64}, flops=100, again=0)
ADD = Seen(reads=["in", "d"], makes={"out": 64}, saved={"out": ["+norm"]})
DENSE: Layer = {"norm": NORM, "up": UP, "act": ACT, "down": DOWN, "add": ADD}


def problem_of(*layers: Layer, host: HostCost | None = None, **more: Any) -> Problem:
    one = rank(chunk(layers, **more), host=host or HostCost())
    problem = from_profile.problem([one], Pipeline(micro_batches=2), 10**6, 10**5)
    assert problems_of(problem) == []
    return problem


def group_of(kind: LayerClass, name: str) -> Group:
    return kind.groups[kind.group_index[name]]


def changed(op: str, **fields: Any) -> Layer:
    return {**DENSE, op: dataclasses.replace(DENSE[op], **fields)}


def test_layers_that_are_alike_are_one_class():
    problem = problem_of(DENSE, DENSE, DENSE, seconds={(0, "up"): 0.005, (1, "up"): 0.007, (2, "up"): 0.003})
    [kind] = problem.classes
    assert kind.name == "layers 0-2"
    assert [one.name for one in kind.operators] == ["", *DENSE]
    assert kind.operators[2].forward_seconds == 0.005  # the median
    assert kind.operators[2].backward_seconds == 0.01
    assert kind.input_bytes == 64
    assert [(one.name, one.bytes, one.operators, one.used_by, one.needs) for one in kind.groups] == [
        ("input", 64, ("add",), ("norm",), ()),
        ("norm", 64, ("norm",), ("up",), ("input",)),
        ("up", 256, ("up",), ("act",), ("norm",)),
        ("act", 256, ("act",), ("down",), ("up",)),
    ]
    assert [one.recompute_seconds for one in kind.groups] == [None, SECONDS, 0.005, SECONDS]
    [[part]] = [stage.parts for stage in problem.stages]
    assert part.layers == ("layers 0-2",) * 3
    assert part.before.bytes == 64
    assert part.after.bytes == 10 + 64  # the last layer's output, which the final norm keeps


def test_it_is_searched_and_kept_in_a_file(tmp_path):
    problem = problem_of(*[DENSE] * 6)
    most = max(Search(problem).best().simulated.peaks)
    found = Search(problem).best(most - 1000)
    assert max(found.simulated.peaks) <= most - 1000
    assert any(set(text) - set("K-") for text in found.plan.stages[0].parts[0])
    profile_file.write(profile_file.Profile(problem=problem), tmp_path / "profile.json")
    assert profile_file.read(tmp_path / "profile.json").problem == problem


def test_other_sizes_are_another_class():
    wide = changed("up", makes={"u": 512})
    problem = problem_of(DENSE, wide, DENSE, wide)
    assert [kind.name for kind in problem.classes] == ["layers 0, 2", "layers 1, 3"]
    assert [group_of(kind, "up").bytes for kind in problem.classes] == [256, 512]


def test_sizes_that_depend_on_routing_are_no_other_class():
    def routed(size: int) -> Layer:
        """One expert gets as many tokens of 100, the other the rest; each keeps a byte for one."""
        experts = "mlp.experts.local_experts"
        first = {"mlp.router": Seen(reads=["in"], makes={"r": 8}, saved={"r": ["mlp.router"]})}
        for number, part in enumerate((size, 100 - size)):
            up, act = f"{experts}.{number}.up", f"{experts}.{number}.act"
            first[up] = Seen(reads=["in"], makes={up: part}, saved={up: [act]})
            first[act] = Seen(reads=[up], makes={act: part}, saved={act: [act]})
        return {**first, "add": Seen(reads=["in"], makes={"out": 64}, saved={"out": ["+mlp.router"]})}

    [kind] = problem_of(routed(30), routed(90), routed(0)).classes  # an expert may get no tokens
    up, act = (f"mlp.experts.local_experts.*.{name}" for name in ("up", "act"))
    assert [one.name for one in kind.groups] == ["input", "mlp.router", up, act]
    assert group_of(kind, up).bytes == 100
    assert group_of(kind, up).operators == tuple(up.replace("*", one) for one in "01")
    assert group_of(kind, act).needs == (up,)
    [most] = problem_of(routed(30), routed(100)).classes
    assert group_of(most, act).operators == tuple(act.replace("*", one) for one in "01")


def test_what_is_kept_for_a_second_run_alone_counts():
    """The norm starts from the layer's input, which nobody keeps here."""
    layer = {**changed("add", saved={}), "norm": dataclasses.replace(NORM, makes={"n": 80})}
    [kind] = problem_of(layer, layer).classes
    assert [one.name for one in kind.groups] == ["norm", "up", "act"]
    norm = group_of(kind, "norm")
    assert (norm.recompute_keeps, norm.needs, norm.recompute_seconds) == (64, (), SECONDS)


def test_what_would_keep_as_much_as_it_frees_is_not_recomputed():
    layer = changed("add", saved={})
    [kind] = problem_of(layer, layer).classes
    norm = group_of(kind, "norm")
    assert (norm.recompute_seconds, norm.recompute_keeps, norm.needs) == (None, 0, ())


def test_who_made_what_nobody_keeps_runs_again_too():
    layer = changed("up", saved={})
    [kind] = problem_of(layer, layer).classes
    act = group_of(kind, "act")
    assert act.recompute_operators == ("up", "act")
    assert act.needs == ("norm",)
    assert act.recompute_keeps == 0
    assert act.recompute_seconds == 2 * SECONDS


def test_what_takes_less_is_held_instead():
    """Running the first again would take holding 64 bytes to save 60."""
    unsaved = changed("add", saved={})
    layer = {**unsaved, "norm": Seen(reads=["in"], makes={"n": 60})}
    [kind] = problem_of(layer, layer).classes
    up = group_of(kind, "up")
    assert (up.recompute_operators, up.recompute_keeps) == ((), 60)


def test_a_second_run_stops_early():
    layer = changed("up", makes={"u": 256, "more": 16}, saved={"u": ["act"], "more": ["up"]}, again=25)
    [kind] = problem_of(layer, layer).classes
    assert group_of(kind, "up").recompute_seconds == SECONDS / 4


@pytest.mark.parametrize("fields", [{"again": None}, {"named": False}])
def test_what_cannot_run_again_is_not_recomputed(fields):
    layer = changed("up", **fields)
    [kind] = problem_of(layer, layer).classes
    up = group_of(kind, "up")
    assert up.recompute_seconds is None
    assert up.swappable == fields.get("named", True)


def test_groups_of_which_one_is_made_from_what_the_other_makes_and_nobody_keeps_are_one():
    layer = changed("up", makes={"u": 256, "statistics": 4}, saved={"statistics": ["up"]})
    [kind] = problem_of(layer, layer).classes
    both = group_of(kind, "up + act")
    assert (both.bytes, both.operators, both.recompute_operators) == (260, ("up", "act"), ())
    assert both.recompute_seconds == 2 * SECONDS
    assert both.needs == ("norm",)


def test_an_operator_that_does_the_work_itself_is_one_with_what_is_in_it():
    inner = Seen(reads=["scores"], makes={"p": 40}, saved={"p": ["act.softmax"]}, again=None)
    outer = dataclasses.replace(ACT, makes={"scores": 30, "p": 40, "a": 256}, flops=50)
    layer = {"norm": NORM, "up": UP, "act": outer, "act.softmax": inner, "down": DOWN, "add": ADD}
    [kind] = problem_of(layer, layer).classes
    act = group_of(kind, "act")
    assert (act.bytes, act.operators) == (296, ("act", "act.softmax"))
    assert act.recompute_operators == ("act",)  # which runs what is in it
    assert act.recompute_seconds == 2 * SECONDS


def test_what_cannot_be_named_without_what_is_in_it_stays():
    """A module around linears keeps a little of its own."""
    outer = Seen(reads=["n"], makes={"own": 8}, saved={"own": ["mlp"]}, flops=100)
    inner = dataclasses.replace(UP, reads=["n", "own"])
    up, act = "mlp.up", "mlp.act"
    layer = {
        "norm": dataclasses.replace(NORM, saved={"n": [up]}),
        "mlp": outer,
        up: dataclasses.replace(inner, saved={"u": [act]}),
        act: dataclasses.replace(ACT, saved={"a": ["down"]}),
        "down": DOWN,
        "add": ADD,
    }
    [kind] = problem_of(layer, layer).classes
    own = group_of(kind, "mlp")
    assert (own.bytes, own.swappable, own.recompute_seconds) == (8, False, None)
    assert group_of(kind, up).needs == ("norm",)  # what stays is there anyway
    assert group_of(kind, up).recompute_keeps == 0


def test_all_that_an_operator_hands_to_the_next_layer_leaves_together():
    """A dropout mask is kept for the operator itself, its output for the next layer: one name in a plan."""
    layer = changed("add", makes={"mask": 16, "out": 64}, saved={"mask": ["add"], "out": ["+norm"]})
    problem = problem_of(layer, layer, layer)
    [kind] = problem.classes
    assert [one.name for one in kind.groups] == ["input", "norm", "up", "act"]
    assert group_of(kind, "input").bytes == 80
    assert problem.stages[0].parts[0].after.bytes == 10 + 80


def test_what_gradients_of_weights_wait_for_is_told_apart():
    seen = chunk(
        [{**DENSE, "act": dataclasses.replace(ACT, makes={"a": 256, "m": 32}, saved={"a": ["down"], "m": ["act"]})}] * 2
    )
    for row in seen.storages:
        if row["op"] in ("norm", "act") and row["saved_by"][0][1] in ("up", "down"):
            row["for_weights"] = "alone"
        elif row["layer"] < 0:
            row["for_weights"] = "too"
    rows = [
        dataclasses.replace(one, weight_seconds=SECONDS, weight_bytes=48) if one.op == "down" else one
        for one in seen.operators
    ]
    line = Pipeline(micro_batches=2, split_backward=True)
    problem = from_profile.problem([rank(dataclasses.replace(seen, operators=tuple(rows)))], line, 10**6)
    assert problems_of(problem) == []
    [kind] = problem.classes
    assert [(one.name, one.weight_bytes, one.weights_only, one.leaves) for one in kind.groups] == [
        ("input", 0, False, ()),
        ("norm", 64, True, ()),
        ("up", 0, False, ()),
        ("act", 256, True, ()),
    ]
    down = kind.operators[kind.index["down"]]
    assert (down.backward_seconds, down.weight_seconds, down.weight_bytes) == (2 * SECONDS, SECONDS, 48)
    assert problem.stages[0].parts[0].before.weight_bytes == 64  # what the first layer was given
    assert problem.waiting(0, 0) == 2 * (64 + 256 + 48) + 64


def test_an_input_that_no_operator_of_its_own_makes_stays():
    layer = changed("add", named=False)
    problem = problem_of(layer, layer)
    assert [(one.name, one.swappable) for one in problem.classes[0].groups][0] == ("input", False)
    assert [kind.name for kind in problem.classes] == ["layers 0-1"]


def test_chunks_and_stages_are_one_model():
    parts = [chunk([DENSE] * 2, first=first) for first in (0, 2, 4, 6)]
    ranks = [rank(parts[1], parts[3], stage=1, static_bytes=7), rank(parts[0], parts[2], stage=0)]
    problem = from_profile.problem(ranks, Pipeline(micro_batches=4, group_size=2), 10**6)
    assert problems_of(problem) == []
    assert [kind.name for kind in problem.classes] == ["layers 0-7"]
    assert [stage.static_bytes for stage in problem.stages] == [1000, 7]


def test_of_ranks_of_one_stage_the_worst_counts():
    slow = {(0, "up"): 0.1}
    link = LinkSpeed(out=1.0, back=9.0, out_alone=9.0, back_alone=9.0, blocking=True)
    ranks = [
        rank(
            chunk([changed("up", makes={"u": 300})], seconds={(0, "act"): 0.2}),
            temporary_bytes=5,
            host=HostCost(moved_seconds=2e-4, rerun_seconds=4e-4),
        ),
        rank(
            chunk([DENSE], seconds=slow),
            static_bytes=5,
            link=link,
            step_seconds=0.7,
            host=HostCost(moved_seconds=1e-4, rerun_seconds=5e-4),
        ),
    ]
    problem = from_profile.problem(ranks, Pipeline(micro_batches=1), 10**6)
    [kind], [stage] = problem.classes, problem.stages
    assert group_of(kind, "up").bytes == 300
    assert [kind.operators[kind.index[op]].forward_seconds for op in ("up", "act")] == [0.1, 0.2]
    assert (stage.static_bytes, stage.temporary_bytes, stage.step_seconds) == (1000, 100, 0.7)
    assert (problem.link.out, problem.link.back, problem.link.blocking) == (1.0, 3.0, True)
    assert problem.host == HostCost(moved_seconds=2e-4, rerun_seconds=5e-4)


def test_what_the_engine_takes_is_counted_by_tensor_and_by_operator(tmp_path):
    several = changed("up", makes={"u": 200, "v": 56}, saved={"u": ["act"], "v": ["act"]})
    problem = problem_of(several, several, host=HostCost(moved_seconds=2e-4, rerun_seconds=5e-4))
    [kind] = problem.classes
    assert [one.tensors for one in kind.groups] == [1, 1, 2, 1]
    up = group_of(kind, "up")
    assert up.moved_seconds(problem.host) == 2 * 2e-4
    assert up.again_seconds(problem.host) == SECONDS + 5e-4
    profile_file.write(profile_file.Profile(problem=problem), tmp_path / "profile.json")
    again = profile_file.read(tmp_path / "profile.json").problem
    assert again == problem and Search(again).best().plan == Search(problem).best().plan


def test_a_stage_without_a_profile_is_named():
    with pytest.raises(ValueError, match=r"stages \[1\] were given; at least one of each stage from 0 on"):
        from_profile.problem([rank(chunk([DENSE]), stage=1)], Pipeline(micro_batches=1), 10**6)
