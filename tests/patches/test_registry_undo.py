"""Whole or nothing, verified, and undone without a trace: the registry on the real megatron-core."""

import functools
import json
import logging
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import megatron.core.transformer.mlp as mlp
import megatron.core.utils as megatron_utils
import pytest

from mindspeed_mem.patching import Patch, PatchError, Registry, upstream
from tests import warm

ROOT = Path(__file__).parents[2]
PUSH = "megatron.core.utils:nvtx_range_push"
POP = "megatron.core.utils:nvtx_range_pop"
FORWARD = "megatron.core.transformer.mlp:MLP.forward"


@pytest.fixture
def registry():
    registry = Registry()
    yield registry
    registry.undo()


def tagged(calls, tag):
    def function(original, *args, **kwargs):
        calls.append(tag)
        return original(*args, **kwargs)

    return function


def declare(registry, target, function=None, by="a", **kwargs):
    function = function or (lambda original, *args, **kwargs: original(*args, **kwargs))
    return registry.declare(Patch(target, function, declared_by=by, **kwargs))


def fresh(code, *arguments, cwd=None):
    """What a fresh interpreter prints, as lines; it must end well."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{cwd or ''}", "PYTHONWARNINGS": "ignore"}
    command = [warm.python(), "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_several_patches_of_one_symbol_stack_and_reach_every_copy(registry):
    calls, native = [], megatron_utils.nvtx_range_push
    for tag in ("a", "b", "c"):
        declare(registry, PUSH, tagged(calls, tag), by=tag)
    registry.apply()
    assert mlp.nvtx_range_push is megatron_utils.nvtx_range_push
    mlp.nvtx_range_push(suffix="x")
    assert calls == ["c", "b", "a"]
    assert list(registry.verify().values()) == ["applied, beneath c", "applied, beneath c", "applied"]
    registry.undo(["c"])
    mlp.nvtx_range_push(suffix="x")
    assert calls == ["c", "b", "a", "b", "a"]
    with pytest.raises(PatchError, match="b patched on top"):
        registry.undo(["a"])
    registry.undo()
    assert mlp.nvtx_range_push is megatron_utils.nvtx_range_push is native


def test_failure_half_way_leaves_nothing_applied(registry):
    natives = megatron_utils.nvtx_range_push, vars(mlp.MLP)["forward"]
    good = [declare(registry, PUSH), declare(registry, FORWARD)]
    bad = declare(registry, "megatron.core.utils:no_such_function")
    late = declare(registry, "wave:open")
    with pytest.raises(PatchError, match="no_such_function"):
        registry.apply()
    assert (megatron_utils.nvtx_range_push, vars(mlp.MLP)["forward"]) == natives
    assert mlp.nvtx_range_push is natives[0]
    assert [p.status for p in good] == ["undone", "undone"] and bad.status == "FAILED" and late.status == "undone"


def test_keep_going_applies_the_rest_and_says_what_failed(registry):
    good, bad = declare(registry, PUSH), declare(registry, "megatron.core.utils:no_such_function")
    other = declare(registry, FORWARD, lambda original, self, no_such_parameter: None)
    registry.apply(keep_going=True)
    assert [p.status for p in (good, bad, other)] == ["applied", "FAILED", "FAILED"]
    assert "does not exist" in bad.notes[0] and "no longer begins with (self, no_such_parameter)" in other.notes[0]


def test_after_a_failure_the_good_ones_can_be_applied(registry):
    good = declare(registry, PUSH, by="good")
    declare(registry, "megatron.core.utils:no_such_function", by="bad")
    with pytest.raises(PatchError):
        registry.apply()
    registry.apply(["good"])
    assert good.verify() == "applied"


def test_undo_refuses_beneath_a_foreign_wrapper_and_names_it(registry):
    buried, free = declare(registry, PUSH), declare(registry, POP)
    registry.apply()
    ours = megatron_utils.nvtx_range_push

    @functools.wraps(ours)
    def later(*args, **kwargs):
        return ours(*args, **kwargs)

    megatron_utils.nvtx_range_push = later
    assert buried.verify() == f"applied, beneath {__name__}"
    with pytest.raises(PatchError, match=f"{PUSH}: {__name__} patched on top of it"):
        registry.undo()
    assert free.status == "undone" and buried.status == "applied"
    megatron_utils.nvtx_range_push = ours
    registry.undo()
    assert buried.status == "undone" and mlp.nvtx_range_push is megatron_utils.nvtx_range_push


def test_lost_patches_are_named_once(registry, caplog, monkeypatch):
    function, method = declare(registry, PUSH), declare(registry, FORWARD)
    kept = declare(registry, POP)
    registry.apply()
    ours = megatron_utils.nvtx_range_push, vars(mlp.MLP)["forward"]

    def somebody_elses(*args, **kwargs):
        raise AssertionError("never called")

    megatron_utils.nvtx_range_push = mlp.MLP.forward = somebody_elses
    try:
        lost = f"LOST to {__name__}"
        assert registry.verify() == {function: lost, method: lost, kept: "applied"}
        with caplog.at_level(logging.ERROR):
            lines = registry.verify_once(logging.getLogger("mindspeed_mem.test"))
        assert len(lines) == len(caplog.records) == 2
        assert PUSH in lines[0] and lost in lines[0] and FORWARD in lines[1]
        assert registry.verify_once() == []
        with pytest.raises(PatchError, match=f"{__name__} patched on top"):
            registry.undo([function.declared_by])
    finally:
        megatron_utils.nvtx_range_push, mlp.MLP.forward = ours


def test_a_symbol_that_is_gone_is_lost(registry):
    native = megatron_utils.nvtx_range_push
    patch = declare(registry, PUSH)
    registry.apply()
    ours = megatron_utils.nvtx_range_push
    del megatron_utils.nvtx_range_push
    assert patch.verify() == "LOST: the symbol is gone"
    megatron_utils.nvtx_range_push = ours
    registry.undo()
    assert megatron_utils.nvtx_range_push is native


def test_lift_for_another_pack_and_put_back_on_top_of_it(registry):
    calls, native = [], megatron_utils.nvtx_range_push
    ours = declare(registry, PUSH, tagged(calls, "ours"))
    kept = declare(registry, POP, by="kept")
    registry.apply()
    lifted = registry.lift(keep=["kept"])
    assert lifted == [ours] and megatron_utils.nvtx_range_push is mlp.nvtx_range_push is native
    assert kept.verify() == "applied"

    def theirs(*args, **kwargs):
        calls.append("theirs")

    megatron_utils.nvtx_range_push = mlp.nvtx_range_push = theirs
    registry.put_back(lifted)
    mlp.nvtx_range_push(suffix="x")
    assert calls == ["ours", "theirs"] and ours.notes == [f"on top of {__name__}"]
    registry.undo()
    assert megatron_utils.nvtx_range_push is theirs
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and vars(module).get("nvtx_range_push") is theirs:
            module.nvtx_range_push = native


def test_methods_of_classes_known_only_at_run_time(registry):
    calls = []
    function = tagged(calls, "wrapped")
    native = lambda self, x: x  # noqa: E731
    one, twin = (type("Local", (mlp.MLP,), {"forward": native, "__init__": lambda self: None}) for _ in range(2))
    first = registry.apply_method(one, "forward", function, "a")
    assert registry.apply_method(one, "forward", function, "a") is first
    assert one().forward(3) == 3 and calls == ["wrapped"]
    assert twin.forward is native
    assert registry.apply_method(twin, "forward", function, "a") is not first
    with pytest.raises(PatchError, match="backward does not exist"):
        registry.apply_method(one, "backward", function, "a")
    registry.undo(["a"])
    assert one.forward is twin.forward is native
    assert registry.apply_method(one, "forward", function, "a") is first and one.forward is not native


LATE = """
    import sys
    from mindspeed_mem.patching import REGISTRY, around

    @around("megatron.core.utils:nvtx_range_push")
    def push(original, msg=None, suffix=None):
        print("ours", suffix)

    @around("megatron.core.transformer.mlp:MLP.forward")
    def forward(original, self, *args, **kwargs):
        return "ours"

    REGISTRY.apply()
    REGISTRY.undo()
    REGISTRY.apply()  # a second hook on the same module must not patch twice
    print([p.status for p in REGISTRY.patches], "megatron" in sys.modules)
    from megatron.core.transformer import mlp, attention
    print(list(REGISTRY.verify().values()), mlp.MLP.forward(None))
    mlp.nvtx_range_push(suffix="mlp")
    attention.nvtx_range_push(suffix="attention")
    REGISTRY.undo()
    import megatron.core.utils as utils
    print(attention.nvtx_range_push is mlp.nvtx_range_push is utils.nvtx_range_push, utils.nvtx_range_push.__module__)
