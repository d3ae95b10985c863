"""The engine's hot path in C++: which methods it takes the place of, the same bits on it, and what builds it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from mindspeed_mem.activation import hot_path
from mindspeed_mem.device import DeviceError, extensions, fast_tensors, native_build
from mindspeed_mem.tools.main import main
from tests.worlds import on_ranks


class Pair(NamedTuple):
    number: Any
    more: Any


pytestmark = pytest.mark.skipif(native_build.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def built():
    try:
        for extension in (fast_tensors.EXTENSION, hot_path.EXTENSION):
            extension.build()
    except DeviceError as error:
        if "headers" in str(error):
            pytest.skip(str(error))
        raise


def trained() -> tuple[list[str], list[str]]:
    """What differs from plain training, first on the compiled hot path, then by the same engine in Python."""
    from mindspeed_mem.activation import taking_over
    from tests.swap_runs import EVERYTHING, again, entry, mismatches, op

    plans = {
        "everything": EVERYTHING,
        "core attention": entry(op_swap=[op(r".*\.core_attention", 2)]),
        "layers": again(recompute=True),
        "norms": again({".*norm": True, r"mlp\.activation_func": True}),
    }
    found = []
    for extension in (hot_path.EXTENSION, None):
        taking_over.use(extension and extension.load())
        fast_tensors.use(extension and fast_tensors.EXTENSION.load())
        found.append(mismatches(plans, {}, {"kind": "dropout"}))
    return tuple(found)


def test_arguments_are_taken_apart_the_same_way(built):
    from mindspeed_mem.activation import taking_over
    from mindspeed_mem.activation.rerun.arguments import Slot, join, split, tensors_in

    one, other, left = torch.ones(1), torch.zeros(2), torch.nn.Parameter(torch.ones(3))
    first = Pair(one, [other, 4])
    nested = (first, {"a": (one, None), "b": {"c": [left]}}, [1.5, "text", (other,)], {one}, torch.Size([2]))

    def take(tensor):
        return None if tensor is left else Slot(0) if tensor is one and taken else tensor

    before, found = hot_path.native, []
    try:
        for module in (None, hot_path.EXTENSION.load()):
            taking_over.use(module)
            taken: list = []
            apart = split(nested, take, taken)
            found.append((apart, join(apart, taken), taken, tensors_in(nested)))
    finally:
        taking_over.use(before)
    for mine, its in zip(*found, strict=True):
        assert repr(mine) == repr(its) and type(mine) is type(its)
    assert type(found[1][0][0]) is Pair and found[1][1][0].number is one
    assert [id(tensor) for tensor in found[1][3]] == [id(tensor) for tensor in (one, other, one, left, other)]


def test_states_of_generators_are_the_same_until_somebody_draws(built):
    from mindspeed_mem.activation import taking_over
    from mindspeed_mem.activation.rerun import rng

    draws = {
        "one number": lambda: torch.rand(1),
        "half of a pair of normal numbers": lambda: torch.empty(1, dtype=torch.float64).normal_(),
        "the other half": lambda: torch.empty(1, dtype=torch.float64).normal_(),
        "a whole twist": lambda: torch.rand(624),
        "another seed": lambda: torch.manual_seed(7),
        "a state put back": lambda: torch.set_rng_state(first),
    }
    before, first = hot_path.native, torch.get_rng_state()
    try:
        taking_over.use(hot_path.EXTENSION.load())
        for name, draw in draws.items():
            state = rng.host_state()
            assert rng.host_state() is state and torch.equal(state, torch.get_rng_state()), name
            draw()
            again = rng.host_state()
            assert again is not state and torch.equal(again, torch.get_rng_state()), name
        one, other = torch.zeros(2), torch.zeros(2)
        tracked = {"a": one, "b": other}
        assert rng.same((one, tracked, [other]), (one.clone(), {"b": other, "a": one}, [other]))
        assert not rng.same((one, tracked), (one, {"a": one, "b": torch.ones(2)}))
        assert not rng.same((one, tracked), (one, {"a": one, "c": other}))
        assert not rng.same((torch.default_generator,), (torch.default_generator,))  # it may have gone on
    finally:
        taking_over.use(before)
        torch.set_rng_state(first)


@pytest.mark.distributed
def test_the_engine_gives_the_same_bits_on_it(built):
    assert on_ranks(1, trained) == [([], [])]


def test_it_takes_the_place_of_methods_and_gives_it_back(built):
    from mindspeed_mem.activation import taking_over
    from mindspeed_mem.activation.storage.records import Handle, Record

    before = hot_path.native
    taking_over.use(None)
    in_python = Handle.__del__, Record.leave
    try:
        taking_over.use(hot_path.EXTENSION.load())
        assert hot_path.native is not None
        assert Handle.__del__ is not in_python[0] and Record.leave is not in_python[1]
        taking_over.use(None)
        assert (Handle.__del__, Record.leave) == in_python and hot_path.native is None
    finally:
        taking_over.use(before)


def test_the_command_builds_it(built, capsys, monkeypatch):
    assert main(["build-native"]) == 0
    paths = capsys.readouterr().out.split()
    assert len(paths) == 2 and all(path.endswith(".so") for path in paths)
    monkeypatch.setenv("CXX", "/none")
    monkeypatch.setattr(extensions, "cache_folder", lambda create=True: native_build.SOURCES)
    monkeypatch.setenv("PATH", "")
    assert main(["build-native"]) == 2 and "compiler" in capsys.readouterr().err
