"""Ranks of one job that were started with other flags: said on all of them, and by those that wait for one that never
comes."""

from __future__ import annotations

import logging
import time

import pytest

from tests.worlds import on_ranks, parallel

SWAP = {"swap_config": {"swap": True, "layer_swap": [{"layers": True, "backward_prefetch": 1}]}}


def asked(settings: tuple[dict, ...]) -> str:
    """A step with what this rank has asked for: the error, or "trained"."""
    import torch.distributed as dist

    import mindspeed_mem.megatron_adaptor as mem
    from tests.models import build_gpt, train_step

    with parallel():
        try:
            mem.configure({"device": "cpu"} | settings[dist.get_rank()])
            train_step(build_gpt("dense", ddp={"use_distributed_optimizer": "chunk_zero_stage" in settings[0]}))
        except mem.FeatureError as error:
            return str(error)
        finally:
            mem.configure({})
    return "trained"


@pytest.mark.distributed
def test_flags_that_differ_are_an_error_on_every_rank():
    plan, survive = {"memory_config": SWAP}, {"survive_oom": True}
    for message in on_ranks(2, asked, (plan | survive, plan), timeout=60):
        assert "--survive-oom differs between ranks: True on rank 0; False on rank 1" in message
    for message in on_ranks(2, asked, (survive, plan | survive), timeout=60):
        assert "a memory plan (--memory-config, --recompute-layers and the like) differs between ranks" in message


@pytest.mark.distributed
def test_chunks_that_differ_are_an_error_before_the_first_step():
    """No engine runs that would compare: the ranks had waited for each other without a word."""
    chunks = {"chunk_zero_stage": 3, "use_distributed_optimizer": True}
    for message in on_ranks(2, asked, (chunks | {"chunk_zero_stage": 2}, chunks), timeout=60):
        assert "--chunk-zero-stage differs between ranks: 2 on rank 0; 3 on rank 1" in message


@pytest.mark.distributed
def test_limits_and_files_of_each_rank_may_differ():
    plan = {"memory_config": SWAP}
    assert on_ranks(2, asked, (plan, plan | {"swap_host_memory_gib": 1.0}), timeout=60) == ["trained"] * 2


def waits_for_one_that_is_late() -> list[str]:
    import torch.distributed as dist

    from mindspeed_mem import ranks

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    ranks.logger.addHandler(handler)
    patience, ranks.PATIENCE = ranks.PATIENCE, 0.2
    try:
        ranks.gather(None)
        if dist.get_rank() == 1:
            time.sleep(1.5)
        ranks.gather(None)
    finally:
        ranks.PATIENCE = patience
        ranks.logger.removeHandler(handler)
    return said


@pytest.mark.distributed
def test_whoever_waits_for_a_rank_that_does_not_come_says_so():
    waited, late = on_ranks(2, waits_for_one_that_is_late)
    (message,) = waited
    assert message.startswith("rank 0 has waited 0.2 s") and "give all ranks the same" in message
    assert not late


def test_a_rank_that_is_alone_with_what_is_wrong_says_so(monkeypatch, capsys):
    """The first rank of a machine speaks for all; where nothing is wrong there, torchrun does not end this one."""
    import mindspeed_mem.megatron_adaptor as mem

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "3")
    with pytest.raises(SystemExit):
        mem.refuse(ValueError("no such plan"))
    assert "on rank 3 alone: no such plan" in capsys.readouterr().err
