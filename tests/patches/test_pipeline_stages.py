"""--pipeline-stages on real configurations of megatron-core, and on Megatron-LM's arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mindspeed_mem.features import FeatureError, Settings, check_configs, put_into_force
from tests.worlds import applied

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def stages(*entries):
    """--pipeline-stages in force with these numbers."""
    put_into_force(Settings(pipeline_stages=entries))
    try:
        with applied("pipeline_stages") as modules:
            sys.modules[modules[0]]._check_one_stage.cache_clear()
            yield
    finally:
        put_into_force(Settings())


def config(kind=TransformerConfig, **more):
    fields = {"num_layers": 8, "hidden_size": 8, "num_attention_heads": 2, "pipeline_dtype": torch.float32}
    return kind(**{"pipeline_model_parallel_size": 2, **fields, **more})


def counts(made):
    layout = made.pipeline_model_parallel_layout
    return [
        layout.get_num_layers_to_build(pp_rank=stage, vp_stage=None)
        for stage in range(layout.pipeline_model_parallel_size)
    ]


@pytest.mark.parametrize("kind", [TransformerConfig, MLATransformerConfig])
def test_a_configuration_gets_the_layout(kind):
    with stages(3, 5):
        made = config(kind)
        assert counts(made) == [3, 5] and made.virtual_pipeline_model_parallel_size is None
        assert str(dataclasses.replace(made).pipeline_model_parallel_layout) == "Ettt|tttttL"  # read a second time
        assert counts(config(kind, pipeline_model_parallel_layout="Ettt|tttttL")) == [3, 5]
    assert config(kind).pipeline_model_parallel_layout is None


def test_counts_for_virtual_stages_say_how_many_there_are():
    with stages(1, 2, 3, 2):
        made = config()
        assert made.virtual_pipeline_model_parallel_size == 2
        assert str(made.pipeline_model_parallel_layout) == "Et|tt|ttt|ttL"
        assert config(virtual_pipeline_model_parallel_size=2).virtual_pipeline_model_parallel_size == 2
    with stages(0, 1, 1, 2, 2, 2, 3, 3):
        made = config(virtual_pipeline_model_parallel_size=2)
        assert str(made.pipeline_model_parallel_layout) == "Et|tt|ttt|ttL"


def test_prediction_layers_stand_on_the_last_stage():
    with stages(6, 2):
        assert str(config(mtp_num_layers=1).pipeline_model_parallel_layout) == "Etttttt|ttmL"


def test_everything_wrong_is_said_at_once():
    more = {"num_layers_in_first_pipeline_stage": 3, "account_for_loss_in_pipeline_split": True}
    with stages(3, 4), pytest.raises(FeatureError) as caught:
        config(**more)
    first, second, third = caught.value.problems
    assert "cannot be combined with --decoder-first-pipeline-num-layers" in first
    assert "cannot be combined with --account-for-loss-in-pipeline-split" in second
    assert third.startswith("--pipeline-stages: got 3,4 for 8 layers on 2 pipeline stages:")


@pytest.mark.parametrize("layout", ["Etttt|ttttL", [["embedding", *["decoder"] * 4], [*["decoder"] * 4, "loss"]]])
def test_another_layout_is_refused(layout):
    with stages(3, 5), pytest.raises(FeatureError, match="combined with --pipeline-model-parallel-layout"):
        config(pipeline_model_parallel_layout=layout)


def test_virtual_stages_that_do_not_fit_are_refused(monkeypatch):
    with stages(3, 5), pytest.raises(FeatureError, match="2 numbers, must be 4"):
        config(virtual_pipeline_model_parallel_size=2)
    # Megatron's groups, where they are there already: a model would silently lose the chunks that they do not know
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 2)
    with stages(1, 2, 3, 2):
        with pytest.raises(FeatureError, match="4 numbers, must be 2"):
            config()
        monkeypatch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: 2)
        assert config().virtual_pipeline_model_parallel_size == 2
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 4)
        assert config().virtual_pipeline_model_parallel_size == 2  # these are groups of something else


@pytest.mark.parametrize(("entries", "warns"), [((3, 5), True), ((7,), True), ((8,), False), ((0,) * 8, False)])
def test_without_a_pipeline_it_has_no_effect_and_says_so_once(entries, warns, caplog):
    with stages(*entries), caplog.at_level(logging.WARNING, logger="mindspeed_mem"):
        for _ in range(2):
            made = config(pipeline_model_parallel_size=1)
            assert made.pipeline_model_parallel_layout is None
    given = ",".join(map(str, entries))
    expected = f"--pipeline-stages {given} has no effect: the pipeline has one stage"
    assert [record.getMessage() for record in caplog.records] == [expected] * warns


ARGUMENTS = """
import mindspeed_mem.megatron_adaptor
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
args = validate_args(parse_args(), {})
config = core_transformer_config_from_args(args)
print("layout", args.pipeline_model_parallel_layout, config.pipeline_model_parallel_layout,
      args.virtual_pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size)
