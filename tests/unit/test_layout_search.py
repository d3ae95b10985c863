"""The search over layouts: what Megatron accepts, bounds that hold, the best of all."""

import dataclasses
from collections import Counter

import pytest

from mindspeed_mem.adaptive.layout import accounting, closed_form, ends
from mindspeed_mem.adaptive.layout.cluster import Cluster
from mindspeed_mem.adaptive.layout.enumeration import Layout, Model, layouts
from mindspeed_mem.adaptive.layout.search import LayoutSearch, raised_bound
from mindspeed_mem.adaptive.problem import from_shape
from mindspeed_mem.adaptive.problem.checks import problems_of
from mindspeed_mem.adaptive.problem.definition import GIB
from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Shape
from mindspeed_mem.adaptive.search.infeasible import InfeasibleError
from mindspeed_mem.adaptive.search.search import Search
from tests.published import FULL, cluster

LLAMA = Shape(
    num_layers=4,
    hidden_size=2048,
    num_attention_heads=16,
    seq_length=4096,
    micro_batch_size=1,
    ffn_hidden_size=5632,
    num_query_groups=4,
    kv_channels=128,
    vocab_size=32000,
    swiglu=True,
    normalization="RMSNorm",
    rope=True,
    bias=False,
    untied=True,
    te=True,
)
EXPERTS = dataclasses.replace(LLAMA, num_experts=8, moe_ffn_hidden_size=1408, ffn_hidden_size=1408)


def model(shape=LLAMA, batch=8):
    return Model(shape=shape, split=Degrees(), batch=batch, vocab_size=32000)


def devices(count=8, gib=5.0, per_node=4):
    machine = Machine(
        memory_bytes=round(gib * GIB), tflops=300.0, memory_gbps=1600.0, tensor_gbps=200.0, link_gbps=12.0
    )
    return Cluster(machine=machine, devices=count, per_node=per_node, inter_node_gbps=20.0)


def every(model, cluster, chunks=False, **fixed):
    return list(layouts(model, cluster, fixed, chunks, Counter()))


@pytest.mark.parametrize(
    "shape, fixed",
    [
        (LLAMA, {}),
        *(pytest.param(EXPERTS, fixed, marks=pytest.mark.sweep) for fixed in ({"context": 1, "pipeline": 2}, {})),
    ],
    ids=["dense", "experts", "all experts"],
)
def test_what_it_finds_is_the_best_of_all(shape, fixed):
    """Where everything fits in some layouts, others need plans, and some do not fit."""
    what, on = model(shape), devices(gib=2.2)
    search = LayoutSearch(what, on, reserve_bytes=0)
    tried = every(what, on, micro_batch=1, **fixed)
    times, infeasible = [], 0
    for layout in tried:
        problem = search.problem(layout)
        assert problems_of(problem) == []
        try:
            seconds = Search(problem, work=0, nodes=20).best().simulated.seconds
        except InfeasibleError:
            infeasible += 1
            continue
        assert closed_form.seconds(problem) <= seconds * (1 + 1e-7)  # played in ticks
        assert raised_bound(problem) <= seconds * (1 + 1e-7)  # played in ticks
        times.append(seconds)
    assert infeasible and len(times) > 10
    exhaustive = LayoutSearch(what, on, reserve_bytes=0, work=0).run(tried, enough=3)
    assert [one.seconds for one in exhaustive.planned[:3]] == sorted(times)[:3]
    assert exhaustive.left >= exhaustive.planned[2].seconds and len(exhaustive.planned) < len(times)
    shares = [accounting.shares(one) for one in exhaustive.planned]
    assert any(one.swap or one.recompute for one in shares)
    for one in exhaustive.planned:
        spent = accounting.seconds(one, search)
        assert sum(spent) == pytest.approx(one.seconds) and min(spent) > -1e-9
        assert (spent.expert > 0) == (one.layout.expert * one.layout.expert_tensor > 1)
        assert (spent.tensor > 0) == (one.layout.tensor > 1) or shape is EXPERTS
    again = LayoutSearch(what, on, reserve_bytes=0, work=0).run(tried, enough=3)
    assert [one.layout for one in again.planned] == [one.layout for one in exhaustive.planned]


