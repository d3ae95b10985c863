"""The table of operators, from storages that a made-up step kept."""

from mindspeed_mem.plan import both_names
from mindspeed_mem.report.ops_table import format_operators

MIB = 2**20
OPERATORS = ["input_layernorm", "self_attention.linear_qkv", "self_attention.core_attention", "mlp.linear_fc1", "idle"]


def storage(layer, op, size, *saved_by):
    return {"layer": layer, "op": op, "bytes": int(size * MIB), "saved_by": list(saved_by)}


def layer_of(number):
    """What one layer keeps: a norm's output for two, an attention output that only the next operator needs."""
    return [
        storage(number, "input_layernorm", 1, (number, "input_layernorm"), (number, "self_attention.linear_qkv")),
        storage(number, "self_attention.linear_qkv", 3, (number, "self_attention.core_attention")),
        storage(number, "mlp.linear_fc1", 0.5, (number + 1, "input_layernorm")),
    ]


def table(storages, layers, classes=()):
    text = format_operators(
        storages, dict.fromkeys(layers, OPERATORS), dict(classes), lambda operator: both_names(operator)[1]
    )
    return text.split("\n\n")[1:]  # without the legend


def cells(part):
    return {line.split()[0]: line.split()[1:] for line in part.splitlines()[2:]}


def test_each_storage_counts_once_for_its_producer_and_once_for_each_saver():
    (part,) = table(layer_of(0), [0])
    assert part.splitlines()[0] == "layer 0: layer, 4.50 MiB produced"
    rows = cells(part)
    shared = "itself, self_attention.linear_qkv".split()
    assert rows["input_layernorm"] == ["attention_norm", "1.00", "1.00*", *shared]
    assert rows["self_attention.linear_qkv"][-3:] == ["3.00", "1.00*", "self_attention.core_attention"]
    assert rows["self_attention.core_attention"] == ["attention.flash_attention", "0.00", "3.00"]
    assert rows["mlp.linear_fc1"][-5:] == ["0.50", "0.00", "layer", "+1", "input_layernorm"]
    assert rows["idle"] == ["0.00", "0.00"]


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


def test_what_comes_from_outside_is_named_apart():
    *_, outside = table([*layer_of(0), storage(-1, "", 2, (0, "input_layernorm"), (-1, ""))], [0])
    assert outside == "from outside the layers (embedding, previous stage): 2.00 MiB, for input_layernorm"
