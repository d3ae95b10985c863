"""Stages of which the first and the last have their own number of layers: as megatron-core builds them."""

import argparse

import pytest
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mindspeed_mem.adaptive.layout import ends
from mindspeed_mem.adaptive.layout.ends import EVEN, Ends

SIZES = [
    (12, 2, 1),
    (16, 2, 2),
    (11, 4, 1),
    (9, 3, 1),
    (7, 2, 1),
    (12, 4, 2),
    (15, 4, 2),
    (14, 4, 2),
    (15, 2, 4),
    (23, 4, 3),
]


def config(layers, pipeline, words):
    """megatron-core's, of the options in words."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-virtual-stages-per-pipeline-rank", type=int)
    parser.add_argument("--decoder-first-pipeline-num-layers", type=int)
    parser.add_argument("--decoder-last-pipeline-num-layers", type=int)
    parser.add_argument("--account-for-embedding-in-pipeline-split", action="store_true")
    parser.add_argument("--account-for-loss-in-pipeline-split", action="store_true")
    given = parser.parse_args(words)
    return TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype="bf16",
        virtual_pipeline_model_parallel_size=given.num_virtual_stages_per_pipeline_rank,
        num_layers_in_first_pipeline_stage=given.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=given.decoder_last_pipeline_num_layers,
        account_for_embedding_in_pipeline_split=given.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=given.account_for_loss_in_pipeline_split,
    )


@pytest.mark.parametrize("layers, pipeline, virtual", SIZES)
def test_the_options_in_words_make_megatron_build_these_parts(layers, pipeline, virtual):
    every = [one for first in range(1, layers) for one in ends.choices(layers, pipeline, virtual, 0.0, Ends(first, 0))]
    uneven = [one for one in every if one != EVEN]
    assert uneven and len(set(uneven)) == len(uneven)
    for one in uneven:
        counts = ends.parts(layers, pipeline, virtual, one)
        assert len(set(counts)) > 1
        assert sum(counts) == layers
        assert (sum(counts[::pipeline]), sum(counts[pipeline - 1 :: pipeline])) == one
        built = config(layers, pipeline, ends.words(layers, pipeline, virtual, one))
        for part, count in enumerate(counts):
            chunk, stage = divmod(part, pipeline)
            where = {"vp_stage": chunk if virtual > 1 else None, "pp_rank": stage}
            assert get_num_layers_to_build(built, **where) == count, (one, part)
            assert get_transformer_layer_offset(built, **where) == sum(counts[:part]), (one, part)


def test_what_megatron_does_not_split_so_is_refused():
    for layers, pipeline, virtual, one in ((12, 4, 1, Ends(3, 2)), (12, 2, 2, Ends(5, 7)), (12, 2, 1, Ends(12, 0))):
        with pytest.raises(
            ValueError, match=f"{layers} layers on {pipeline} pipeline stages of {virtual} parts cannot"
        ):
            ends.parts(layers, pipeline, virtual, one)


def test_only_what_leaves_less_on_the_fullest_stage_is_tried():
    assert ends.choices(12, 4, 1, 0.0) == (EVEN,)
    lighter = ends.choices(12, 4, 1, 3.0)
    assert lighter[0] == EVEN and len(lighter) > 1
    assert all(max(first, last + 3.0, (12 - first - last) / 2) < 3 + 3.0 for first, last in lighter[1:])
    assert ends.choices(11, 4, 1, 0.5) and EVEN not in ends.choices(11, 4, 1, 0.5)
    assert ends.choices(12, 1, 1, 3.0) == (EVEN,) and ends.choices(12, 1, 2, 3.0) == ()
    assert ends.choices(3, 4, 1, 0.5) == ()


@pytest.mark.parametrize("layers, pipeline", [(19, 8), (40, 16), (70, 16)])
def test_where_layers_do_not_divide_something_is_tried(layers, pipeline):
    assert ends.choices(layers, pipeline, 1, 0.65)
