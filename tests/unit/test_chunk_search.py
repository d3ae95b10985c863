"""Chunk layouts and the search for their size: ColossalAI's numbers, Megatron's own buckets, and what always holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_mem.model_sizes import PUBLISHED, Published
from mindspeed_mem.zero.layout.cutting import ALIGNMENT, ParameterSize, equal_chunks, megatron_buckets, sizes_of
from mindspeed_mem.zero.layout.model_tensors import GPTShape, gpt2, published
from mindspeed_mem.zero.layout.size_search import MOST_WASTE, search_bucket_size, search_chunk_size
from tests.worlds import on_ranks, parallel

MI = 2**20
WORLDS = (2, 3, 4, 8)
# Model, range, minimum, step: the chunk size that ColossalAI 0.5.0 finds, chunks and oversize chunks built with it, the
# waste that it reports and the one that is built, in percent, and the latter in elements.
GEMINI = [
    ("gpt2-medium", 32, 32, 1024, 51_432_448, 7, 1, 1.454, 1.454, 5_234_688),
    ("gpt2-medium", 64, 32, 1024, 76_624_896, 5, 0, 0.877, 7.387, 28_301_312),
    ("gpt2-medium", 32, 64, 1024, 76_624_896, 5, 0, 0.877, 7.387, 28_301_312),
    ("gpt2-medium", 128, 32, 1024, 152_202_240, 3, 0, 0.294, 22.291, 101_783_552),
    ("gpt2-medium", 32, 16, 1024, 38_836_224, 9, 1, 2.024, 2.024, 7_329_792),
    ("gpt2-xl", 32, 32, 1024, 51_236_864, 30, 1, 0.553, 0.553, 8_669_056),
    ("gpt2-xl", 64, 32, 1024, 51_236_864, 30, 1, 0.553, 0.553, 8_669_056),
    ("gpt2-xl", 128, 32, 1024, 51_236_864, 30, 1, 0.553, 0.553, 8_669_056),
    ("gpt2-xl", 32, 16, 1024, 20_496_384, 74, 1, 1.207, 1.207, 19_036_032),
    ("gpt2-xl", 32, 64, 1024, 93_859_840, 17, 0, 1.552, 2.382, 38_006_080),
    ("gpt2-xl", 32, 32, 1600, 51_236_800, 30, 1, None, None, 8_667_200),
    ("gpt2-xl", 32, 16, 1600, 20_496_000, 74, 1, None, None, 19_008_000),
    ("gpt2-xl", 32, 64, 1600, 93_859_200, 17, 0, None, None, 37_995_200),
    *(
        row
        for step in (1024, 4096)
        for row in [
            ("llama-7b", 32, 32, step, 45_101_056, 162, 2, 9.894, 9.894, 739_897_344),
            ("llama-7b", 32, 16, step, 45_101_056, 162, 2, 9.894, 9.894, 739_897_344),
            ("llama-7b", 64, 32, step, 106_954_752, 67, 2, 6.595, 6.595, 475_787_264),
            ("llama-7b", 128, 32, step, 168_833_024, 42, 0, 3.949, 4.972, 352_571_392),
            ("llama-7b", 32, 64, step, 90_189_824, 82, 2, 9.882, 9.882, 738_914_304),
        ]
    ),
]


def parameters(sizes, own=()):
    return [ParameterSize(f"p{place}", size, place in own) for place, size in enumerate(sizes)]


@pytest.mark.parametrize("row", GEMINI, ids=lambda row: "-".join(map(str, row[:4])))
def test_the_compatible_search_finds_what_colossalai_finds(row):
    name, span, minimum, step, chunk, count, oversize, reported, real, waste = row
    listed = published(name)
    for world in (2, 4, 8):
        found = search_chunk_size(
            sizes_of(listed), world, range_elements=span * MI, minimum_elements=minimum * MI, step_elements=step
        )
        layout = equal_chunks(listed, found.chunk_elements, world)
        assert (found.chunk_elements, layout.count, layout.waste_elements) == (chunk, count, waste)
        assert sum(one.capacity > chunk for one in layout.chunks) == oversize
        if reported is not None:
            assert round(100 * found.reported_waste_fraction, 3) == reported
            assert round(100 * layout.waste_fraction, 3) == real


@pytest.mark.parametrize("world", [1, 4])
def test_the_compatible_search_passes_colossalais_own_test(world):
    sizes = [size for _, size in gpt2(Published("gpt2", 2, 128, 2, 512, 2, 50258, 1024))]
    found = search_chunk_size(sizes, world, range_elements=MI, minimum_elements=0, step_elements=128)
    assert found.chunk_elements == 527_872


@pytest.mark.parametrize(
    ("name", "chunk", "utilisation"),
    [
        ("gpt2-medium", 52_428_800, 0.96436),
        ("gpt2-xl", 20_725_760, 0.97635),
        ("llama-7b", 108_003_328, 0.92252),
    ],
)
def test_it_finds_what_colossalai_0_1_10_finds(name, chunk, utilisation):
    sizes, span = sizes_of(published(name)), 64 * MI
    grids = {"minimum_elements": 0, "step_elements": span // 32, "start_on_step": False}
    found = search_chunk_size(sizes, 1, range_elements=span, **grids)
    share = found.scored_elements / (found.scored_elements + found.reported_waste_elements)
    assert (found.chunk_elements, round(share, 5)) == (chunk, utilisation)


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("gpt2-medium", 292, 354_823_168),
        ("gpt2-xl", 580, 1_557_611_200),
        ("llama-7b", 291, 6_738_415_616),
        ("gpt2", 148, 124_439_808),
        ("gpt2-large", 436, 774_030_080),
        ("llama-13b", 363, 13_015_864_320),
        ("llama-65b", 723, 65_285_660_672),
        ("llama2-70b", 723, 68_976_648_192),
        ("llama3-8b", 291, 8_030_261_248),
        ("llama3-70b", 723, 70_553_706_496),
        ("mistral-7b", 291, 7_241_732_096),
    ],
)
def test_published_models_have_their_parameters(name, tensors, elements):
    listed = published(name)
    assert (len({one.name for one in listed}), sum(sizes_of(listed))) == (tensors, elements)


@pytest.mark.parametrize(("name", "count", "largest"), [
    ("gpt2-medium", 8, 58.1),
    ("gpt2-xl", 37, 78.3),
    ("llama-7b", 130, 141.0),
])  # fmt: skip
def test_buckets_of_40_million(name, count, largest):
    layout = megatron_buckets(published(name), 40_000_000, 2)
    assert (layout.count, round(layout.largest / MI, 1)) == (count, largest)


@pytest.mark.parametrize("name", ["gpt2-medium", "gpt2-xl", "llama-7b"])
@pytest.mark.parametrize("world", WORLDS)
def test_searched_buckets_waste_next_to_nothing(name, world):
    listed, hidden = published(name), PUBLISHED[name].hidden_size
    bounds = {"range_elements": 32 * MI, "minimum_elements": 32 * MI, "step_elements": hidden}
    found = search_bucket_size(sizes_of(listed), world, **bounds)
    layout = megatron_buckets(listed, found.target_elements, world)
    assert layout.waste_fraction < MOST_WASTE
    assert 32 * MI <= found.target_elements <= 64 * MI + hidden
    assert (found.count, found.largest_elements, found.waste_elements, found.held_elements) == (
        layout.count,
        layout.largest,
        layout.waste_elements,
        layout.held_elements,
    )


def test_a_bucket_holds_what_lies_after_it_and_a_tied_embedding_shares_none():
    listed = parameters([1000, 64, 70, 65, 200], own=[2])
    layout = megatron_buckets(listed, 250, 3)
    assert [[(one.name, one.offset) for one in chunk.parameters] for chunk in layout.chunks] == [
        [("p4", 0), ("p3", 256)],
        [("p2", 0)],
        [("p1", 0), ("p0", 64)],
    ]
    assert [chunk.capacity for chunk in layout.chunks] == [384, 384, 1152]
    assert layout.waste_elements == 1920 - 1399 and layout.waste_fraction == pytest.approx(521 / 1920)
    padded = megatron_buckets(listed, None, 2, high_bandwidth_padding=True)
    assert [chunk.capacity for chunk in padded.chunks] == [2**16] * 3


def test_a_parameter_larger_than_a_chunk_closes_the_open_one():
    layout = equal_chunks(parameters([40, 101, 60, 40, 1]), 100, 4)
    assert [(chunk.capacity, chunk.used) for chunk in layout.chunks] == [(100, 40), (104, 101), (100, 100), (100, 1)]


def test_less_than_the_minimum_is_one_chunk():
    bounds = {"range_elements": 1000, "minimum_elements": 400, "step_elements": 10}
    sizes = [100, 200, 70]
    assert search_chunk_size(sizes, 4, **bounds).chunk_elements == 372
    assert equal_chunks(parameters(sizes), 372, 4).count == 1
    found = search_bucket_size(sizes, 4, **bounds)
    assert megatron_buckets(parameters(sizes), found.target_elements, 4).count == 1 == found.count
    apart = search_bucket_size(sizes, 4, **bounds, alone=[0])
    assert megatron_buckets(parameters(sizes, own=[0]), apart.target_elements, 4).count == 2 == apart.count


def test_where_all_waste_too_much_the_least_is_taken():
    bounds = {"range_elements": 5000, "minimum_elements": 1, "step_elements": 1}
    sizes = [65] * 40
    found = search_bucket_size(sizes, 2, **bounds)
    least = min(megatron_buckets(parameters(sizes), target, 2).waste_fraction for target in range(1, 5002))
    assert found.waste_fraction == least > MOST_WASTE


def test_bad_input_is_refused_with_all_reasons():
    with pytest.raises(ValueError) as refused:
        search_bucket_size([5, -1, True], 0, range_elements=-1, minimum_elements=2.5, step_elements=0, alone=[3])
    assert str(refused.value).split("; ") == [
        "sizes of parameters are whole numbers of at least 0, not -1, True",
        "world_size is a whole number of at least 1, not 0",
        "range_elements is a whole number of at least 0, not -1",
        "minimum_elements is a whole number of at least 0, not 2.5",
        "step_elements is a whole number of at least 1, not 0",
        "alone names places [3], of 3 parameters",
    ]
    with pytest.raises(ValueError, match="there are no parameters; world_size is .* not 0; range_elements"):
        search_chunk_size([], 0, range_elements=None, minimum_elements=0, step_elements=1)
    with pytest.raises(ValueError, match="a chunk of 10 elements cannot be divided by 4 ranks"):
        equal_chunks(parameters([1]), 10, 4)
    with pytest.raises(
        ValueError, match="world_size is .* not -1; target_elements is a whole number of at least 1, not 0"
    ):
        megatron_buckets(parameters([1]), 0, -1)


SIZES = st.lists(st.integers(0, 700) | st.sampled_from([64, 128, 256]), min_size=1, max_size=25)


@given(sizes=SIZES, world=st.integers(1, 9), chunk=st.integers(1, 120))
def test_equal_chunks_hold_every_parameter_once(sizes, world, chunk):
    listed = parameters(sizes)
    layout = equal_chunks(listed, chunk * world, world)
    assert_sound(layout, listed, world, alignment=1)
    assert all(one.capacity == chunk * world or one.parameters[0].elements > chunk * world for one in layout.chunks)


@given(sizes=SIZES, world=st.integers(1, 9), target=st.none() | st.integers(1, 2000), data=st.data())
def test_buckets_hold_every_parameter_once(sizes, world, target, data):
    own = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=2))
    listed = parameters(sizes, own)
    layout = megatron_buckets(listed, target, world)
    assert_sound(layout, listed[::-1], world, alignment=ALIGNMENT)
    for chunk in layout.chunks:
        ends = [one.offset + one.elements for one in chunk.parameters]
        assert target is None or all(end < target for end in ends[:-1])
        assert len(chunk.parameters) == 1 or not {f"p{place}" for place in own} & {x.name for x in chunk.parameters}


def assert_sound(layout, listed, world, alignment):
    """All of `listed` in order, none over another, and every number what its name says."""
    assert [(x.name, x.elements) for one in layout.chunks for x in one.parameters] == [
        (x.name, x.elements) for x in listed
    ]
    for chunk in layout.chunks:
        end = 0
        for piece in chunk.parameters:
            assert piece.offset >= end and piece.offset % alignment == 0
            end = piece.offset + piece.elements
        assert end <= chunk.capacity and chunk.capacity % world == 0
        assert chunk.waste == chunk.capacity - sum(x.elements for x in chunk.parameters)
    assert layout.waste_elements == sum(x.waste for x in layout.chunks)
    assert layout.held_elements == layout.waste_elements + sum(sizes_of(listed))
    assert layout.count == len(layout.chunks) and layout.largest == max(x.capacity for x in layout.chunks)


@given(
    sizes=st.lists(st.integers(1, 300), min_size=2, max_size=20),
    span=st.integers(0, 400),
    minimum=st.integers(0, 400),
    step=st.integers(1, 30),
    world=st.integers(1, 5),
    most_waste=st.sampled_from([0.001, 0.1, 0.3]),
)
def test_the_searches_agree_with_trying_every_candidate(sizes, span, minimum, step, world, most_waste):
    bounds = {"range_elements": span, "minimum_elements": minimum, "step_elements": step}
    if sum(sizes) < minimum:
        return
    listed = parameters(sizes)
    start = -(-max(1, minimum) // step) * step

    def rank(target):
        layout = megatron_buckets(listed, target, world)
        excess = layout.waste_fraction if layout.waste_fraction >= most_waste else 0
        return excess, layout.largest, layout.count, layout.waste_elements, target

    found = search_bucket_size(sizes, world, **bounds, most_waste=most_waste)
    assert found.target_elements == min(map(rank, range(start, start + span + 1, step)))[-1]

    mean = sum(sizes) / len(sizes)
    limit = mean + 3 * (sum((size - mean) ** 2 for size in sizes) / len(sizes)) ** 0.5
    scored = [size for size in sizes if size <= limit * (1 + 1e-12)]
    start = -(-max(minimum, *scored, 1) // step) * step
    wastes = [
        equal_chunks(parameters(scored), chunk, 1).waste_elements for chunk in range(start, start + span + 1, step)
    ]
    chunk = start + step * wastes.index(min(wastes))
    equal = search_chunk_size(sizes, world, **bounds)
    assert (equal.chunk_elements, equal.reported_waste_elements) == (-(-chunk // world) * world, min(wastes))


# What megatron-core builds, beside what we say: (kind, tied, tp, pp, target, high bandwidth padding)
BUILT = [
    ("dense", True, 1, 1, 20_000, False),
    ("dense", True, 2, 1, 20_000, True),
    ("dense", True, 1, 2, 7_000, False),
    ("swiglu_gqa_rope", False, 1, 1, 33_000, False),
    ("swiglu_gqa_rope", False, 2, 1, None, False),
]


def test_layouts_and_shapes_are_those_of_megatron():
    for (kind, tied, tp, pp, target, _), ranks in zip(BUILT, zip(*on_ranks(2, built, BUILT), strict=True), strict=True):
        for rank, (listed, sections, ours) in enumerate(ranks):
            assert sections == ours, (kind, tp, pp, rank)
            assert (len(sections) > 1) == (target is not None), (kind, tp, pp, rank)
            if pp == 1:
                assert listed == expected_parameters(kind, tied, tp), (kind, tp)
            else:
                tied_here = [name for name, _, own in listed if own]
                assert tied_here == [("embedding.word_embeddings", "output_layer")[rank] + ".weight"]


def expected_parameters(kind, tied, tp):
    gated = kind != "dense"
    shape = GPTShape(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=256,
        num_attention_heads=4,
        num_query_groups=2 if gated else 4,
        kv_channels=16,
        vocab_size=256,
        max_position_embeddings=0 if gated else 32,
        swiglu=gated,
        layer_norm=not gated,
        bias=not gated,
        untied=not tied,
        tensor_parallel=tp,
    )
    return [(one.name, one.elements, one.own_chunk) for one in shape.parameters()]


def built(cases):
    """On a rank, for each case: its parameters, the sections of Megatron's buckets, and those of our layout."""
    import torch

    from tests.models import build_gpt

    results = []
    for kind, tied, tp, pp, target, padding in cases:
        ddp = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": target or 10**9}
        ddp["pad_buckets_for_high_nccl_busbw"] = padding
        with parallel(tp=tp, pp=pp):
            (model,) = build_gpt(kind, tied=tied, dtype=torch.bfloat16, ddp=ddp)
            (buffer,) = model.buffers
            names = {id(one): name.removeprefix("module.module.") for name, one in model.named_parameters()}
            listed = [
                ParameterSize(names[id(one)], one.numel(), getattr(one, "shared_embedding", False))
                for one in buffer.params
            ]
            reached = model.bucket_size and target  # Megatron makes one bucket on later stages
            layout = megatron_buckets(listed, reached, buffer.data_parallel_world_size, high_bandwidth_padding=padding)
            ours, start = [], 0
            for chunk in layout.chunks:
                pieces = [(x.name, start + x.offset, start + x.offset + x.elements) for x in chunk.parameters]
                ours.append((start, chunk.capacity, pieces))
                start += chunk.capacity
            theirs = []
            for bucket in buffer.buckets:
                places = [(names[id(one)], *buffer.param_index_map[one][:2]) for one in bucket.params_list]
                theirs.append((bucket.offset, bucket.grad_data.numel(), places))
            results.append(([(x.name, x.elements, x.own_chunk) for x in listed], theirs, ours))
    return results
