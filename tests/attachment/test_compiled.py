"""Plans on models that are compiled, as a whole or in parts: what runs as it is, is told."""

import contextlib
import copy
import logging
import subprocess
import sys

import pytest
import torch

import mindspeed_mem
from tests.attachment.plain_models import PLANS, SWAP, TEXT, Net, accumulated, results, same


def in_place(model):
    model.compile(backend="eager")
    return model


def wrapped(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("compiled", [in_place, wrapped, lambda model: torch.nn.Sequential(wrapped(model))])
def test_a_model_that_is_compiled_as_a_whole_is_told(compiled, caplog):
    model = compiled(Net())
    with mindspeed_mem.attach(model, SWAP):
        results(model, accumulated)
    assert any("with all layers, is compiled as a whole" in line for line in caplog.messages)


@pytest.mark.parametrize("compiled", [in_place, wrapped])
def test_a_model_that_is_compiled_later_is_told_once(compiled, caplog):
    said = "no forward of the model with gradients was seen: none has run, or it is compiled as a whole"
    model = Net()
    with mindspeed_mem.attach(model, SWAP) as attached:
        assert said in attached.report()  # none has run
        program, optimizer = compiled(model), torch.optim.SGD(model.parameters())
        for _ in range(4):
            accumulated(program)
            optimizer.step()
        assert sum(said in line for line in caplog.messages) == 1
        assert said in attached.report()


def test_training_a_model_that_is_seen_or_another_one_tells_nothing(caplog):
    model, other = Net(), Net()
    with mindspeed_mem.attach(model, SWAP):
        for one in (other, model):
            optimizer = torch.optim.SGD(one.parameters())
            for _ in range(3):
                accumulated(one)
                optimizer.step()
    assert "has no effect" not in caplog.text


OPERATOR = {
    "swap_config": {
        "swap": True,
        "smallest_bytes": 0,
        "op_swap": [{"op_name": "compiled", "backward_prefetch": 2, "layers": [1, 2]}],
    },
    "recompute_config": {"select_recompute": {"compiled": [0]}},
}
"""What plans call a compiled layer."""


@pytest.mark.parametrize("plan", [PLANS["swap"], PLANS["whole"], OPERATOR], ids=["swap", "whole", "operator"])
@pytest.mark.parametrize("compiled", [in_place, wrapped])
def test_compiled_layers_are_moved_and_made_again_as_a_whole(plan, compiled, caplog):
    model = Net()
    plain = copy.deepcopy(model)
    for one in (model, plain):
        for index, block in enumerate(one.blocks):
            one.blocks[index] = compiled(block)
    expected, calls = results(plain, accumulated), [vars(block).get("_compiled_call_impl") for block in model.blocks]
    names = list(model.state_dict())
    with mindspeed_mem.attach(model, plan) as attached:
        assert same(results(model, accumulated), expected)
        figures = attached.engine.report()
        assert list(model.state_dict()) == names and attached.operators[0] == ("compiled",)
    assert bool(figures.bytes_out) == (plan is not PLANS["whole"])
    assert bool(figures.recomputed_bytes) == (plan is not PLANS["swap"])
    assert [vars(block).get("_compiled_call_impl") for block in model.blocks] == calls
    assert not any("mindspeed_mem" in key for one in model.modules() for key in vars(one))
    assert "no effect" not in caplog.text


def test_what_the_compiler_works_on_keeps_no_layer_from_running_again(caplog):
    """It compiles while a layer is tried out."""
    model = Net()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with mindspeed_mem.attach(model, PLANS["whole"]) as attached:
        results(model, accumulated)
        assert "recomputed: the whole of layers 0-2" in attached.report()
    assert "no effect" not in caplog.text


@pytest.mark.parametrize("compiled", [in_place, wrapped])
def test_plans_for_what_is_in_compiled_layers_are_refused(compiled):
    model = Net()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = compiled(block)
    with pytest.raises(ValueError, match="'fc1', which matches no operator in layers 0-2; allowed: compiled"):
        mindspeed_mem.attach(model, {"recompute_config": {"select_recompute": {"fc1": True}}})


@pytest.mark.parametrize("attached", [True, False])
def test_a_compiled_module_runs_again_where_it_is_asked_to(attached):
    model = Net()
    plain = copy.deepcopy(model)
    expected = results(plain, accumulated)
    mindspeed_mem.recompute(model.blocks[1])
    model.blocks[1].compile(backend="aot_eager")
    if not attached:
        assert same(results(model, accumulated), expected)
        return
    with mindspeed_mem.attach(model, None) as found:
        assert same(results(model, accumulated), expected)
        assert "recomputed: the whole of layer 1" in found.report()


def test_layers_that_are_compiled_later_are_told_once(caplog):
    model = Net()
    with mindspeed_mem.attach(model, SWAP), caplog.at_level(logging.WARNING):
        for block in model.blocks[:2]:
            block.compile(backend="eager")
        results(model, accumulated, times=6)
    said = [line for line in caplog.messages if "the plan has no effect in layers 0-1" in line]
    assert len(said) == 1 and "compiled" in said[0]


def test_what_torch_does_not_compile_is_not_compiled_by_us():
    """Torch before 2.14 skips its own modules where they are compiled in place."""
    compilations = []
    for planned in (False, True):
        seen = []
        torch._dynamo.reset()
        model = Net()
        for block in model.blocks:
            block.norm.compile(backend=lambda program, _, seen=seen: seen.append(1) or program.forward)
            block.fc1.compile(backend=lambda program, _, seen=seen: seen.append(1) or program.forward)
        norms = {"recompute_config": {"select_recompute": {"norm": True}}}
        with mindspeed_mem.attach(model, norms) if planned else contextlib.nullcontext() as attached:
            results(model, accumulated)
            assert attached is None or attached.engine.report().recomputed_bytes
        compilations.append(len(seen))
    assert compilations[0] == compilations[1]


def test_compiled_parts_are_operators():
    model = Net()
    plain = copy.deepcopy(model)
    for one in (model, plain):
        one.blocks[0].act = torch.compile(one.blocks[0].act, backend="eager")
        one.blocks[1] = torch.compile(one.blocks[1], backend="eager")
    expected = results(plain, accumulated)
    with mindspeed_mem.attach(model, SWAP):
        assert same(results(model, accumulated), expected)


def test_compiled_layers_that_have_left_the_model_are_as_they_were():
    model = Net()
    for block in model.blocks:
        block.compile(backend="eager")
    left, call = model.blocks[2], vars(model.blocks[2])["_compiled_call_impl"]
    with mindspeed_mem.attach(model, SWAP):
        del model.blocks[2]
    assert vars(left)["_compiled_call_impl"] is call


def test_compiling_a_list_of_modules_compiles_none_of_them(caplog):
    model = Net()
    for child in model.children():
        child.compile(backend="eager")
    expected = results(copy.deepcopy(model), accumulated)
    with mindspeed_mem.attach(model, SWAP) as attached:
        assert same(results(model, accumulated), expected)
        assert attached.engine.report().bytes_out
    assert "no effect" not in caplog.text


class Wave(torch.nn.Module):
    """Not torch's own, which torch compiles nowhere in place."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x):
        return torch.sin(self.linear(torch.sin(x)))


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_whole_graphs_run_again_beside_ranks(is_wrapped, caplog):
    """Where there are ranks, second runs ask whether these have parts of the weights."""
    how = {"backend": "eager", "fullgraph": True}
    model = Net()
    for block in model.blocks:
        block.norm = Wave()
        if is_wrapped:
            block.norm = torch.compile(block.norm, **how)
        else:
            block.norm.compile(**how)
    expected = results(copy.deepcopy(model), accumulated)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with mindspeed_mem.attach(model, {"recompute_config": {"select_recompute": {"norm": True}}}) as attached:
            assert same(results(model, accumulated), expected)
            assert attached.engine.report().recomputed_bytes
    finally:
        torch.distributed.destroy_process_group()
    assert "no effect" not in caplog.text


@pytest.mark.parametrize("plan", ["whole", "mixed"])
def test_a_trace_is_of_the_model_alone(plan, caplog):
    model = Net().eval()
    with mindspeed_mem.attach(model, PLANS[plan]) as attached:
        traced = torch.jit.trace(model, (TEXT,), check_trace=False)
        assert torch.equal(traced(TEXT), model(TEXT))
        results(model, accumulated)
        assert attached.engine.report().recomputed_bytes
    assert "no effect" not in caplog.text


def test_dynamo_is_imported_after_the_package_and_imports_nothing_of_it():
    program = """
import sys, torch, mindspeed_mem
from mindspeed_mem.patching import dynamo
assert "torch._dynamo" not in sys.modules
dynamo.keep_out()
before = {name for name in sys.modules if name.startswith("mindspeed_mem")}
import torch._dynamo
assert {name for name in sys.modules if name.startswith("mindspeed_mem")} == before
assert any("saved_tensors.py" in one for one in torch._dynamo.trace_rules.SKIP_DIRS)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
