"""Flags of chunk ZeRO that change nothing beside the others are said to."""

from mindspeed_mem.features import check


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
