"""The engine's hot path in C++: which methods it takes the place of, the same bits on it, and what builds it."""

from __future__ import annotations

import pytest

from mindspeed_mem.activation import hot_path
from mindspeed_mem.device import DeviceError, extensions, fast_tensors, native_build
from mindspeed_mem.tools.main import main
from tests.worlds import on_ranks

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
        "core attention": entry(op_swap=[op(r".*core_attention", 2)]),
        "layers": again(recompute=True),
        "norms": again({".*norm": True, r"mlp\.activation_func": True}),
    }
    found = []
    for extension in (hot_path.EXTENSION, None):
        taking_over.use(extension and extension.load())
        fast_tensors.use(extension and fast_tensors.EXTENSION.load())
        found.append(mismatches(plans, {}, {"kind": "dropout"}))
    return tuple(found)


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
