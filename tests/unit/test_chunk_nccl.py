"""For which torch NCCL's collectives are told to leave memory to whoever waits for them."""

import pytest

from mindspeed_mem.zero.core.nccl import keep_until_waited

VARIABLE = "TORCH_NCCL_AVOID_RECORD_STREAMS"


@pytest.mark.parametrize(
    "version, told",
    [
        ("2.1.0+cu121", True),
        ("2.6.0a0+ecf3bae40a.nv25.01", True),
        ("2.7.1", True),
        ("2.7.0a0+79aa17489c.nv25.04", False),  # where it does harm
        ("2.8.0", False),  # where it is the default, and warned of
        ("2.8.0a0+5228986c39.nv25.05", False),
        ("2.13.0+cpu", False),
        ("3.0.0", False),
    ],
)
def test_memory_is_kept_until_waited_for_where_torch_does_not_do_so_itself(version, told):
    environment = {}
    keep_until_waited(environment, version)
    assert environment == ({VARIABLE: "1"} if told else {})


def test_what_the_user_has_said_stays():
    environment = {VARIABLE: "0"}
    keep_until_waited(environment, "2.6.0")
    assert environment == {VARIABLE: "0"}