def test_schedules_with_a_split_backward_are_among_the_pipelines():
    what, on = model(dataclasses.replace(LLAMA, te=False)), devices(count=2, gib=40)
    search = LayoutSearch(what, on, reserve_bytes=0)
    fixed = {"pipeline": 2, "first": 2, "micro_batch": 1}
    tried = list(layouts(what, on, fixed, True, Counter(), schedules=("1f1b", "zb", "v")))
    found = {(one.schedule, one.virtual) for one in tried}
    assert found == {("1f1b", 1), ("1f1b", 2), ("zb", 1), ("zb", 2), ("v", 2)}
    assert not any(one.zero for one in tried if one.schedule != "1f1b") and any(one.zero for one in tried)
    outcome = search.run([one for one in tried if not one.zero], enough=5)
    times = {(one.layout.schedule, one.layout.virtual): one.seconds for one in outcome.planned}
    assert times["zb", 1] < times["1f1b", 1]  # a V has the head on the first of these two ranks, and waits for it
    for one in outcome.planned:
        problem = search.problem(one.layout)
        assert closed_form.seconds(problem) <= raised_bound(problem) * (1 + 1e-9)
        assert raised_bound(problem) <= one.seconds * (1 + 1e-9)
        spent = accounting.seconds(one, search)
        assert sum(spent) == pytest.approx(one.seconds) and spent.bubble > 0
        if one.layout.schedule != "1f1b":  # all that a step takes beyond what everything kept would
            assert spent.recompute == pytest.approx(0, abs=1e-9)


def test_a_heavy_head_shortens_the_last_stage():
    """Where the head is worth several layers, and where layers do not divide: the few splits that are tried have one
    within 1 % of the best of all that Megatron accepts among them."""
    wide = dataclasses.replace(LLAMA, num_layers=12)
    for shape, pipeline in ((wide, 2), (wide, 4), (dataclasses.replace(LLAMA, num_layers=11), 4)):
        what = Model(shape=shape, split=Degrees(), batch=16, vocab_size=128000)
        on = devices(count=pipeline, gib=60, per_node=4)
        search = LayoutSearch(what, on, allowed=(), reserve_bytes=0)
        sizes = {"pipeline": pipeline, "virtual": 1, "micro_batch": 1}
        tried = every(what, on, **sizes)
        all_there_are = [one for first in range(1, 12) for one in every(what, on, first=first, **sizes)]
        assert len(tried) < len(all_there_are) and all(one in all_there_are for one in tried)
        best, of_all = (search.run(some).planned[0] for some in (tried, all_there_are))
        assert best.seconds <= 1.01 * of_all.seconds and 0 < best.layout.last < shape.num_layers / pipeline
        even = [one for one in tried if not one.first]
        assert bool(even) == (shape.num_layers % pipeline == 0)
        for one in even:
            assert best.seconds < 0.95 * search.run([one]).planned[0].seconds
        spent = accounting.seconds(best, search)
        assert sum(spent) == pytest.approx(best.seconds) and spent.recompute == pytest.approx(0, abs=1e-9)


def test_time_that_is_up_leaves_a_gap():
    what, on = model(), devices(gib=2.2)
    outcome = LayoutSearch(what, on, reserve_bytes=0, work=0).run(every(what, on), seconds=1e-9)
    assert not outcome.planned and outcome.left > 0


