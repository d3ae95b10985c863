"""Who updates what, in which messages it is handed out, and which optimizers can be parallelized at all."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_mem.optimizer_parallel import MODES, Assignment
from mindspeed_mem.optimizer_parallel.assignment import ALIGNMENT, Size, slices
from mindspeed_mem.optimizer_parallel.exchange import messages
from mindspeed_mem.optimizer_parallel.support import problems


def gpt2(hidden: int, layers: int) -> list[int]:
    """Elements of the parameters of Hugging Face's GPT-2 models."""
    layer = [1, 1, 3 * hidden, 3, hidden, 1, 1, 1, 4 * hidden, 4, 4 * hidden, 1]
    return [50257 * hidden, 1024 * hidden, *[hidden * width for width in layer] * layers, hidden, hidden]


def llama_7b() -> list[int]:
    hidden, inner = 4096, 11008
    layer = [hidden * hidden] * 4 + [hidden * inner] * 3 + [hidden] * 2
    return [32000 * hidden, *layer * 32, hidden, 32000 * hidden]


MODELS = {"GPT2-medium": gpt2(1024, 24), "GPT2-XL": gpt2(1600, 48), "Llama-7B": llama_7b()}
SIZES = st.lists(st.builds(Size, st.integers(0, 3000), st.sampled_from([2, 4, 8]), st.booleans()), max_size=30)


@pytest.mark.parametrize(
    ("model", "elements", "balances"),
    [
        ("GPT2-medium", 354_823_168, ["1.000", "1.005", "1.160"]),  # 1.160: the embedding alone is more than the mean
        ("GPT2-XL", 1_557_611_200, ["1.000", "1.000", "1.000"]),
        ("Llama-7B", 6_738_415_616, ["1.000", "1.002", "1.010"]),
    ],
)
def test_grouping_balances_real_models(model, elements, balances):
    assert sum(MODELS[model]) == elements
    for ranks, balance in zip((2, 4, 8), balances, strict=True):
        assignment = Assignment("grouping", ranks)
        assignment.assign([Size(count, 4) for count in MODELS[model]])
        assert sum(assignment.loads) == 4 * elements
        assert f"{assignment.balance():.3f}" == balance


@pytest.mark.parametrize("model", MODELS)
def test_sharding_is_balanced_by_construction(model):
    for ranks in (2, 3, 4, 8):
        assignment = Assignment("sharding", ranks)
        assignment.assign([Size(count, 4) for count in MODELS[model]])
        assert assignment.balance() < 1.001


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_slices_cover_a_parameter_in_rank_order(count, ranks):
    found = slices(count, ranks)
    assert [element for own in found for element in own] == list(range(count))
    assert all(own.start % ALIGNMENT == 0 for own in found if own)
    assert max(map(len, found)) < -(-count // ranks) + ALIGNMENT


@given(SIZES, SIZES, st.integers(1, 5), st.sampled_from(MODES))
def test_every_element_has_one_owner(first, second, ranks, mode):
    assignment = Assignment(mode, ranks)
    for size, ranges in zip(first + second, assignment.assign(first) + assignment.assign(second), strict=True):
        assert sorted(element for own in ranges for element in own) == list(range(size.elements))
        assert sum(map(bool, ranges)) <= 1 or (mode == "sharding" and size.divisible)
    assert sum(assignment.loads) == sum(size.elements * size.itemsize for size in first + second)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(1, 5))
def test_grouping_gives_the_longest_to_the_least_loaded(counts, ranks):
    assignment = Assignment("grouping", ranks)
    assignment.assign([Size(count, 1) for count in counts])
    # No rank had less when the fullest one got its last; that is its only one, or came after one for each rank.
    assert max(assignment.loads) <= max(max(counts), sum(counts) / ranks + sorted(counts)[-ranks - 1 :][0])


@given(SIZES, st.integers(1, 4), st.sampled_from(MODES), st.integers(1, 5000))
def test_messages_carry_every_element_once_within_their_limit(sizes, ranks, mode, limit):
    ranges = Assignment(mode, ranks).assign(sizes)
    seen = set()
    for message in messages(ranges, [s.itemsize for s in sizes], [s.itemsize for s in sizes], limit):
        itemsize = message.kind
        assert ranks * message.length * itemsize <= max(limit, ranks * itemsize)
        assert max(sum(len(s.elements) for s in own) for own in message.segments) == message.length
        for rank, segments in enumerate(message.segments):
            filled = 0
            for segment in segments:
                assert segment.offset == filled and sizes[segment.number].itemsize == itemsize
                filled += len(segment.elements)
                assert filled <= message.length
                assert set(segment.elements) <= set(ranges[segment.number][rank])
                new = {(segment.number, element) for element in segment.elements}
                assert len(new) == len(segment.elements) and not new & seen
                seen |= new
    assert len(seen) == sum(size.elements for size in sizes)


class WithDefaults(torch.optim.AdamW):
    """Another constructor, the same step."""


class Clipped(torch.optim.SGD):
    """Looks at all parameters: nobody here can know."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class LooksLikeFusedAdam(torch.optim.SGD):
    """As Apex' FusedLAMB does."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        self.adam_w_mode = 1

    def step(self, closure=None):
        raise NotImplementedError


def make(name, **settings):
    kind = name if isinstance(name, type) else getattr(torch.optim, name)
    return kind([torch.nn.Parameter(torch.ones(4, 4))], **settings)


ELEMENTWISE = "Adadelta Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD".split()


def test_every_optimizer_of_torch_is_known():
    names = [n for n in dir(torch.optim) if isinstance(getattr(torch.optim, n), type) and n != "Optimizer"]
    sharded = [name for name in names if not problems(make(name), "sharding")]
    grouped = [name for name in names if not problems(make(name), "grouping")]
    assert sharded == sorted(ELEMENTWISE)
    assert set(names) - set(grouped) == {"LBFGS"}
    for mode in MODES:
        assert problems(make(WithDefaults), mode) == []


@pytest.mark.parametrize(
    ("name", "mode", "settings", "expected"),
    [
        ("Adafactor", "sharding", {}, "Adafactor needs whole parameters: sharding would change what it computes"),
        ("LBFGS", "grouping", {}, "LBFGS looks at all parameters together"),
        (Clipped, "grouping", {}, "Clipped .* is not known here: if it updates each parameter"),
        (LooksLikeFusedAdam, "sharding", {}, "LooksLikeFusedAdam .* is not known here"),
        (Clipped, "sharding", {}, "Clipped .* is not known here: if it updates each element"),
        ("SGD", "slicing", {}, "mode: got 'slicing'; allowed: grouping, sharding"),
        ("SGD", "grouping", {"differentiable": True}, "differentiable=True"),
    ],
)
def test_what_cannot_be_parallelized_is_refused(name, mode, settings, expected):
    (problem,) = problems(make(name, **settings), mode)
    assert re.match(expected, problem)


@pytest.mark.needs_torch("2.9", "there is no Muon")
def test_the_callers_word_is_taken_for_unknown_classes_only():
    assert problems(make(Clipped), "sharding", assume_independent=True) == []
    assert problems(make("LBFGS"), "grouping", assume_independent=True)
    assert problems(make("Muon"), "sharding", assume_independent=True)
