"""--pipeline-stages in the table of features: how it is read, and Megatron's own layout beside it."""

import argparse

import pytest

from mindspeed_mem.features import FeatureError, add_arguments, check, scan

ASKED = {"pipeline_stages": "3,5", "device": "cpu"}


def problems_of(args):
    with pytest.raises(FeatureError) as caught:
        check(args)
    return caught.value.problems


def test_it_switches_on_its_patch_and_nothing_else():
    parser = add_arguments(argparse.ArgumentParser())
    arguments = ["--device", "cpu", "--pipeline-stages", "3,5"]
    settings = check(scan(arguments))
    assert settings == check(parser.parse_args(arguments)) == check(ASKED)
    assert settings.on == ("--device", "--pipeline-stages") and settings.patches == ("cpu_*", "pipeline_stages")
    assert settings.memory is None and settings.pipeline_stages == (3, 5)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (" 3, 5", (3, 5)),
        ([3, 5], (3, 5)),
        ((3, 5), (3, 5)),
        (["3", "5"], (3, 5)),
        ("0,0,1", (0, 0, 1)),
        ("8", (8,)),
        (8, (8,)),
        (0, (0,)),
        (None, None),
    ],
)
def test_values(value, expected):
    assert check({**ASKED, "pipeline_stages": value}).pipeline_stages == expected


@pytest.mark.parametrize(
    "value", ["3,,5", "3,5,", "3,-5", "3-5", "all", "", "\u0663", [], [3, True], [3, 2.5], True, {}]
)
def test_bad_values(value):
    (problem,) = problems_of({**ASKED, "pipeline_stages": value})
    allowed = "whole numbers from 0 with commas between them, such as 3,5,5,3"
    assert problem == f"--pipeline-stages: got {value!r}; allowed: {allowed}"


def test_its_parser_says_the_same(capsys):
    with pytest.raises(SystemExit):
        add_arguments(argparse.ArgumentParser()).parse_args(["--pipeline-stages", "3,x"])
    assert "argument --pipeline-stages: got '3,x'; allowed: whole numbers from 0 with commas" in capsys.readouterr().err


def test_a_misspelt_key():
    (problem,) = problems_of({"pipeline_stage": "3,5"})
    assert problem == "'pipeline_stage' is not a setting; did you mean 'pipeline_stages'?"


def test_megatrons_layout_is_refused_beside_it_unless_it_is_the_same():
    """Its patch writes one into Megatron-LM's arguments, which are checked again after that."""
    for layout in ("Ettt|tttttL", "Ettt|tttttmL"):
        check({**ASKED, "pipeline_model_parallel_layout": layout})
        check({**ASKED, "pipeline_stages": [0] * 3 + [1] * 5, "pipeline_model_parallel_layout": layout})
    for layout in ("Etttt|ttttL", "E(t|)*3L", ["E", "L"]):
        (problem,) = problems_of({**ASKED, "pipeline_model_parallel_layout": layout})
        assert "--pipeline-stages cannot be combined with --pipeline-model-parallel-layout" in problem
    (problem,) = problems_of({**ASKED, "pipeline_stages": "x", "pipeline_model_parallel_layout": "E|L"})
    assert "got 'x'" in problem


def test_every_other_word_on_stages_is_refused_at_once():
    others = (
        "--decoder-first-pipeline-num-layers 3 --pipeline-model-parallel-layout Etttt|ttttL "
        "--account-for-embedding-in-pipeline-split --num-layers-per-virtual-pipeline-stage 2"
    )
    assert len(problems_of(scan(["--pipeline-stages", "3,5", "--device=cpu", *others.split()]))) == 4


@pytest.mark.parametrize("pattern", ["--hybrid-override-pattern", "--hybrid-layer-pattern"])
def test_patterns_of_hybrid_models_are_refused(pattern):
    """Newer Megatron-LM knows a hybrid model by its pattern alone, and would complain of a layout that nobody gave."""
    (problem,) = problems_of(scan(["--pipeline-stages", "3,5", "--device=cpu", pattern, "M*-M*-M*"]))
    assert f"--pipeline-stages cannot be combined with {pattern}" in problem
