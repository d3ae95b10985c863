"""What plans are compared with: keeping everything, and Megatron's recomputation of whole layers."""

import itertools

import pytest

from mindspeed_mem.adaptive import Search
from mindspeed_mem.adaptive.search.baselines import full_recompute, keep_all
from tests.planning import LAYER, small_problem

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
