"""Reading and checking the memory configuration."""

import copy
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_mem.plan import LayerSwap, MemoryConfig, MemoryConfigError, OpSwap, load_memory_config

ENTRY = {"op_name": "attention", "backward_prefetch": 2, "layers": [0]}


def problems_of(content, **kwargs):
    with pytest.raises(MemoryConfigError) as caught:
        load_memory_config(content, **kwargs)
    assert str(caught.value).splitlines()[1:] == [f"  {line}" for line in caught.value.problems]
    return list(caught.value.problems)


def only_problem(swap=None, **kwargs):
    (problem,) = problems_of({"swap_config": swap} if swap is not None else kwargs)
    return problem


def op_swap(**changes):
    return {"swap": True, "op_swap": [ENTRY | changes]}


def test_everything_is_off_by_default():
    for source in (None, {}, {"swap_config": None}, {"swap_config": {}}, {"recompute_config": None}):
        config = load_memory_config(source)
        assert config.swap == MemoryConfig().swap
        assert config.swap.swap is False and config.swap.layer_swap is None and config.swap.op_swap is None


def test_entries_are_typed():
    config = load_memory_config(
        {
            "swap_config": {
                "swap": True,
                "activations": "both",
                "layer_swap": [{"backward_prefetch": 20, "layers": [0, 3]}],
                "op_swap": [ENTRY | {"op_name": ["attention", r"feed_forward\.w1"], "activations": "saved"}],
            }
        }
    )
    assert config.swap.layer_swap == (
        LayerSwap(layers=(0, 3), backward_prefetch=20, activations="both", entry="swap_config.layer_swap[0]"),
    )
    assert config.swap.op_swap == (
        OpSwap(
            op_name=("attention", r"feed_forward\.w1"),
            layers=(0,),
            backward_prefetch=2,
            activations="saved",
            entry="swap_config.op_swap[0]",
        ),
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.swap.swap = False


def test_one_mapping_instead_of_a_list():
    swap = {"swap": True, "op_swap": ENTRY, "layer_swap": {"backward_prefetch": 1, "layers": True}}
    config = load_memory_config({"swap_config": swap}).swap
    assert [entry.entry for entry in (*config.op_swap, *config.layer_swap)] == [
        "swap_config.op_swap",
        "swap_config.layer_swap",
    ]
    assert only_problem({"swap": True, "op_swap": ENTRY | {"layers": 3}}).startswith(
        "swap_config.op_swap.layers: got 3"
    )


@pytest.mark.parametrize(
    ("given_layers", "layers"),
    [
        (True, True),
        ([2], (2,)),
        ((3, 1), (3, 1)),
        ([[0, 1], [5]], (0, 1, 5)),
        (((4,),), (4,)),
        ([1, 1], (1,)),
        ([], ()),
    ],
)
def test_accepted_layers(given_layers, layers):
    (entry,) = load_memory_config({"swap_config": op_swap(layers=given_layers)}).swap.op_swap
    assert entry.layers == layers


@pytest.mark.parametrize("layers", [3, 3.0, None, "0", {0}, {"0": 1}])
def test_rejected_layers(layers):
    assert only_problem(op_swap(layers=layers)).startswith("swap_config.op_swap[0].layers: got ")


@pytest.mark.parametrize(
    ("layers", "where"),
    [([3.0], "[0]"), ([0, True], "[1]"), ([[0], ["1"]], "[1][0]"), ([-1], "[0]"), ([[[0]]], "[0][0]"), ([None], "[0]")],
)
def test_rejected_layer(layers, where):
    assert only_problem(op_swap(layers=layers)).startswith(f"swap_config.op_swap[0].layers{where}: got ")


@pytest.mark.parametrize("key", ["layer_swap", "op_swap"])
def test_an_entry_for_no_layers_is_off(key):
    entry = {"layers": False, "backward_prefetch": 2} | ({"op_name": "mlp"} if key == "op_swap" else {})
    off = load_memory_config({"swap_config": {"swap": True, key: [entry, entry | {"layers": [1]}]}})
    assert [found.layers for found in getattr(off.swap, key)] == [(1,)] and off.notices == ()
    assert getattr(load_memory_config({"swap_config": {"swap": True, key: entry}}).swap, key) == ()


def test_prefetch_may_be_left_to_the_engine():
    assert only_problem(op_swap(backward_prefetch="auto")).endswith("allowed: an integer of at least 1, or Auto")
    auto = {"swap": True, "default_prefetch": "Auto"}
    assert load_memory_config({"swap_config": auto}).swap.default_prefetch == "Auto"
    (entry,) = load_memory_config({"swap_config": op_swap(backward_prefetch="Auto")}).swap.op_swap
    assert entry.backward_prefetch == "Auto"


def test_names_of_models_built_like_megatrons():
    entries = [{"layers": True, "backward_prefetch": 2}]
    config = load_memory_config({"swap_config": {"cpu_offloading": True, "cpu_offloading_num_layers": entries}})
    (entry,) = config.swap.layer_swap
    assert config.swap.swap and entry.layers is True
    assert entry.entry == "swap_config.cpu_offloading_num_layers[0]"
    off = load_memory_config({"swap_config": {"cpu_offloading": False, "cpu_offloading_num_layers": entries}})
    assert off.notices == (
        "swap_config.cpu_offloading_num_layers has no effect, since swap_config.cpu_offloading is not True",
    )
    assert only_problem({"cpu_offloading_num_layers": 4}).startswith("swap_config.cpu_offloading_num_layers: got 4")
    assert only_problem({"swap": True, "cpu_offloading": True}) == (
        "swap_config.cpu_offloading: got True, and swap is given; allowed: one of the two"
    )


def test_layers_are_range_checked_if_their_number_is_known():
    content = {"swap_config": op_swap(layers=[0, 3, 4, 5, 9])}
    assert load_memory_config(content)
    assert problems_of(content, num_layers=4) == [
        "swap_config.op_swap[0].layers: got layers 4-5, 9; allowed: 0 to 3, since the model has 4 layers counted from 0"
    ]


@pytest.mark.parametrize("value", [True, False, 0, -3, 1.0, "2", None, [2]])
def test_rejected_distance(value):
    assert only_problem(op_swap(backward_prefetch=value)).startswith("swap_config.op_swap[0].backward_prefetch: got ")
    assert only_problem({"default_prefetch": value}).startswith("swap_config.default_prefetch: got ")


@pytest.mark.parametrize("value", [None, 3, [], [3], ["attention", None], "", r"attention\.", "a("])
def test_rejected_names(value):
    assert only_problem(op_swap(op_name=value)).startswith("swap_config.op_swap[0].op_name")


@pytest.mark.parametrize("key", ["swap", "swap_recompute_inputs"])
@pytest.mark.parametrize("value", [0, 1, "True", None, []])
def test_bools_are_strict(key, value):
    assert only_problem({key: value}).startswith(f"swap_config.{key}: got ")


def test_activations_are_one_of_three():
    assert only_problem({"activations": "save"}) == (
        "swap_config.activations: got 'save' (str); allowed: produced, saved, both (did you mean 'saved'?)"
    )
    assert only_problem(op_swap(activations=True)).startswith("swap_config.op_swap[0].activations: got True")


@pytest.mark.parametrize("value", [3, "attention", True])
@pytest.mark.parametrize("key", ["layer_swap", "op_swap"])
def test_entries_are_mappings(key, value):
    assert only_problem({key: value}).startswith(f"swap_config.{key}: got ")
    assert only_problem({key: [value]}).startswith(f"swap_config.{key}[0]: got ")


def test_missing_keys():
    assert problems_of({"swap_config": {"op_swap": {}}}) == [
        f"swap_config.op_swap.{key}: missing; swap_config.op_swap needs op_name, backward_prefetch, layers"
        for key in ("op_name", "backward_prefetch", "layers")
    ]


def test_unknown_keys_are_errors_with_a_suggestion():
    assert "did you mean 'layer_swap'?" in only_problem({"layer_swaps": None})
    assert "did you mean 'swap_config'?" in only_problem(swap_confg={})
    assert only_problem(colour=1) == "colour: unknown section; allowed: swap_config, recompute_config"
    assert "belongs below swap_config" in only_problem(op_swap=[])
    assert "belongs below recompute_config" in only_problem(select_recompute=[])
    misspelled = {key: value for key, value in ENTRY.items() if key != "layers"} | {"layer": [0]}
    assert "did you mean 'layers'?" in only_problem({"op_swap": [misspelled]})  # one mistake, one line


def test_entries_for_one_operator_add_up():
    entries = [ENTRY, ENTRY | {"backward_prefetch": 5, "layers": [1]}]
    assert len(load_memory_config({"swap_config": {"swap": True, "op_swap": entries}}).swap.op_swap) == 2


@pytest.mark.parametrize("key", ["layer_swap", "op_swap"])
def test_all_layers_need_one_distance(key):
    entry = ENTRY if key == "op_swap" else {"backward_prefetch": 2, "layers": [0]}
    everywhere = entry | {"layers": True, "backward_prefetch": 7}
    for index, entries in enumerate(([entry, everywhere], [everywhere, entry])):
        (problem,) = problems_of({"swap_config": {"swap": True, key: entries}})
        assert problem.startswith(f"swap_config.{key}[{index}].backward_prefetch: got 2; allowed: 7")
        assert f"swap_config.{key}[{1 - index}]" in problem
    assert load_memory_config({"swap_config": {"swap": True, key: [entry, everywhere | {"backward_prefetch": 2}]}})


def test_all_layers_of_one_operator_leave_others_alone():
    entries = [ENTRY | {"layers": True}, ENTRY | {"op_name": "feed_forward", "backward_prefetch": 9}]
    assert load_memory_config({"swap_config": {"swap": True, "op_swap": entries}})
    shared = [ENTRY | {"layers": True}, ENTRY | {"op_name": ["feed_forward", "attention"], "backward_prefetch": 9}]
    assert "'attention'" in only_problem({"swap": True, "op_swap": shared})


def test_mistakes_are_reported_with_swap_off_too():
    assert only_problem({"swap": False, "op_swap": [ENTRY | {"backward_prefetch": 0}]})


@pytest.mark.parametrize(
    "swap",
    [
        {"swap": False, "op_swap": [ENTRY]},
        {"layer_swap": {"backward_prefetch": 1, "layers": [0]}},
        {"swap": True, "op_swap": [ENTRY], "default_prefetch": 3},
        {"swap": True, "op_swap": []},
        {"swap": True, "op_swap": [ENTRY | {"layers": []}]},
        {"swap": True, "swap_recompute_inputs": True},
    ],
)
def test_what_has_no_effect_gives_one_notice(swap):
    assert len(load_memory_config({"swap_config": swap}).notices) == 1


@pytest.mark.parametrize("swap", [{"swap": False}, {"swap": True}, op_swap(), {"swap": True, "default_prefetch": 3}])
def test_what_has_effect_gives_none(swap):
    assert load_memory_config({"swap_config": swap}).notices == ()


def test_keys_that_only_mindspore_needs():
    recompute = {"mp_comm_recompute": True, "parallel_optimizer_comm_recompute": True}
    (notice,) = load_memory_config({"swap_config": {}, "recompute_config": recompute}).notices
    assert "mp_comm_recompute" in notice and "parallel_optimizer_comm_recompute" in notice
    assert only_problem(recompute_config={"mp_comm_recompute": "yes"})
    assert "did you mean 'mp_comm_recompute'?" in only_problem(recompute_config={"mp_com_recompute": True})


def test_other_sections_of_a_mindformers_file_are_ignored():
    content = {"swap_config": {"swap": True}, "context": {}, "model": {}, "pet_config": {}, "something_new": 1}
    (notice,) = load_memory_config(content).notices
    assert "MindFormers" in notice and all(key in notice for key in ("context", "model", "pet_config", "something_new"))
    assert only_problem(context={}, swap_confg={}).startswith(
        "swap_confg: unknown section; did you mean 'swap_config'?"
    )


@pytest.mark.parametrize("content", ["", "- 1", "swap", "3"])
def test_file_without_a_mapping(tmp_path, content):
    file = tmp_path / "plan.yaml"
    file.write_text(content)
    (problem,) = problems_of(file)
    assert problem.startswith(f"{file}: got ") and "swap_config" in problem


@pytest.mark.parametrize(
    "content", [b"swap_config: [1", b"a: 1\n b: 2", b"\xff\xfe\x00", b"swap_config: !!python/tuple [1]"]
)
def test_file_that_is_not_yaml(tmp_path, content):
    file = tmp_path / "plan.yaml"
    file.write_bytes(content)
    (problem,) = problems_of(str(file))
    assert problem.startswith(f"{file}: is not YAML (") and "\n" not in problem


def test_file_that_cannot_be_read(tmp_path):
    (problem,) = problems_of(tmp_path / "absent.yaml")
    assert "absent.yaml: cannot be read (No such file or directory)" in problem
    assert "cannot be read" in problems_of(tmp_path)[0]


@pytest.mark.parametrize("source", [3, [1], b"swap_config: {}", True])
def test_source_of_the_wrong_type(source):
    assert "allowed: a mapping" in problems_of(source)[0]


def test_keys_given_twice(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(
        "other: {a: 1, a: 2}\n"
        "defaults: &d {swap: True}\n"
        "context: {}\n"
        "swap_config:\n  <<: *d\n  swap: False\n  op_swap: null\n  op_swap: null\n"
        "swap_config: {}\n"
    )
    assert [line.partition(":")[0] for line in problems_of(file)] == ["swap_config.op_swap", "swap_config"]
    assert "line 8" in problems_of(file)[0]
    file.write_text("context: {a: 1, a: 2}\nswap_config:\n  <<: {swap: True}\n  swap: False\n")
    assert load_memory_config(file).swap.swap is False


def test_file_that_contains_itself(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("swap_config: &self {swap: *self, op_swap: &list [*list]}\n")
    assert [line.partition(":")[0] for line in problems_of(file)] == ["swap_config.swap", "swap_config.op_swap[0]"]


numbers = st.integers(min_value=0, max_value=99)


@pytest.mark.parametrize("content", ["swap_config: " + "[" * 1500 + "]" * 1500, "{a: " * 1500])
def test_file_nested_too_deeply(tmp_path, content):
    file = tmp_path / "plan.yaml"
    file.write_text(content)
    (problem,) = problems_of(file)
    assert problem.startswith(f"{file}: nested too deeply to be read; ")


def test_aliases_are_looked_at_once(tmp_path):
    """Forty levels of two aliases each are a million million nodes to whoever follows all of them."""
    levels = "".join(f"  - &a{n + 1} [*a{n}, *a{n}]\n" for n in range(40))
    file = tmp_path / "plan.yaml"
    file.write_text(f"swap_config:\n  layer_swap:\n  - &a0 [x]\n{levels}")
    assert len(problems_of(file)) == 41


@pytest.mark.parametrize(
    ("entry", "where"),
    [
        ("backward_prefetch: 0x" + "f" * 5000 + ", layers: True", "backward_prefetch"),
        ("backward_prefetch: 1, layers: [0x" + "f" * 5000 + "]", "layers[0]"),
        ("backward_prefetch: 1, layers: ['encoder:" + "9" * 5000 + "']", "layers[0]"),
    ],
)
def test_numbers_that_python_does_not_print(tmp_path, entry, where):
    file = tmp_path / "plan.yaml"
    file.write_text(f"swap_config: {{swap: True, layer_swap: [{{{entry}}}]}}")
    (problem,) = problems_of(file)
    assert problem.startswith(f"swap_config.layer_swap[0].{where}: got ")


@given(st.lists(st.lists(numbers)))
def test_lists_of_layers_are_flattened(nested):
    flat = [number for part in nested for number in part]
    (entry,) = load_memory_config({"swap_config": op_swap(layers=nested)}).swap.op_swap
    (same,) = load_memory_config({"swap_config": op_swap(layers=tuple(flat))}).swap.op_swap
    assert entry.layers == same.layers
    assert set(entry.layers) == set(flat) and len(entry.layers) == len(set(flat))


GOOD = {
    "swap_config": {
        "swap": True,
        "default_prefetch": 1,
        "activations": "both",
        "swap_recompute_inputs": False,
        "layer_swap": [{"backward_prefetch": 3, "layers": [0, 1]}],
        "op_swap": [ENTRY, ENTRY | {"op_name": ["mlp"], "layers": True}],
    },
    "recompute_config": {"recompute": False, "select_recompute": {"mlp": True}},
}
MISTAKES = [
    (("swap_config", "swap"), "yes"),
    (("swap_config", "default_prefetch"), True),
    (("swap_config", "activations"), "some"),
    (("swap_config", "swap_recompute_inputs"), 1),
    (("swap_config", "unheard_of"), 1),
    (("swap_config", "layer_swap", 0, "backward_prefetch"), 0),
    (("swap_config", "layer_swap", 0, "layers"), [0, 8]),
    (("swap_config", "op_swap", 0, "op_name"), "a("),
    (("swap_config", "op_swap", 0, "layers"), "all"),
    (("swap_config", "op_swap", 1, "op_name"), [3]),
    (("swap_config", "op_swap", 1, "activations"), None),
    (("recompute_config", "recompute"), "all"),
    (("recompute_config", "select_recompute", "mlp"), [0.5]),
    (("recompute_config", "select_comm_recompute"), 3),
    (("recompute_config", "select_recompute_exclude"), "a("),
    (("recompute_config", "mp_comm_recompute"), "no"),
    (("swap_config", "window_bytes"), -1),
    (("recompute_config", "recomputes"), 1),
    (("colour",), "red"),
]


@given(st.lists(st.sampled_from(range(len(MISTAKES))), unique=True))
def test_independent_mistakes_give_one_line_each(chosen):
    content = copy.deepcopy(GOOD)
    for index in chosen:
        (*path, last), value = MISTAKES[index]
        place = content
        for key in path:
            place = place[key]
        place[last] = value
    if not chosen:
        assert load_memory_config(content, num_layers=4).swap.swap
        return
    problems = problems_of(content, num_layers=4)
    assert len(problems) == len(chosen)
    for index in chosen:
        path = MISTAKES[index][0]
        where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)[1:]
        assert sum(line.startswith(f"{where}: ") or line.startswith(f"{where}[") for line in problems) == 1


@pytest.mark.parametrize("section", [{"recompute": [0]}, {"select_recompute": {"mlp": [0]}}])
def test_counts_of_zero_are_no_silent_mistake(section):
    """Whoever writes [0] may mean layer 0, which it is only with swap."""
    notices = load_memory_config({"recompute_config": section}).notices
    assert any("counts 0 layers" in line and "swap_config.swap is True" in line for line in notices), notices
    with_swap = load_memory_config({"swap_config": {"swap": True}, "recompute_config": section})
    assert with_swap.recompute.active and not any("counts 0" in line for line in with_swap.notices)
