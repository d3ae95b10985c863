"""The registry on the real megatron-core: every kind of symbol, wherever it has been copied, now and later."""

import copy
import functools
import importlib
import pickle
import subprocess
import sys
import types

import megatron.core.activations
import megatron.core.models.gpt.gpt_model  # imports most of what is patched here
import megatron.core.pipeline_parallel.schedules as schedules
import megatron.core.rerun_state_machine as rerun
import megatron.core.tensor_parallel.random as megatron_random
import megatron.core.transformer.attention as attention
import megatron.core.transformer.mlp as mlp
import megatron.core.transformer.moe.experts as experts
import megatron.core.utils as megatron_utils
import pytest
import torch
from megatron.core.transformer import TransformerConfig

from mindspeed_mem.patching import REGISTRY, Direct, Patch, PatchError, Registry, upstream

PUSH = "megatron.core.utils:nvtx_range_push"


@pytest.fixture
def registry():
    """An empty registry; what a test leaves applied is undone after it."""
    registry = Registry()
    yield registry
    registry.undo()


@pytest.fixture
def calls():
    return []


@pytest.fixture
def applied(registry, calls):
    """Applies one patch that notes its calls; returns it."""

    def apply(target, function=None, **kwargs):
        def noted(original, *args, **kwargs):
            calls.append(target)
            return original(*args, **kwargs)

        patch = registry.declare(Patch(target, function or noted, declared_by="test_patches", **kwargs))
        registry.apply(["test_patches"])
        return patch

    return apply


@pytest.fixture
def importer():
    """A module that has copied a symbol under another name, as ``from module import name as other`` does."""

    def make(value):
        module = types.ModuleType("a_user_of_megatron")
        module.renamed = value
        sys.modules[module.__name__] = module
        return module

    yield make
    sys.modules.pop("a_user_of_megatron", None)


def test_function_is_patched_where_it_lives_and_in_all_copies(registry, applied, importer, calls):
    native = megatron_utils.nvtx_range_push
    user = importer(native)
    places = [megatron_utils, attention, mlp]
    assert all(place.nvtx_range_push is native for place in places)

    applied(PUSH)
    ours = megatron_utils.nvtx_range_push
    assert ours is not native and user.renamed is ours
    assert all(place.nvtx_range_push is ours for place in places)
    user.renamed(suffix="x")
    mlp.nvtx_range_push(suffix="x")
    assert calls == [PUSH, PUSH]

    late = types.ModuleType("imported_while_patched")
    late.push = megatron_utils.nvtx_range_push
    sys.modules[late.__name__] = late
    try:
        registry.undo()
        assert late.push is native and user.renamed is native
        assert all(place.nvtx_range_push is native for place in places)
    finally:
        del sys.modules[late.__name__]


def test_the_declaring_module_keeps_the_natives_it_holds(registry, importer):
    user = importer(megatron_utils.nvtx_range_push)
    registry.declare(Patch(PUSH, lambda original, *args, **kwargs: None, declared_by=user.__name__))
    registry.apply()
    assert user.renamed is not megatron_utils.nvtx_range_push
    registry.undo()
    assert user.renamed is megatron_utils.nvtx_range_push


def test_static_method(applied, calls):
    target = "megatron.core.tensor_parallel.random:CheckpointFunction.backward"
    native = vars(megatron_random.CheckpointFunction)["backward"]
    patch = applied(target)
    now = vars(megatron_random.CheckpointFunction)["backward"]
    assert isinstance(native, staticmethod) and isinstance(now, staticmethod) and now is not native
    with pytest.raises(AttributeError, match="saved_tensors"):  # the original runs, with just the argument given
        megatron_random.CheckpointFunction.backward(types.SimpleNamespace())
    assert calls == [target] and patch.verify() == "applied"


def test_class_method_gets_the_class_it_was_called_on(registry, tmp_path):
    skipped = tmp_path / "tracker"
    skipped.write_text("")
    seen = []

    def noted(original, cls, tracker_file_name):
        seen.append(cls)
        return original(cls, tracker_file_name)

    class Mine(rerun.RerunStateMachine):
        pass

    name = "get_skipped_iterations_from_tracker_file"
    target = f"megatron.core.rerun_state_machine:RerunStateMachine.{name}"
    native = vars(rerun.RerunStateMachine)[name]
    registry.declare(Patch(target, noted, declared_by="test_patches"))
    registry.apply()
    assert isinstance(vars(rerun.RerunStateMachine)[name], classmethod)
    assert Mine.get_skipped_iterations_from_tracker_file(str(skipped)) == []
    assert seen == [Mine]
    registry.undo()
    assert vars(rerun.RerunStateMachine)[name] is native


