"""State dicts: complete, exact, and loaded at another number of ranks and in another placement."""

import copy
import pickle
from typing import Any

import pytest
import torch

from mindspeed_mem.gemini import HybridAdam, OptionError, ZeroOptimizer
from tests.gemini_runs import ADAM, batches, chunked, farthest, loss_of, masters, plain, reference, train
from tests.worlds import on_ranks


def test_a_plain_model_loads_it_strictly_and_back():
    model, optimizer = chunked(mixed_precision=torch.bfloat16)
    train(model, optimizer, batches(2))
    state = model.state_dict()
    other = plain(seed=9)
    other.load_state_dict(state, strict=True)
    assert state["head.weight"] is state["wte.weight"]
    assert all(value.dtype is torch.float32 for name, value in state.items() if name in masters(model))
    again, _ = chunked(plain(seed=9), placement_policy="host")
    again.load_state_dict(other.state_dict())
    assert farthest(masters(again), masters(model)) == 0
    assert model.state_dict(dtype=torch.bfloat16)["wte.weight"].dtype is torch.bfloat16


def test_what_does_not_fit_is_said_at_once_and_changes_nothing():
    model, optimizer = chunked()
    before, state = masters(model), model.state_dict()
    del state["head.weight"]  # one name of a tied parameter is enough
    assert model.load_state_dict(state).missing_keys == []
    bad = {name: value + 1 for name, value in state.items()} | {"extra": torch.ones(1)}
    del bad["norm.bias"]
    bad["norm.weight"] = torch.ones(7)
    with pytest.raises(RuntimeError, match=r"norm.weight has shape \(7,\).*missing: norm.bias; unexpected: extra"):
        model.load_state_dict(bad)
    assert farthest(masters(model), before) == 0
    bad["norm.weight"] = torch.ones(32)
    found = model.load_state_dict(bad, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["norm.bias"], ["extra"])
    with pytest.raises(OptionError, match="6 parameters|parameters, the optimizer's"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": list(range(6))}]})


def test_the_optimizers_state_is_that_of_torch():
    data = batches(2)
    model, optimizer = chunked()
    train(model, optimizer, data)
    state = optimizer.state_dict()
    wanted = plain()
    trained = [param for param in wanted.parameters() if param.requires_grad]
    adam = torch.optim.AdamW(trained, **ADAM, fused=True)
    for tokens in data[:, 0]:
        adam.zero_grad()
        loss_of(wanted, tokens).backward()
        adam.step()
    expected = adam.state_dict()
    assert sorted(state["state"]) == sorted(expected["state"])
    for number, entry in expected["state"].items():
        for key, value in entry.items():
            assert torch.equal(state["state"][number][key], value), (number, key)
    loaded, again = chunked(plain(seed=9), placement_policy="host")
    again.load_state_dict(expected)
    loaded.load_state_dict(wanted.state_dict())
    more = batches(2, seed=12)
    assert train(loaded, again, more) == train(model, optimizer, more)
    assert farthest(masters(loaded), masters(model)) == 0


def test_the_loss_scale_is_resumed_and_copies_are_refused():
    model, optimizer = chunked(mixed_precision=torch.bfloat16, adam={"initial_scale": 4.0, "growth_interval": 2})
    train(model, optimizer, batches(3))
    assert (optimizer.scaler.scale, optimizer.scaler.good_steps) == (8.0, 1)
    other, again = chunked(mixed_precision=torch.bfloat16, adam={"initial_scale": 4.0, "growth_interval": 2})
    again.load_state_dict(optimizer.state_dict())
    train(other, again, batches(1))
    assert (again.scaler.scale, other.loss_scale) == (16.0, 16.0)
    for action in (lambda: copy.deepcopy(model), lambda: pickle.dumps(model), lambda: model.to(torch.float16)):
        with pytest.raises(OptionError):
            action()


def save(path, dtype):
    """Train 2 steps, save on rank 0, train 2 more; the masters at the end."""
    model, optimizer = chunked(mixed_precision=dtype, placement_policy="device")
    train(model, optimizer, batches(2)[:, :, :1].expand(-1, -1, 2, -1))
    state = {"model": model.state_dict(only_rank_0=True), "optimizer": optimizer.state_dict(only_rank_0=True)}
    if torch.distributed.get_rank() == 0:
        torch.save(state, path)
    else:
        assert state == {"model": {}, "optimizer": {}}
    return masters(model)


def resume(path, dtype, placement):
    """Load; the masters then, and after two steps on data that is the same on all ranks."""
    model, optimizer = chunked(plain(seed=9), mixed_precision=dtype, placement_policy=placement)
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loaded = masters(model)
    same = torch.randint(0, 40, (2, 1, 2, 12), generator=torch.Generator().manual_seed(4))
    train(model, optimizer, same)
    return loaded, masters(model)


@pytest.mark.distributed
def test_resumed_at_another_number_of_ranks_and_placement(tmp_path):
    path, dtype = str(tmp_path / "state"), torch.bfloat16
    saved = on_ranks(2, save, path, dtype)[0]
    ends = []
    for ranks, placement in ((1, "host"), (2, "host"), (3, "device")):
        for loaded, end in on_ranks(ranks, resume, path, dtype, placement):
            assert farthest(loaded, saved) == 0
            ends.append(end)
    assert farthest(ends[1], ends[0]) == 0  # the mean of two equal gradients is exact
    assert farthest(ends[-1], ends[0]) < 1e-3
    assert farthest(ends[0], saved) > 1e-3


def test_groups_with_settings_of_their_own_and_a_scheduler():
    data = batches(3)
    wanted = reference(data)[1]
    model = plain()
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.0}]
    model, optimizer = chunked(model, adam={"params": groups})
    before = masters(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    train(model, optimizer, data, scheduler.step)
    after = masters(model)
    assert all(torch.equal(after[n], before[n]) == (v.dim() <= 1 or n == "unused.weight") for n, v in after.items())
    assert farthest(after, wanted) > 0


def test_a_group_can_be_added_later():
    data = batches(2)
    wanted, given = plain(), plain()
    trained = [param for param in given.parameters() if param.requires_grad]
    model, optimizer = chunked(given, adam={"params": trained[:3]})
    optimizer.add_param_group({"params": trained[3:], "lr": 1e-3})
    trained = [param for param in wanted.parameters() if param.requires_grad]
    plainly = torch.optim.AdamW([{"params": trained[:3]}, {"params": trained[3:], "lr": 1e-3}], **ADAM, fused=True)
    for step in data:
        plainly.zero_grad()
        loss_of(wanted, step[0]).backward()
        plainly.step()
    train(model, optimizer, data)
    assert farthest(masters(model), {n: p.detach() for n, p in wanted.named_parameters() if p.requires_grad}) == 0


def test_the_state_of_another_kind_of_optimizer_is_refused():
    _, optimizer = chunked()
    saved = optimizer.state_dict()
    saved["state"] = {0: {"momentum_buffer": torch.zeros(40, 32)}}
    with pytest.raises(OptionError, match="parameter 0 has no step, exp_avg, exp_avg_sq"):
        optimizer.load_state_dict(saved)


def hooked() -> tuple[list[Any], list[float]]:
    """Which hooks were called around the optimizers' state dicts, and the rates that they have set."""
    called: list[Any] = []
    model, optimizer = chunked()
    train(model, optimizer, batches(1))

    def saved(one: Any, state: Any) -> Any:
        called.append(("after saving", one is optimizer, "state" in state))
        return {**state, "more": 1}

    def loading(one: Any, state: Any) -> Any:
        called.append(("before loading", one is optimizer, state.pop("more")))
        return {**state, "param_groups": [{**group, "lr": 0.5} for group in state["param_groups"]]}

    optimizer.register_state_dict_pre_hook(lambda one: called.append(("before saving", one is optimizer)))
    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(loading)
    optimizer.register_load_state_dict_post_hook(lambda one: called.append(("after loading", one is optimizer)))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    called.append(optimizer.state_dict(only_rank_0=True).keys() >= {"more"})
    rates = [group["lr"] for group in optimizer.param_groups]
    given = HybridAdam(model.parameters())
    given.register_step_post_hook(lambda *unused: called.append("stepped"))
    given.register_state_dict_post_hook(lambda *unused: called.append("saved"))
    optimizer = ZeroOptimizer(given, model)
    train(model, optimizer, batches(1))
    optimizer.state_dict()
    return [*called, state["more"]], rates


@pytest.mark.distributed
def test_hooks_around_the_optimizers_state_dict_are_called_as_by_any_optimizer():
    wanted = [
        ("before saving", True),
        ("after saving", True, True),
        ("before loading", True, 1),
        ("after loading", True),
        ("before saving", True),
    ]
    for rank, (called, rates) in enumerate(on_ranks(2, hooked)):
        last = [("after saving", True, True), True] if rank == 0 else [False]
        assert called == [*wanted, *last, "stepped", "saved", 1] and set(rates) == {0.5}
