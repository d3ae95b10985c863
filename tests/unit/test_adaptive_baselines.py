"""What plans are compared with: keeping everything, and Megatron's recomputation of whole layers."""

import dataclasses
import itertools

import pytest

from mindspeed_mem.adaptive import Search
from mindspeed_mem.adaptive.search.baselines import full_recompute, keep_all
from tests.planning import LAYER, small_problem, tiny_class

LAYERS, MICRO_BATCHES = 4, 3
KEPT = sum(group.bytes for group in LAYER.groups)


@pytest.mark.parametrize(("stages", "virtual"), [(1, 1), (2, 1), (2, 2)])
def test_each_layer_more_costs_its_forward_and_frees_what_it_makes(stages, virtual):
    problem = small_problem(stages=stages, virtual=virtual, layers=LAYERS, micro_batches=2 * stages)
    kept, full = keep_all(problem), full_recompute(problem)
    blocks = [full_recompute(problem, layers) for layers in range(LAYERS + 1)]
    assert (blocks[0].seconds, blocks[0].peaks) == (kept.seconds, kept.peaks)
    assert (blocks[-1].seconds, blocks[-1].peaks) == (full.seconds, full.peaks)
    assert all(fewer.seconds < more.seconds for fewer, more in itertools.pairwise(blocks))
    assert all(max(fewer.peaks) > max(more.peaks) for fewer, more in itertools.pairwise(blocks))


def test_on_one_stage_the_cost_is_that_of_the_forwards_run_again():
    problem = small_problem(layers=LAYERS, micro_batches=MICRO_BATCHES)
    kept, block = keep_all(problem), full_recompute(problem, 2)
    assert block.seconds - kept.seconds == pytest.approx(MICRO_BATCHES * 2 * LAYER.forward_seconds)
    made = KEPT - LAYER.input_bytes
    assert kept.peaks[0] - block.peaks[0] == 2 * made  # the layers that run again do so when those after them are gone
    full = full_recompute(problem)
    assert full.peaks[0] - problem.stages[0].static_bytes < kept.peaks[0] - problem.stages[0].static_bytes - 3 * made


@pytest.mark.parametrize("layers", [1, 2, LAYERS])
def test_a_plan_within_the_same_memory_is_faster(layers):
    problem = small_problem(layers=LAYERS, micro_batches=MICRO_BATCHES, link=4.0)
    block = full_recompute(problem, layers)
    found = Search(problem, swap=False).best(max(block.peaks))
    assert found.simulated.seconds < block.seconds


def test_layers_of_several_kinds():
    """As in hybrid models: what a layer gets is another operator's each time."""
    problem = small_problem(layers=LAYERS, micro_batches=MICRO_BATCHES)
    tiny = tiny_class([80, 60, 40], [0.1, 0.1, 0.1])
    given = dataclasses.replace(LAYER.groups[0], operators=("end",))
    above = dataclasses.replace(LAYER, name="above", groups=(given, *LAYER.groups[1:]))
    parts = [dataclasses.replace(problem.stages[0].parts[0], layers=("tiny", "above", "layer", "tiny"))]
    stages = (dataclasses.replace(problem.stages[0], parts=tuple(parts)),)
    mixed = dataclasses.replace(problem, classes=(tiny, above, LAYER), stages=stages)
    kept, full = keep_all(mixed), full_recompute(mixed)
    again = 2 * tiny.forward_seconds + 2 * LAYER.forward_seconds
    assert full.seconds - kept.seconds == pytest.approx(MICRO_BATCHES * again)
    found = Search(mixed.with_limit(round(0.9 * kept.peaks[0]))).best()
    assert max(found.simulated.peaks) <= 0.9 * kept.peaks[0] and kept.seconds <= found.simulated.seconds <= full.seconds
