"""Flags of chunk ZeRO that change nothing beside the others are said to."""

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
