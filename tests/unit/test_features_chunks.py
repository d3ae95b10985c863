"""Flags of chunk ZeRO that change nothing beside the others are said to."""

import contextlib

import pytest

from mindspeed_mem.features import FeatureError, check


def test_what_says_nothing_about_chunks_is_noticed():
    def notices(**given):
        return check({"device": "cpu", **given}).notices

    details = {
        "host_optimizer_step": "host",
        "chunk_host_memory_gib": 1,
        "min_chunk_size_mib": 1,
        "chunk_hidden_dim": 8,
    }
    idle = notices(chunk_zero_stage=1, placement_policy="device:1GiB", chunk_reduce_each_microbatch=True, **details)
    assert len(idle) == 6 and all("has no effect" in notice for notice in idle)
    assert notices(chunk_zero_stage=3, placement_policy="host:1GiB", chunk_reduce_each_microbatch=True, **details) == ()
    assert notices(chunk_zero_stage=1, placement_policy="auto", **details) == ()


def test_whole_gradients_can_be_saved_with_stage_1_alone():
    saving = {"device": "cpu", "save_wgrads_interval": 10}
    assert check({**saving, "chunk_zero_stage": 1}).chunk.stage == 1
    assert check({**saving}).chunk.stage == 0
    for stage in (2, "3"):
        with pytest.raises(FeatureError, match="--save-wgrads-interval.*no rank has whole gradients"):
            check({**saving, "chunk_zero_stage": stage})


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"chunk_zero_stage": 3, "bf16": True}, False),
        ({"chunk_zero_stage": 3, "fp16": True}, True),
        ({"chunk_zero_stage": 3}, True),
        ({"chunk_zero_stage": 2}, False),
        ({"chunk_zero_stage": 2, "bf16": True, "placement_policy": "host"}, True),
        ({"chunk_zero_stage": 2, "bf16": True, "placement_policy": "device:1GiB"}, False),
    ],
    ids=str,
)
def test_the_norm_of_parameters_is_logged_where_it_can_be_read(given, refused):
    asked = {"device": "cpu", "log_params_norm": True, **given}
    with pytest.raises(FeatureError, match="--log-params-norm") if refused else contextlib.nullcontext():
        check(asked)


def test_replicas_are_compared_where_they_are_whole():
    asked = {"device": "cpu", "check_weight_hash_across_dp_replicas_interval": 5}
    check({**asked, "chunk_zero_stage": 2})
    with pytest.raises(FeatureError, match="--check-weight-hash"):
        check({**asked, "chunk_zero_stage": 3})
