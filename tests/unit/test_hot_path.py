"""The engine's hot path in C++: which methods it takes the place of, the same bits on it, and what builds it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
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


def recomputed() -> list[list]:
    """Of plans that run operators again, on the hot path and in Python: results, and what the engine reports."""
    from mindspeed_mem.activation import taking_over
    from tests.swap_runs import again, swap, trained

    plans = [
        again({".*norm": True}),
        again({r"mlp\.linear_fc1": True, r".*\.core_attention": True}),
        again(recompute=True),
    ]
    found = []
    for extension in (hot_path.EXTENSION, None):
        taking_over.use(extension and extension.load())
        fast_tensors.use(extension and fast_tensors.EXTENSION.load())
        cases: list = []
        for kind, plan in [*itertools.product(["dropout"], plans), ("moe", plans[0])]:
            for survive in (False, True):
                with swap(plan, survive=survive) as engine:
                    results, _ = trained({}, {"kind": kind}, steps=4)
                    report = engine.report()
                bits = [result.grads | {"": torch.stack(result.losses)} for result in results]
                figures = report.peak_bytes, report.peak_owned_bytes, report.peak_bytes_without, report.held_bytes
                cases.append((bits, (*figures, report.recomputed_bytes, report.recomputed_by_operator)))
        found.append([cases, left_half_way()])
    return found


def left_half_way() -> list:
    """What is raised in an operator that has run again before, what is left then, and gradients of the steps."""
    from tests.models import build_gpt
    from tests.swap_runs import again, one_forward, owned_now, swap
    from tests.worlds import parallel

    layer_norm = torch.nn.functional.layer_norm

    def fails(*args):
        raise ValueError("no norm today")

    def writes(x, *args):
        x.detach().add_(0)
        return layer_norm(x, *args)

    found = []
    with parallel(), swap(again({r"pre_mlp_layernorm": True})) as engine:
        chunks = build_gpt("dense")
        weight = chunks[0].module.decoder.layers[2].pre_mlp_layernorm.weight
        for norm in (layer_norm, layer_norm, layer_norm, fails, writes, layer_norm):
            engine.passes.begin_schedule(("train",))
            weight.main_grad.zero_()
            raised = ""
            torch.nn.functional.layer_norm = norm
            try:
                loss = one_forward(engine, chunks)
                engine.passes.begin_backward(loss)
                loss.sum().backward()
                engine.passes.end_backward()
            except (ValueError, RuntimeError) as error:
                raised = str(error)
            finally:
                torch.nn.functional.layer_norm = layer_norm
            position, loss = engine.position, None
            found.append((raised, len(position.stack), position.rerun, position.known, weight.main_grad.tolist()))
            engine.passes.end_schedule(not raised)
            found.append(owned_now())
    return found


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


@pytest.mark.distributed
def test_operators_that_run_again_do_the_same_on_it(built):
    [[(mine, mine_left), (python, python_left)]] = on_ranks(1, recomputed)
    for one, other in zip(mine, python, strict=True):
        assert one[1] == other[1] and one[1][4] > 0
        for bits, others in zip(one[0], other[0], strict=True):
            assert bits.keys() == others.keys() and all(torch.equal(bits[name], others[name]) for name in bits)
    assert mine_left == python_left
    raised = [one[0] for one in mine_left[::2]]
    assert raised[3] == "no norm today" and "changes its input in place" in raised[4]
    assert [bool(one) for one in raised] == [False, False, False, True, True, False]
    assert mine_left[-2][4] == mine_left[0][4] and mine_left[-1] == mine_left[1]


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


def test_the_command_builds_it(built, capsys, monkeypatch, tmp_path):
    assert main(["build-native"]) == 0
    paths = capsys.readouterr().out.split()
    assert len(paths) == 2 and all(path.endswith(".so") for path in paths)
    monkeypatch.setenv("CXX", "/none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert main(["build-native"]) == 2 and "compiler" in capsys.readouterr().err


def test_part_of_a_library_is_left_aside(built, tmp_path, monkeypatch):
    """As after a crash, or a copy onto a full disk: loading it would end the process."""
    whole = hot_path.EXTENSION.build()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copy = tmp_path / "mindspeed_mem" / whole.name
    copy.parent.mkdir()
    copy.write_bytes(whole.read_bytes())
    assert hot_path.EXTENSION.built() == copy
    for length in (0, 100, 5000, copy.stat().st_size // 2):
        copy.write_bytes(whole.read_bytes()[:length])
        assert hot_path.EXTENSION.built() is None and hot_path.EXTENSION.load() is None


def test_what_cannot_be_kept_is_not_built(built, capsys, monkeypatch, tmp_path):
    """Nobody would find it: it had been put into a folder that is new each time."""
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    for command in ("build-native", "build-allocator"):
        assert main([command]) == 2
        said = capsys.readouterr().err
        assert f"nothing can be written to {file}" in said and "set XDG_CACHE_HOME" in said


def test_what_is_built_others_may_read_and_a_compiler_that_makes_nothing_is_named(built, capsys, monkeypatch, tmp_path):
    compiler, folder, whole = tmp_path / "compiler", tmp_path / "cache", fast_tensors.EXTENSION.built()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("CXX", str(compiler))
    for ends, said in (("exit 3", "status 3, and said nothing"), ("exit 0", "made no whole library of")):
        compiler.write_text(f"#!/bin/sh\n{ends}\n")
        compiler.chmod(0o755)
        assert main(["build-native"]) == 2
        text = capsys.readouterr().err
        assert f"{compiler} " in text and said in text and not list(folder.rglob("*.so"))
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done\ncp "{whole}" "$last"\n')
    made = fast_tensors.EXTENSION.build()
    assert made.parent.parent == folder and made.stat().st_mode & 0o777 == 0o755


UNHEEDED = """
import mindspeed_mem, torch
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()) for _ in range(2)))
for _ in range(2):
    mindspeed_mem.attach(model, {"recompute_config": {"recompute": True}}).detach()
"""


@pytest.mark.parametrize("value, said", [("1", "build-native"), ("off", "got 'off'")])
def test_what_the_variable_asks_for_in_vain_is_said_once(tmp_path, value, said):
    environment = os.environ | {extensions.VARIABLE: value, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", UNHEEDED], env=environment, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if extensions.VARIABLE in line]
    assert len(lines) == 1 and said in lines[0]


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    """A container's user that has no name, where HOME is not set."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    assert hot_path.EXTENSION.built() is None
    folder = native_build.cache_folder()
    assert folder.is_dir() and not list(folder.iterdir())
    folder.rmdir()
