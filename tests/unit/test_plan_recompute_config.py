"""Reading `recompute_config`, and the flags that stand for its keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_mem.plan import MemoryConfig, MemoryConfigError, RecomputeRule, StageCounts, load_memory_config

OFF = {"recompute": False, "select_recompute": None, "select_comm_recompute": [], "select_recompute_exclude": {}}
KEYS = ("recompute", "select_recompute", "select_comm_recompute")
EXCLUDES = ("select_recompute_exclude", "select_comm_recompute_exclude")


def read(section, swap=True, **kwargs):
    return load_memory_config({"swap_config": {"swap": swap}, "recompute_config": section}, **kwargs)


def rules(section, swap=True):
    return [(rule.pattern, rule.layers) for rule in read(section, swap).recompute.rules]


def problems_of(section, swap=True, **kwargs):
    with pytest.raises(MemoryConfigError) as caught:
        read(section, swap, **kwargs)
    return list(caught.value.problems)


@pytest.mark.parametrize("swap", [False, True])
def test_recompute_that_is_off_is_accepted(swap):
    section = OFF | {"select_comm_recompute_exclude": {r"a\.b": False}, "mp_comm_recompute": False}
    config = read(section, swap)
    assert config.notices == () and config.recompute == MemoryConfig().recompute and not config.recompute.active


def test_zero_is_off_where_numbers_are_counts_and_a_layer_where_they_name_layers():
    for off in ({"recompute": [0, 0]}, {"recompute": 0}, {"select_recompute": {"mlp": [[0], [0]]}}):
        assert not read(off, swap=False).recompute.active
    assert rules({"recompute": [0]}) == [(None, (0,))]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"recompute": True}, [(None, True)]),
        ({"recompute": [2, 0]}, [(None, (2, 0))]),
        ({"recompute": [[2], (0, 1)]}, [(None, (2, 0, 1))]),
        ({"select_recompute": {"feed_forward": [0, 3]}}, [("feed_forward", (0, 3))]),
        ({"select_recompute": {"a": True, "b": False, "c": None, "d": [1]}}, [("a", True), ("d", (1,))]),
        ({"select_recompute": [r"a\.b", "c"]}, [(r"a\.b", True), ("c", True)]),
        ({"select_recompute": "mlp"}, [("mlp", True)]),
        ({"select_comm_recompute": True}, [(r".*\.norm", True)]),
        ({"select_comm_recompute": [0, 2]}, [(r".*\.norm", (0, 2))]),
    ],
)
def test_shapes_with_swap(section, expected):
    assert rules(section) == expected
    assert read(section).recompute.active


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"recompute": True}, [(None, True)]),
        ({"recompute": [True, 1, False]}, [(None, StageCounts(((True, 1, 0),), nested=False))]),
        ({"recompute": [[2, True], False]}, [(None, StageCounts(((2, True), False), nested=True))]),
        ({"select_comm_recompute": [2, 0]}, [(r".*\.norm", StageCounts(((2, 0),), nested=False))]),
        ({"recompute": [2, 1]}, [(None, StageCounts(((2, 1),), nested=False))]),
        ({"recompute": [[2, 1], [0, 1]]}, [(None, StageCounts(((2, 1), (0, 1)), nested=True))]),
        ({"select_recompute": ["a", "b"]}, [("a", True), ("b", True)]),
        ({"select_recompute": {"a": True, "b": (1, 0)}}, [("a", True), ("b", StageCounts(((1, 0),), nested=False))]),
    ],
)
def test_shapes_without_swap(section, expected):
    assert rules(section, swap=False) == expected


def test_a_rule_says_what_it_is_about_and_where_it_stands():
    section = {
        "recompute": [1],
        "select_recompute": {r"mlp\.linear_fc1": True},
        "select_comm_recompute": ["norm"],
        "select_recompute_exclude": ["core"],
    }
    config = read(section).recompute
    entry = r"recompute_config.select_recompute.mlp\.linear_fc1"
    assert config.rules[1] == RecomputeRule(kind="operator", pattern=r"mlp\.linear_fc1", layers=True, entry=entry)
    assert [rule.kind for rule in config.rules] == ["layer", "operator", "communication"]
    assert [rule.entry for rule in config.excludes] == ["recompute_config.select_recompute_exclude.core"]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [3, 1.5, "a(", {"a": "all"}, {"a(": True}, [[[1]]], [1, [2]], [-1], [True], ["a", 1]])
def test_wrong_values(key, value, swap):
    if value == ([1, [2]] if swap else [True]):
        return  # with swap lists of lists are flattened, as `layers` is elsewhere; without, True is a whole stage
    for problem in problems_of({key: value}, swap):
        assert problem.startswith(f"recompute_config.{key}") and ": got " in problem and "; allowed: " in problem


def test_layer_indices_without_swap_are_told_apart():
    (problem,) = problems_of({"select_recompute": {"mlp": 3}}, swap=False)
    assert "layer indices only where swap_config.swap is True" in problem


def test_layers_are_range_checked_if_their_number_is_known():
    assert problems_of({"recompute": [4], "select_recompute": {"mlp": [0, 7]}}, num_layers=4) == [
        "recompute_config.recompute: got layer 4; allowed: 0 to 3, since the model has 4 layers counted from 0",
        "recompute_config.select_recompute.mlp: got layer 7; "
        "allowed: 0 to 3, since the model has 4 layers counted from 0",
    ]


@pytest.mark.parametrize("of", ["select_recompute", "select_comm_recompute"])
def test_excluding_everything_takes_out_one_kind_only(of):
    config = read({"recompute": [0], "select_recompute": True, "select_comm_recompute": ["a"], f"{of}_exclude": True})
    kinds = {rule.kind for rule in config.recompute.rules}
    assert kinds == {"layer", "communication" if of == "select_recompute" else "operator"}
    (notice,) = config.notices
    assert f"recompute_config.{of}" in notice and f"{of}_exclude is True" in notice


@pytest.mark.parametrize("key", EXCLUDES)
def test_excluding_layers_without_naming_an_operator_takes_nothing_out(key):
    config = read({"recompute": [1], key: [1, 0]}, swap=False)
    assert config.recompute.excludes == () and len(config.recompute.rules) == 1
    assert config.notices == (f"recompute_config.{key} has no effect: got [1, 0], which names no operator to take out",)


@pytest.mark.parametrize("value", [True, {"a": True}, ["a"]])
@pytest.mark.parametrize("key", EXCLUDES)
def test_excluding_from_nothing_gives_one_notice(key, value):
    config = read({key: value})
    assert len(config.notices) == 1 and key in config.notices[0] and not config.recompute.active


def test_no_section_for_swap_is_worth_a_notice_only_if_nothing_is_recomputed():
    assert len(load_memory_config({"recompute_config": {}}).notices) == 1
    assert load_memory_config({"recompute_config": {"recompute": True}}).notices == ()
    swap = {"swap": True, "swap_recompute_inputs": True}
    assert load_memory_config({"swap_config": swap, "recompute_config": {"recompute": [0]}}).notices == ()


def test_flags_name_layers_with_swap_or_without():
    flags = {"recompute": ("--recompute-layers", (0, 3)), "select_recompute": ("--select-recompute", {"mlp": [1]})}
    for source in (None, {"swap_config": {"swap": False}}, {"swap_config": {"swap": True}}):
        config = load_memory_config(source, flags=flags).recompute
        assert [(r.pattern, r.layers, r.entry) for r in config.rules] == [
            (None, (0, 3), "--recompute-layers"),
            ("mlp", (1,), "--select-recompute mlp"),
        ]


def test_flags_and_the_file_are_merged_key_by_key():
    flags = {"recompute": ("--recompute-layers", True)}
    config = read({"recompute": False, "select_recompute": ["mlp"]}, flags=flags).recompute
    assert [rule.entry for rule in config.rules] == ["--recompute-layers", "recompute_config.select_recompute.mlp"]
    (problem,) = problems_of({"recompute": [1]}, flags=flags)
    assert problem.startswith("recompute_config.recompute: got [1], and --recompute-layers is given as well")
    with pytest.raises(MemoryConfigError, match="--recompute-layers: got layer 9"):
        load_memory_config(None, num_layers=4, flags={"recompute": ("--recompute-layers", (9,))})


def test_a_section_that_contains_itself(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("recompute_config: &self {recompute: &list [*list], select_recompute: *self}\n")
    with pytest.raises(MemoryConfigError) as caught:
        load_memory_config(file)
    assert all(line.startswith("recompute_config.") for line in caught.value.problems)


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.sampled_from(["mlp", "a(", ""]) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["mlp", "x("]), inner, max_size=2),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from((*KEYS, *EXCLUDES)), junk), st.booleans())
def test_anything_is_read_or_refused(section, swap):
    try:
        config = read(section, swap, num_layers=4).recompute
    except MemoryConfigError as error:
        assert all(problem.startswith("recompute_config.") for problem in error.problems)
    else:
        for rule in (*config.rules, *config.excludes):
            assert rule.layers is True or isinstance(rule.layers, tuple if swap else StageCounts)
        assert all(rule.pattern for rule in config.excludes)