"""


def test_late_imports_are_patched_before_the_importer_binds_names():
    assert fresh(LATE) == [
        "['waiting', 'waiting'] False",
        "['applied', 'applied'] ours",
        "ours mlp",
        "ours attention",
        "True megatron.core.utils",
    ]


LATE_FAILURE = """
    import sys
    from mindspeed_mem.patching import REGISTRY, Patch, PatchError
    good = REGISTRY.declare(Patch("megatron.core.utils:nvtx_range_push", print, declared_by="a"))
    bad = REGISTRY.declare(Patch("megatron.core.utils:no_such_function", print, declared_by="a"))
    REGISTRY.apply()
    try:
        import megatron.core.utils
    except PatchError as error:
        print(error)
    print(good.status, bad.status, "megatron.core.utils" in sys.modules)
    REGISTRY.patches.remove(bad)
    REGISTRY.apply()
    import megatron.core.utils
    print(good.verify())
"""


def test_a_missing_symbol_fails_the_late_import_and_applies_nothing():
    assert fresh(LATE_FAILURE) == [
        "megatron.core.utils:no_such_function does not exist in the installed version",
        "undone FAILED False",
        "applied",
    ]


EVERYTHING = """
    import importlib, json, sys
    from pathlib import Path
    from mindspeed_mem.patching import upstream
    from mindspeed_mem.megatron_adaptor import patch_modules
    from mindspeed_mem.patching import REGISTRY
    modules = patch_modules(["*"])
    for module in modules:
        importlib.import_module(module)
    for patch in list(REGISTRY.patches):
        try:
            importlib.import_module(patch.module)
        except ModuleNotFoundError:
            pass

    def bindings():
        found = {}
        for name, module in list(sys.modules.items()):
            for key, value in list(vars(module).items()) if hasattr(module, "__dict__") else ():
                if callable(value) and not key.startswith("__"):
                    found[name, key] = value
                if isinstance(value, type) and value.__module__ == name:
                    found.update({(name, key, attribute): v for attribute, v in vars(value).items() if callable(v)
                                  or isinstance(v, (staticmethod, classmethod))})
        return found

    def handed_in():  # what our own modules hold of patch files, in lists and under names
        found = []
        for name, module in sys.modules.items():
            values = vars(module).values() if name.startswith("mindspeed_mem.") and "patch" not in name else ()
            for value in [one for v in values for one in (v if type(v) is list else [v])]:
                if str(getattr(value, "__module__", "")).startswith("mindspeed_mem.patches."):
                    found.append(getattr(value, "__name__", type(value).__name__))
        return found

    joined = [handed_in()]
    before = bindings()
    REGISTRY.apply()
    joined.append(handed_in())
    applied = bindings()
    changed = [key for key, value in before.items() if applied.get(key) is not value]
    statuses = [p.status for p in REGISTRY.patches]
    changes = [note for p in REGISTRY.patches for note in p.notes if "upstream changed" in note]
    upstream.write(REGISTRY.originals(), Path(sys.argv[1]))
    REGISTRY.undo()
    joined.append(handed_in())
    after = bindings()
    wrong = [key for key, value in before.items() if after.get(key) is not value]
    wrong += [key for key in after.keys() - before.keys() if key in applied]
    print(json.dumps([statuses, len(changed), [".".join(key) for key in wrong], joined, changes]))