def test_only_what_megatron_accepts_is_tried_and_the_rest_counted():
    refused = Counter()
    found = list(layouts(model(batch=24), devices(count=24), {}, True, refused))
    assert len(set(found)) == len(found)
    for layout in found:
        data = layout.data(24)
        assert layout.tensor * layout.context * layout.pipeline * data == 24 and layout.tensor <= 4
        assert LLAMA.num_query_groups % layout.tensor == 0
        if layout.first:
            counts = ends.parts(LLAMA.num_layers, layout.pipeline, layout.virtual, layout.ends)
            assert sum(counts) == LLAMA.num_layers and min(counts) > 0
        else:
            assert LLAMA.num_layers % (layout.pipeline * layout.virtual) == 0
        assert 24 % (data * layout.micro_batch) == 0
        if layout.virtual > 1:
            assert layout.pipeline > 1 and 24 // (data * layout.micro_batch) % layout.pipeline == 0
        assert layout.context == 1 or LLAMA.seq_length % (2 * layout.context) == 0
    assert refused["attention heads are no multiple of tensor-parallel ranks"]
    assert refused["layers cannot be divided so over pipeline stages and their virtual ones"]
    assert any(layout.first for layout in found)
    assert refused["virtual stages: micro-batches are no multiple of pipeline stages"]
    assert refused["the sequence is no multiple of twice the context-parallel ranks"]
    assert refused["the global batch is no multiple of micro-batch times data-parallel ranks"]
    some = every(model(), devices(), chunks=True, pipeline=2, data=2, zero=3)
    assert some and {(one.pipeline, one.data(8), one.zero) for one in some} == {(2, 2, 3)}
    local = dataclasses.replace(LLAMA, te=False)
    assert {one.context for one in every(model(local), devices())} == {1}


def test_experts_are_spread_over_ranks_of_a_stage():
    found = every(model(EXPERTS), devices())
    for layout in found:
        ranks = 8 // layout.pipeline
        assert EXPERTS.num_experts % layout.expert == 0 and ranks % (layout.expert * layout.expert_tensor) == 0
        assert layout.expert_tensor in (1, layout.tensor)
    assert {one.expert for one in found} == {1, 2, 4, 8}
    refused = Counter()
    list(layouts(model(EXPERTS), devices(), {"expert": 3}, False, refused))
    assert refused["experts are no multiple of expert-parallel ranks"]


def test_groups_over_nodes_share_their_networks():
    on = devices(count=32)
    inside = on.machine_for(Degrees(tensor=2, context=2))
    assert (inside.tensor_gbps, inside.network.context_gbps) == (200.0, 200.0)
    outside = on.machine_for(Degrees(tensor=2, context=4, data=4, pipeline=1)).network
    assert outside.context_gbps == 20.0  # each rank hands on by itself
    assert outside.data_gbps == 40.0  # two ranks of each node
    assert on.machine_for(Degrees(tensor=4, data=8)).network.data_gbps == 20.0
    assert on.machine_for(Degrees(tensor=8)).tensor_gbps == 80.0
    assert on.machine_for(Degrees(tensor=1, data=2, pipeline=16)).network.pipeline_gbps == 20.0
    assert 20.0 < on.machine_for(Degrees(data=8, expert=8)).network.expert_gbps < 200.0


def test_what_travels_costs_what_it_should():
    what, on = model(batch=64), devices(count=8)

    def spent(**sizes):
        return closed_form.seconds(LayoutSearch(what, on).problem(Layout(**sizes)))

    slow = dataclasses.replace(on, inter_node_gbps=2.0)
    for layout in (Layout(context=8), Layout(pipeline=4, virtual=1), Layout(zero=3), Layout()):
        times = [closed_form.seconds(LayoutSearch(what, one).problem(layout)) for one in (on, slow)]
        assert times[0] < times[1], layout
    assert spent(zero=2) > spent()  # gradients are reduced for each micro-batch
    assert spent(zero=1, on_device=0.0) > spent()  # states come from the host, and go back


def test_tensor_parallelism_up_to_a_node_and_then_pipelines():
    """Figure 13 of arXiv 2104.04473: the best of five splits of a model over 64 devices is 8 by 8."""
    wide = FULL[0]._replace(layers=32, hidden=20480, heads=128, batch=128, devices=64, micro_batch=1)
    times = {}
    for tensor in (2, 4, 8, 16, 32):
        row = wide._replace(tensor=tensor, pipeline=64 // tensor)
        problem = from_shape.problem(row.shape, row.split, cluster(64).machine_for(row.split))
        times[tensor] = closed_form.seconds(problem, row.again)
    assert min(times, key=times.__getitem__) == 8
