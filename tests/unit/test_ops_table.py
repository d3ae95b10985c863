"""The table of operators, from storages that a made-up step kept."""

import re

from mindspeed_mem.plan import llama_names
from mindspeed_mem.report.ops_table import format_operators

MIB = 2**20
OPERATORS = ["input_layernorm", "self_attention", "self_attention.linear_qkv", "self_attention.core_attention"]
OPERATORS += ["mlp.linear_fc1", "idle"]


def storage(layer, op, size, *saved_by):
    return {"layer": layer, "op": op, "bytes": int(size * MIB), "saved_by": list(saved_by)}


def choice(op, frees, flops, forward, layer=0):
    return {"layer": layer, "op": op, "frees": int(frees * MIB), "flops": flops, "forward": forward}


def layer_of(number):
    """What one layer keeps: a norm's output for two, an attention output that only the next operator needs."""
    return [
        storage(number, "input_layernorm", 1, (number, "input_layernorm"), (number, "self_attention.linear_qkv")),
        storage(number, "self_attention.linear_qkv", 3, (number, "self_attention.core_attention")),
        storage(number, "mlp.linear_fc1", 0.5, (number + 1, "input_layernorm")),
    ]


def table(storages, layers, classes=(), choices=()):
    text = format_operators(storages, dict.fromkeys(layers, OPERATORS), dict(classes), llama_names, choices)
    assert max(map(len, text.splitlines())) <= 130
    return text.split("\n\n")[1:]  # without the legend


def cells(part):
    return {line.split()[0]: line.split()[1:] for line in part.splitlines()[2:]}


def test_each_storage_counts_once_for_its_producer_and_once_for_each_saver():
    (part,) = table(layer_of(0), [0])
    assert part.splitlines()[0] == "layer 0: layer, 4.50 MiB produced"
    rows = cells(part)
    shared = "itself, self_attention.linear_qkv".split()
    assert rows["input_layernorm"] == ["attention_norm", "1.00", "1.00*", "-", "-", *shared]
    assert rows[".linear_qkv"] == [".wq|wk|wv|w_qkv|w", "3.00", "1.00*", "-", "-", ".core_attention"]
    assert rows[".core_attention"] == [".flash_attention", "0.00", "3.00", "-", "-"]
    assert rows["mlp.linear_fc1"][1:] == ["0.50", "0.00", "-", "-", "layer", "+1", "input_layernorm"]
    assert rows["idle"] == ["0.00", "0.00", "-", "-"]


def test_a_module_stands_for_all_below_it():
    (part,) = table(layer_of(0), [0])
    assert cells(part)["self_attention"] == ["attention", "3.00", "4.00*", "-", "-"]
    lines = part.splitlines()
    assert lines[3].startswith("  self_attention  ") or lines[4].startswith("  self_attention  ")
    assert "    .linear_qkv" in part and "  .wq|wk" in part


def test_what_recompute_frees_and_costs():
    choices = [choice("", 4, 900, 1000), choice("self_attention", 3, 251, 400), choice("input_layernorm", 1, 0, 0)]
    choices += [choice("self_attention.linear_qkv", -1, 200, 200), choice("self_attention.core_attention", 0, 0, 9)]
    choices += [choice("mlp.linear_fc1", 0.5, 3, 100), choice("input_layernorm", 9, 9, 9, layer=1)]
    (part,) = table(layer_of(0), [0], choices=choices)
    assert part.splitlines()[0] == "layer 0: layer, 4.50 MiB produced, forward 0.0 MFLOP"
    found = {row[0]: row for row in (re.split(" {2,}", line.strip()) for line in part.splitlines()[2:])}
    assert found["(the whole layer)"][-2:] == ["4.00", "90 %"]
    assert found["self_attention"][-2:] == ["3.00", "25 %"]
    assert found["input_layernorm"][-3:-1] == ["1.00", "0 %"]
    assert found[".linear_qkv"][-3:-1] == ["-", "-"]
    assert found[".core_attention"][-2:] == ["-", "-"]
    assert found["mlp.linear_fc1"][-3:-1] == ["0.50", "<1 %"]
    assert list(found)[:4] == ["(the whole layer)", "self_attention", ".linear_qkv", ".core_attention"]  # as they ran


def test_layers_that_are_alike_share_a_table_unless_their_classes_differ():
    storages = [one for number in (0, 1, 2, 5) for one in layer_of(number)[:2]]
    parts = table(storages, [0, 1, 2, 5], {0: "Dense", 1: "Dense", 2: "MoE", 5: "Dense"})
    heads = [part.splitlines()[0] for part in parts]
    assert heads == [
        "layers 0-1, 5: Dense, 4.00 MiB produced, each of these 3 layers",
        "layer 2: MoE, 4.00 MiB produced",
    ]


def test_layers_of_other_sizes_have_tables_of_their_own():
    parts = table([*layer_of(0), storage(1, "mlp.linear_fc1", 8, (1, "mlp.linear_fc1"))], [0, 1])
    assert [part.splitlines()[0].partition(",")[0] for part in parts] == ["layer 0: layer", "layer 1: layer"]


def test_many_that_need_a_storage_are_counted():
    experts = [f"operator_{number}_of_many" for number in range(8)]
    (part,) = table([storage(0, "idle", 1, *((0, expert) for expert in experts))], [0])
    assert cells(part)["idle"][-4:] == [experts[0], "and", "7", "more"]


def test_what_comes_from_outside_is_named_apart():
    *_, outside = table([*layer_of(0), storage(-1, "", 2, (0, "input_layernorm"), (-1, ""))], [0])
    assert outside == "from outside the layers (embedding, previous stage): 2.00 MiB, for input_layernorm"