"""


def test_undoing_all_patches_of_this_package_restores_every_binding(tmp_path):
    """The shipped patches, on the installed megatron-core: functions, methods and each copy of them in any module."""
    written = tmp_path / "upstream.json"
    *_, line = fresh(EVERYTHING, str(written))  # modules of the newest megatron-core print, too
    statuses, changed, wrong, (at_import, on, off), drifted = json.loads(line)
    assert wrong == []
    assert (at_import, off) == ([], []) and {"_RangesClosed", "reads", "recomputes", "_capture", "_restore"} <= set(on)
    listeners = {
        "FirstStep",
        "OwnConfigs",
        "AdaptivePasses",
        "SurvivePasses",
        "ChunkPasses",
        "ActivationPasses",
        "Unfinished",
        "CappedLoop",
    }
    assert listeners <= set(on)
    assert set(statuses) <= {"applied", "waiting", "absent"} and statuses.count("applied") > 20
    assert changed > statuses.count("applied")
    assert drifted == []
    now, known = json.loads(written.read_text()), json.loads(upstream.TABLE.read_text())
    for package in known:  # `make hashes` has been run: nothing is missing for what is installed, and nothing stale
        installed = upstream.version_of(package)
        assert known[package]["files"].get(installed) or package == "torch", f"no hashes for {package} {installed}"
        if installed in known[package]["files"]:
            assert now[package] == known[package]