def test_inherited_method_leaves_no_trace_on_the_class(registry, applied, calls):
    from megatron.core.transformer.mlp import MLP

    target = "megatron.core.transformer.mlp:MLP.extra_repr"
    assert "extra_repr" not in vars(MLP)
    applied(target)
    assert "extra_repr" in vars(MLP)
    assert MLP.extra_repr(torch.nn.Identity()) == "" and torch.nn.Identity().extra_repr() == ""
    assert calls == [target]
    registry.undo()
    assert "extra_repr" not in vars(MLP)


@pytest.mark.parametrize(
    ("target", "use"),
    [
        ("torch:empty", lambda: torch.empty(3).shape == (3,)),
        ("torch:Tensor.add_", lambda: torch.zeros(2).add_(1).sum() == 2),
        ("time:monotonic", lambda: importlib.import_module("time").monotonic() > 0),
    ],
)
def test_functions_written_in_c(registry, applied, calls, target, use):
    patch = applied(target)
    assert use() and calls == [target]
    assert patch.notes == []
    registry.undo()
    assert use() and calls == [target]


def test_applying_twice_is_applying_once(registry, applied, calls):
    applied(PUSH)
    ours = megatron_utils.nvtx_range_push
    registry.apply()
    assert megatron_utils.nvtx_range_push is ours
    ours(suffix="x")
    assert calls == [PUSH]


def test_what_is_direct_rests_until_it_is_woken_or_applied(registry, applied, calls):
    native, push = mlp.nvtx_range_pop, megatron_utils.nvtx_range_push
    patch = applied("megatron.core.utils:nvtx_range_pop", Direct(lambda original: lambda msg=None, suffix=None: None))
    applied(PUSH)
    ours = megatron_utils.nvtx_range_push
    for again in (registry.wake, registry.apply):
        registry.rest()
        assert patch.status == "resting" and mlp.nvtx_range_pop is native and mlp.nvtx_range_push is ours
        again()
        assert patch.status == "applied" and mlp.nvtx_range_pop is not native
    registry.rest()
    registry.undo()
    registry.wake()
    assert patch.status == "undone" and (mlp.nvtx_range_pop, mlp.nvtx_range_push) == (native, push)


@pytest.mark.parametrize(
    "target", ["megatron.core.activations:squared_relu", "megatron.core.fusions.fused_bias_geglu:quick_gelu"]
)
def test_what_layers_compare_with_what_they_keep_does_not_rest(target):
    """An expert whose activation is not the one that it knows takes another way, with other bits."""
    patches = importlib.import_module("mindspeed_mem.patches.recompute_fused").__name__
    name = target.partition(":")[2]
    REGISTRY.apply([patches])
    try:
        of_model = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
        config = TransformerConfig(**of_model, activation_func=getattr(experts, name))
        for change in (REGISTRY.rest, REGISTRY.wake):
            change()
            assert config.activation_func is getattr(experts, name) is not REGISTRY.originals()[target]
    finally:
        REGISTRY.undo([patches])


def test_the_same_declaration_twice_is_one_patch(registry):
    function = functools.partial(lambda original: original())
    first = registry.declare(Patch(PUSH, function, declared_by="a"))
    assert registry.declare(Patch(PUSH, function, declared_by="a")) is first
    assert registry.declare(Patch(PUSH, function, declared_by="b")) is not first
    assert len(registry.patches) == 2


def test_only_the_named_patch_files_are_applied(registry, importer):
    native, pop = megatron_utils.nvtx_range_push, megatron_utils.nvtx_range_pop
    registry.declare(Patch(PUSH, lambda original, *a, **k: None, declared_by="a"))
    registry.declare(Patch("megatron.core.utils:nvtx_range_pop", lambda original, *a, **k: None, declared_by="b"))
    registry.apply(["a"])
    assert megatron_utils.nvtx_range_push is not native and megatron_utils.nvtx_range_pop is pop


def test_missing_symbol(registry):
    registry.declare(Patch("megatron.core.utils:no_such_function", print, declared_by="a"))
    with pytest.raises(PatchError, match="core.utils:no_such_function does not exist in the installed version"):
        registry.apply()


def test_missing_optional_symbol(applied):
    patch = applied("megatron.core.transformer.mlp:MLP.no_such_method", optional=True)
    assert patch.status == patch.verify() == "absent"


def test_missing_symbol_can_be_created_and_goes_again(registry):
    registry.declare(
        Patch("megatron.core.utils:not_there_yet", 5, "replace", create=True, declared_by="a"),
    )
    registry.apply()
    assert megatron_utils.not_there_yet == 5
    registry.undo()
    assert not hasattr(megatron_utils, "not_there_yet")


