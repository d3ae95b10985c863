"""--pipeline-stages as data: each layer once and in order, two forms that say the same, and Megatron's reading."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from mindspeed_mem.schedule import ScheduleError
from mindspeed_mem.schedule.stages import LayerSplit, describes, parts_of_layers, split


@st.composite
def splits(draw):
    """Splits of at least one layer over 1-6 stages of 1-3 virtual stages, empty ones among them."""
    stages, virtual = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(0, 5), min_size=stages * virtual, max_size=stages * virtual).filter(any))
    return LayerSplit(tuple(counts), stages, draw(st.integers(0, 2)))


@given(splits())
def test_counts_are_taken_as_they_are_and_tell_the_number_of_virtual_stages(case):
    layers = sum(case.counts)
    assert split(case.counts, layers, case.stages, case.virtual_stages, case.mtp_layers) == case
    assert split(list(case.counts), layers, case.stages, None, case.mtp_layers) == case


@given(splits())
def test_counts_and_the_part_of_each_layer_say_the_same(case):
    by_layer = parts_of_layers(case.counts)
    assert len(by_layer) == sum(case.counts) and list(by_layer) == sorted(by_layer)
    assert tuple(by_layer.count(part) for part in range(len(case.counts))) == case.counts
    found = split(by_layer, len(by_layer), case.stages, case.virtual_stages, case.mtp_layers)
    as_counts = len(by_layer) == len(case.counts) and sum(by_layer) == len(by_layer)
    assert found == (LayerSplit(by_layer, case.stages, case.mtp_layers) if as_counts else case)


@given(splits())
def test_the_layout_is_valid_for_megatron_and_means_the_same(case):
    layers = sum(case.counts)
    layout = PipelineParallelLayerLayout(case.layout, case.stages)
    layout.validate_layer_layout(layers, case.mtp_layers or None)
    assert layout.virtual_pipeline_model_parallel_size == case.virtual_stages
    with pytest.MonkeyPatch.context() as patch:
        virtual = case.virtual_stages if case.virtual_stages > 1 else None
        patch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: virtual)
        held = [
            layout.get_layer_id_list(vp_stage=chunk, pp_rank=stage)
            for chunk in range(case.virtual_stages)
            for stage in range(case.stages)
        ]
    assert tuple(map(len, held)) == case.counts
    assert sum(held, []) == list(range(layers))
    assert layout.layout[0][0][0] is LayerType.embedding and layout.layout[-1][-1][-1] is LayerType.loss
    assert layout.layout[-1][-1].count(LayerType.mtp) == case.mtp_layers


@given(splits())
def test_a_layout_is_recognised(case):
    assert describes(case.layout, case.counts)
    assert describes(case.layout, list(parts_of_layers(case.counts)))
    assert not describes(case.layout, (*case.counts[:-1], case.counts[-1] + 1))


@pytest.mark.parametrize("layout", ["None", "True", "", "E(t|)*3L", "E,tt|ttL", "[['embedding'], ['loss']]"])
def test_what_is_written_otherwise_is_not_recognised(layout):
    assert not any(describes(layout, entries) for entries in ((2, 2), (1, 1, 1, 0), (0,), ()))


def test_layouts():
    assert split((3, 5), 8, 2).layout == "Ettt|tttttL"
    assert split((0, 0, 0, 1, 1, 1, 1, 1), 8, 2).layout == "Ettt|tttttL"
    assert split((0, 8), 8, 2).layout == "E|ttttttttL"
    assert split((3, 0, 5, 0), 8, 4, None, 1).layout == "Ettt||ttttt|mL"
    assert split((1, 2, 3, 2), 8, 2).layout == "Et|tt|ttt|ttL"
    assert split((8,), 8, 1).layout == split((0,) * 8, 8, 1, 1).layout == "EttttttttL"


def test_what_fits_both_forms_is_counts():
    assert split((1, 1, 1, 1), 4, 2) == LayerSplit((1, 1, 1, 1), 2)
    assert split((0, 1, 1, 2), 4, 2, 2) == LayerSplit((0, 1, 1, 2), 2)
    # ... and without virtual stages the stage of each layer
    assert split((1, 1, 1, 1), 4, 2, 1) == LayerSplit((0, 4), 2)


@pytest.mark.parametrize(
    ("sizes", "on", "as_counts", "as_stages"),
    [
        (
            ((3, 5, 5), 16, 4),
            "4 pipeline stages",
            "3 numbers, must be 4, or a multiple of that for virtual stages; 13 in all, must be 16",
            "3 numbers, must be 16; got 5, must be from 0 to 3",
        ),
        (
            ((3, 4), 8, 2),
            "2 pipeline stages",
            "7 in all, must be 8",
            "2 numbers, must be 8; got 3, 4, must be from 0 to 1",
        ),
        (
            ((0, 0, 1, 0), 4, 2),
            "2 pipeline stages",
            "1 in all, must be 4",
            "0 comes after 1, must not be less",
        ),
        (
            ((0, 0, 5, 2, 4, 1), 6, 2),
            "2 pipeline stages",
            "12 in all, must be 6",
            "got 2, 4, 5, must be from 0 to 1; 2 comes after 5, must not be less",
        ),
        (
            ((4, 4), 8, 2, 2),
            "2 pipeline stages of 2 chunks",
            "2 numbers, must be 4",
            "2 numbers, must be 8; got 4, must be from 0 to 3",
        ),
        (
            ((2, 2, 2, 2), 8, 2, 1),
            "2 pipeline stages of 1 chunk",
            "4 numbers, must be 2",
            "4 numbers, must be 8; got 2, must be from 0 to 1",
        ),
        (
            ((7,), 8, 1),
            "1 pipeline stage",
            "7 in all, must be 8",
            "1 number, must be 8; got 7, must be from 0 to 0",
        ),
    ],
)
def test_all_that_is_wrong_with_either_form_is_said_at_once(sizes, on, as_counts, as_stages):
    entries, num_layers, _, *virtual = sizes
    what = "chunk (of all stages the first, then the second)" if virtual == [2] else "pipeline stage"
    with pytest.raises(ScheduleError) as caught:
        split(*sizes)
    assert str(caught.value) == (
        f"--pipeline-stages: got {','.join(map(str, entries))} for {num_layers} layers on {on}: neither the layers of "
        f"each {what} ({as_counts}) nor the {what} of each layer ({as_stages})"
    )
