"""Layers by number and by the name of their stack: how lists are read, resolved and written."""

from __future__ import annotations

import pytest
import yaml

from mindspeed_mem.adaptive.search.plan_file import as_yaml, by_name
from mindspeed_mem.features import FeatureError, check
from mindspeed_mem.plan import MemoryConfigError, load_memory_config, resolve

STACKS = {"encoder": range(0, 2), "vision_model.decoder": range(2, 5)}
OPERATORS = dict.fromkeys(range(5), ("mlp", "mlp.linear_fc1"))


def again(config, stacks=STACKS):
    """The layers in which the MLP runs again."""
    plan = resolve(config, OPERATORS, 5, stacks=stacks)
    return [layer for layer in OPERATORS if plan.recompute(layer, "mlp") is not None]


def by_flags(**flags):
    return check({"device": "cpu", **flags}).memory


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ("encoder:0", [0]),
        ("encoder:1,vision_model.decoder:0-1", [1, 2, 3]),
        ("vision_model.decoder:0,2", [2, 4]),  # a name holds up to the next one
        ("4, encoder:0 , 1", [0, 1, 4]),
        ("encoder:all,vision_model.decoder:1", [0, 1, 3]),
        (["encoder:1", 3], [1, 3]),
    ],
)
def test_layers_in_flags(given, layers):
    assert again(by_flags(recompute_layers=given)) == layers
    assert again(by_flags(select_recompute={"mlp": given})) == layers
    if isinstance(given, str):
        assert again(by_flags(select_recompute=[f"mlp={given}"])) == layers


@pytest.mark.parametrize("given", ["encoder:", ":0", "encoder", "encoder:0-", "encoder:2-1", "0,all", "encoder:0:"])
def test_lists_that_are_none(given):
    with pytest.raises(FeatureError, match="such as encoder:0,2,decoder:all"):
        by_flags(recompute_layers=given)


@pytest.mark.parametrize("swap", [True, False])
def test_layers_in_a_file(swap):
    section = {"recompute": ["encoder:0"], "select_recompute": {"mlp": ["encoder:0-1", "vision_model.decoder:0,2"]}}
    section["select_recompute_exclude"] = {"mlp": [["vision_model.decoder:2"]]}
    file = {"swap_config": {"swap": swap, "op_swap": []}, "recompute_config": section}
    assert again(load_memory_config(file, num_layers=2)) == [0, 1, 2]


def test_entries_of_swap():
    entry = {"op_name": "mlp", "backward_prefetch": 2, "layers": ["vision_model.decoder:1", 0]}
    plan = resolve(load_memory_config({"swap_config": {"swap": True, "op_swap": entry}}), OPERATORS, 5, stacks=STACKS)
    assert [layer for layer in OPERATORS if plan.decision(layer, "mlp") is not None] == [0, 3]


@pytest.mark.parametrize("value", [[1, "encoder:0"], ["encoder"], ["encoder:x"], ["0"]])
def test_names_are_not_for_counts_and_must_have_numbers(value):
    with pytest.raises(MemoryConfigError, match=r"recompute_config.recompute\[.\]: got"):
        load_memory_config({"recompute_config": {"recompute": value}})


def test_all_problems_are_told_together():
    entries = [{"layers": ["encodr:0", "encoder:2"], "backward_prefetch": 1}]
    file = {"swap_config": {"swap": True, "layer_swap": entries}, "recompute_config": {"recompute": [7]}}
    with pytest.raises(MemoryConfigError) as error:
        resolve(load_memory_config(file), OPERATORS, 5, stacks=STACKS)
    assert error.value.problems == (
        "swap_config.layer_swap[0].layers: got the stack 'encodr'; did you mean 'encoder'? allowed: encoder (layers "
        "0-1), vision_model.decoder (layers 0-2)",
        "swap_config.layer_swap[0].layers: got layer 2 of encoder; allowed: 0 to 1, since encoder has 2 layers counted "
        "from 0",
        "recompute_config.recompute: got layer 7; allowed: 0 to 4, since the model has 5 layers counted from 0",
    )


@pytest.mark.parametrize(
    ("stacks", "why"), [({}, "no stack of this model has a name"), ({"encoder": None}, "begins at different numbers")]
)
def test_names_that_nobody_can_resolve(stacks, why):
    with pytest.raises(MemoryConfigError, match=f"--recompute-layers: got the stack 'encoder'.* {why}"):
        again(by_flags(recompute_layers="encoder:0"), stacks)


def test_a_plan_is_written_with_names_and_read_back():
    entry = {"op_name": "mlp", "backward_prefetch": 1, "layers": [0, 3, 4]}
    chosen = {r"mlp\.linear_fc1": [1, 2]}
    sections = {"swap_config": {"swap": True, "op_swap": [entry]}, "recompute_config": {"select_recompute": chosen}}
    numbers = load_memory_config(sections)
    text = as_yaml(by_name(numbers, STACKS))
    assert "['encoder:0', 'vision_model.decoder:1-2']" in text
    read = load_memory_config(yaml.safe_load(text))
    plans = [resolve(one, OPERATORS, 5, stacks=STACKS) for one in (read, numbers)]
    assert plans[0].fingerprint() == plans[1].fingerprint()
    assert by_name(numbers, {"decoder": range(5)}) is numbers