def test_replacing_a_shared_value_touches_only_the_symbol(registry, importer):
    from megatron.core.transformer import multi_latent_attention as mla

    native = mla.HAVE_TE
    user = importer(native)  # True and False are the same objects everywhere
    registry.declare(
        Patch("megatron.core.transformer.multi_latent_attention:HAVE_TE", not native, "replace", declared_by="a")
    )
    registry.apply()
    assert mla.HAVE_TE is not native and user.renamed is native
    registry.undo()
    assert mla.HAVE_TE is native


def test_replacing_a_class(registry, importer):
    native = megatron_random.CheckpointWithoutOutput
    user = importer(native)
    new = type("Replacement", (), {})
    target = "megatron.core.tensor_parallel.random:CheckpointWithoutOutput"
    registry.declare(Patch(target, new, "replace", declared_by="a"))
    registry.apply()
    assert megatron_random.CheckpointWithoutOutput is new and user.renamed is new
    registry.undo()
    assert megatron_random.CheckpointWithoutOutput is native and user.renamed is native


@pytest.mark.parametrize("name", ["CheckpointWithoutOutput", "_CUDA_RNG_STATE_TRACKER"])
def test_what_is_no_function_cannot_be_wrapped(registry, name):
    native = getattr(megatron_random, name)
    registry.declare(Patch(f"megatron.core.tensor_parallel.random:{name}", print, declared_by="a"))
    with pytest.raises(PatchError, match=f"{name} is not a function"):
        registry.apply()
    assert getattr(megatron_random, name) is native


def test_changed_signature_is_refused(registry):
    def expects_other_parameters(original, forward_func, batch, *args, **kwargs):
        raise AssertionError("never called")

    target = "megatron.core.pipeline_parallel.schedules:forward_step"
    native = schedules.forward_step
    registry.declare(Patch(target, expects_other_parameters, declared_by="a"))
    with pytest.raises(PatchError) as caught:
        registry.apply()
    text = str(caught.value)
    assert target in text and "(forward_func, batch)" in text and "forward_step_func, data_iterator" in text
    assert schedules.forward_step is native


def test_parameters_named_by_a_patch_lead_those_of_upstream(applied):
    def names_the_first(original, input_tensor, output_tensor, *args, **kwargs):
        return original(input_tensor, output_tensor, *args, **kwargs)

    patch = applied("megatron.core.pipeline_parallel.schedules:backward_step", names_the_first)
    assert patch.status == "applied"


FORWARD = "megatron.core.pipeline_parallel.schedules:forward_step"
BACKWARD = "megatron.core.pipeline_parallel.schedules:backward_step"


@pytest.fixture
def upstreams(monkeypatch):
    """The entry of megatron in the table of hashes, to be changed: no file is a known one."""
    entry = copy.deepcopy(upstream.table()["megatron"])
    entry["files"] = {version: {} for version in entry["files"]}
    monkeypatch.setitem(upstream.table(), "megatron", entry)
    return entry


def test_a_changed_upstream_is_a_warning_and_a_note(upstreams, applied, caplog):
    with caplog.at_level("INFO", logger="mindspeed_mem"):
        good = applied(FORWARD)
        assert not caplog.records and good.notes == []
        upstreams["symbols"][BACKWARD] = {"0" * 12: "0.16.1"}
        bad = applied(BACKWARD)
    assert bad.status == "applied" and "upstream changed" in bad.notes[0]
    (record,) = caplog.records
    assert BACKWARD in record.getMessage() and bad.declared_by.rpartition(".")[2] in record.getMessage()


def test_a_version_that_nobody_has_looked_at_is_said_once(upstreams, applied, caplog, monkeypatch):
    upstreams["symbols"] |= {FORWARD: {"0" * 12: "0.16.1"}, BACKWARD: {"0" * 12: "0.16.1"}}
    monkeypatch.setattr(megatron.core.package_info, "__version__", "99.1+new")
    with caplog.at_level("INFO", logger="mindspeed_mem"):
        notes = applied(FORWARD).notes + applied(BACKWARD).notes
    known = ", ".join(sorted(upstreams["files"], key=upstream.parts))
    assert notes == [f"not checked: there are hashes for megatron {known}, not for 99.1"] * 2
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize("module", ["megatron.training.training", "megatron.training.arguments"])
def test_sources_of_megatron_lm_are_known_for_each_version_of_which_there_are_any(module):
    """The wheel lacks them: a table made without a checkout would call every checkout changed."""
    table = upstream.table()["megatron"]
    targets = {target: known for target, known in table["symbols"].items() if target.startswith(module + ":")}
    assert targets
    for version, files in table["files"].items():
        assert module in files, version
        for target, known in targets.items():
            assert any(version in versions.split() for versions in known.values()), (version, target)


