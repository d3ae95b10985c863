"""Our registry and MindSpeed's own patch manager on one symbol of megatron-core (MINDSPEED names a checkout)."""

import functools
import os
import sys
from types import ModuleType

import megatron.core.transformer.mlp as mlp
import megatron.core.utils as megatron_utils
import pytest

from mindspeed_mem.patching import Patch, Registry

TARGET = "megatron.core.utils:nvtx_range_push"


@pytest.fixture
def manager(monkeypatch):
    if "MINDSPEED" in os.environ:
        monkeypatch.syspath_prepend(os.environ["MINDSPEED"])
    utils = pytest.importorskip("mindspeed.patch_utils", reason="neither installed nor named by MINDSPEED")
    monkeypatch.setattr(utils.MindSpeedPatchesManager, "patches_info", {})
    return utils.MindSpeedPatchesManager


@pytest.fixture
def calls():
    return []


@pytest.fixture
def theirs(manager, calls):
    """Applies a wrapper of theirs around the symbol; may be called again, as their repatch does."""

    def their_wrapper(function):
        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            calls.append("theirs")
            return function(*args, **kwargs)

        return wrapped

    def apply():
        manager.register_patch(TARGET.replace(":", "."), their_wrapper)
        manager.apply_patches()

    native = megatron_utils.nvtx_range_push
    holders = [m for m in list(sys.modules.values()) if type(m) is ModuleType and "nvtx_range_push" in vars(m)]
    yield apply
    for module in holders:  # one test leaves the two packages in a tangle
        module.nvtx_range_push = native


@pytest.fixture
def ours(theirs, calls):
    """(registry, patch): ours applied after theirs."""

    def function(original, *args, **kwargs):
        calls.append("ours")
        return original(*args, **kwargs)

    registry = Registry()
    patch = registry.declare(Patch(TARGET, function, declared_by="a"))
    theirs()
    registry.apply()
    return registry, patch


def test_ours_goes_on_top_and_says_so(ours, calls):
    registry, patch = ours
    mlp.nvtx_range_push(suffix="x")
    assert calls == ["ours", "theirs"]
    assert patch.verify() == "applied" and patch.notes == [f"on top of {__name__}"]
    registry.undo()
    mlp.nvtx_range_push(suffix="x")
    assert calls == ["ours", "theirs", "theirs"]


def test_their_repatch_is_seen_to_have_dropped_ours(ours, manager, theirs, calls):
    registry, patch = ours
    manager.remove_patches()
    theirs()
    assert patch.verify() == f"LOST to {__name__}"
    assert len(registry.verify_once()) == 1


def test_lifted_for_their_repatch_ours_is_on_top_again(ours, manager, theirs, calls):
    registry, patch = ours
    lifted = registry.lift()
    manager.remove_patches()
    theirs()
    registry.put_back(lifted)
    mlp.nvtx_range_push(suffix="x")
    assert calls == ["ours", "theirs"] and patch.verify() == "applied"
    registry.undo()