"""
SIZES = (
    "--num-layers 8 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--eval-interval 1 --lr 1 --device cpu"
).split()


def validated(*arguments, status=0):
    """The lines that ARGUMENTS prints with these arguments on the first of four ranks, and all its output."""
    path = os.pathsep.join([str(ROOT), os.environ["MEGATRON_LM"]])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "WORLD_SIZE": "4", "RANK": "0"}
    command = [sys.executable, "-c", ARGUMENTS, *SIZES, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("layout ")], done.stdout + done.stderr


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
class TestArgumentsOfMegatronLM:
    @pytest.mark.parametrize(
        ("arguments", "layout", "virtual"),
        [
            ("--pipeline-model-parallel-size 4 --pipeline-stages 1,3,2,2", "Et|ttt|tt|ttL", None),
            ("--pipeline-model-parallel-size 2 --pipeline-stages 1,2,3,2", "Et|tt|ttt|ttL", 2),
            (
                "--pipeline-model-parallel-size 2 --pipeline-stages 0,1,1,2,2,2,3,3 "
                "--num-virtual-stages-per-pipeline-rank 2",
                "Et|tt|ttt|ttL",
                2,
            ),
            ("--pipeline-model-parallel-size 4 --num-layers 10 --pipeline-stages 2,3,3,2", "Ett|ttt|ttt|ttL", None),
        ],
    )
    def test_arguments_and_configuration_agree(self, arguments, layout, virtual):
        lines, _ = validated(*arguments.split())
        assert lines == [f"layout {layout} {layout} {virtual} {virtual}"]

    def test_a_wrong_split_ends_the_script_with_one_message(self):
        _, output = validated("--pipeline-model-parallel-size", "4", "--pipeline-stages", "1,3,2,1", status=2)
        assert "Traceback" not in output and output.count("--pipeline-stages: got 1,3,2,1 for 8 layers") == 1

    def test_another_word_on_stages_is_refused_from_the_command_line(self):
        other = "--pipeline-model-parallel-layout Etttt|ttttL --num-layers-per-virtual-pipeline-stage 1".split()
        stages = "--pipeline-model-parallel-size 2 --pipeline-stages 3,5".split()
        _, output = validated(*stages, *other, status=2)
        for flag in other[::2]:
            assert f"--pipeline-stages cannot be combined with {flag}" in output
        assert "Traceback" not in output

    def test_one_stage(self):
        lines, output = validated("--pipeline-stages", "3,5")
        assert lines == ["layout None None None None"]
        assert output.count("--pipeline-stages 3,5 has no effect") == 1


def test_a_layout_of_ours_is_no_second_word_and_another_one_is():
    flags = Settings(on=("--pipeline-stages",), pipeline_stages=(3, 5))
    with stages(3, 5):
        made = config()
        check_configs(flags, [made])
        made.pipeline_model_parallel_layout = "Et|tttttttL"
        with pytest.raises(FeatureError, match="--pipeline-model-parallel-layout"):
            check_configs(flags, [made])