def test_a_source_of_another_version_is_a_change(upstreams, applied):
    """Of a version in the table that version's source counts, of any other each."""
    installed = upstream.version_of("megatron")
    for source in list(upstreams["symbols"][FORWARD]):
        upstreams["symbols"][FORWARD][source] = "0.1.0"
    assert "upstream changed" in applied(FORWARD).notes[0]
    del upstreams["files"][installed]
    assert upstream.difference(FORWARD, schedules.forward_step) is None


@pytest.mark.parametrize(
    ("version", "statuses"),
    [("0.15.3", ["applied", "absent"]), ("0.17.0rc1", ["absent", "applied"]), ("0.19.2", ["absent", "applied"])],
)
def test_patches_of_one_symbol_for_different_versions(registry, monkeypatch, version, statuses):
    monkeypatch.setattr(megatron.core.package_info, "__version__", version)
    native = schedules.backward_step

    def older(original, *args, **kwargs):
        return original(*args, **kwargs)

    def newer(original, *args, **kwargs):
        return original(*args, **kwargs)

    one = registry.declare(Patch(BACKWARD, older, before="0.17", declared_by="test_patches"))
    other = registry.declare(Patch(BACKWARD, newer, since="0.17", declared_by="test_patches"))
    registry.apply(["test_patches"])
    assert [one.status, other.status] == statuses
    assert registry.originals() == {BACKWARD: native}


def test_the_version_is_known_before_the_package_is_imported():
    ask = (
        "import sys; from mindspeed_mem.patching import upstream; print(upstream.version_of('megatron'), *sys.modules)"
    )
    version, *loaded = subprocess.check_output([sys.executable, "-c", ask], text=True).split()
    assert version == upstream.version_of("megatron") and "megatron.core" not in loaded


def test_the_source_beneath_other_wrappers_counts(monkeypatch, applied, upstreams):
    native = schedules.forward_step

    @functools.wraps(native)
    def somebody_elses(*args, **kwargs):
        return native(*args, **kwargs)

    monkeypatch.setattr(schedules, "forward_step", somebody_elses)
    assert applied(FORWARD).notes == [f"on top of {__name__}"]


HASH = "68e7a55eb16e"
FORGOTTEN = "209941d8d8c3"


def plain(self, name="x"):
    """Says it."""
    if self:
        return f"a {name!r:>{len(name)}} {{b}}"
    return None


def _written_otherwise():
    # fmt: off
    def plain(
            self, name="x" ):  # a comment

        if self:
                return f"a {name!r:>{len(name)}} {{b}}"
        return None
    # fmt: on

    return plain


def _forgotten(self):
    assert self, f"one"  # noqa: F541
    f"two"  # noqa: B018, F541


def _changed():
    def plain(self, name="x"):
        if self:
            return f"a {name!r:>{len(name)}} {{c}}"
        return None

    return plain


def test_hashes_of_sources_do_not_depend_on_layout_comments_or_the_version_of_python():
    assert upstream.source_hash(plain) == HASH == upstream.source_hash(_written_otherwise())
    assert upstream.source_hash(_changed()) != HASH
    assert upstream.source_hash(_forgotten) == FORGOTTEN
    assert upstream.source_hash(len) == "unknown"


def test_patched_functions_are_pickled_and_copied_by_name(applied):
    applied("megatron.core.activations:squared_relu")
    ours = megatron.core.activations.squared_relu
    assert pickle.loads(pickle.dumps(ours)) is ours
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, activation_func=ours)
    assert copy.deepcopy(config).activation_func is ours
    assert pickle.loads(pickle.dumps(config)).activation_func is ours


def test_a_patched_class_still_makes_picklable_objects(applied, calls):
    applied("megatron.core.transformer.transformer_config:TransformerConfig.__post_init__")
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    assert len(calls) == 1
    assert copy.deepcopy(config).num_layers == pickle.loads(pickle.dumps(config)).num_layers == 2


@pytest.mark.parametrize("kind", ["around", "replace"])
@pytest.mark.parametrize("name", ["silu", "gelu"], ids=["in Python", "in C"])
def test_what_a_module_has_from_torch_is_replaced_in_torch_too(registry, monkeypatch, name, kind):
    module = types.ModuleType("made_here")
    module.copy = native = getattr(torch.nn.functional, name)
    monkeypatch.setitem(sys.modules, "made_here", module)
    ours = {"around": lambda original, input: input + 1, "replace": lambda input: input + 1}
    registry.declare(Patch("made_here:copy", ours[kind], kind))
    registry.apply()
    assert getattr(torch.nn.functional, name)(torch.zeros(1)) == 1
    registry.undo()
    assert getattr(torch.nn.functional, name) is module.copy is native
