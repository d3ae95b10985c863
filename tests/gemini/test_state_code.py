"""Modules with state-dict code of their own: in chunks it finds and loads what it does in a plain model."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

from mindspeed_mem.gemini import GeminiAdamOptimizer, GeminiDDP
from tests.gemini_runs import ADAM, SMALL_CHUNKS, average
from tests.worlds import on_ranks

Linear = torch.nn.Linear


class Renamed(torch.nn.Module):
    """Takes checkpoints from before `new` was renamed; what they lack stays."""

    def __init__(self) -> None:
        super().__init__()
        self.new, self.later = Linear(8, 8), torch.nn.Parameter(torch.randn(8))
        self.register_load_state_dict_pre_hook(self.up)

    @staticmethod
    def up(module: Renamed, state: dict, prefix: str, *unused: Any) -> None:
        for name in [name for name in state if name.startswith(prefix + "old.")]:
            state[prefix + "new." + name.removeprefix(prefix + "old.")] = state.pop(name)
        state.setdefault(prefix + "later", 2 * module.later.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.new(x) + self.later


class Copied(Linear):
    """Its state dict has a copy of its weight, scaled by a buffer, in another type."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("scale", torch.full((1,), 4.0))
        self.register_state_dict_pre_hook(lambda module, prefix, keep: module.scale.add_(1))
        self.register_state_dict_post_hook(
            lambda module, state, prefix, meta: state.update(
                {prefix + "weight": (state[prefix + "weight"] * module.scale).half()}
            )
        )


class Packed(Linear):
    """Saved and loaded by its own methods, into the memory that it has."""

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        assert not keep_vars
        destination[prefix + "packed"] = torch.cat([self.weight.detach(), self.bias.detach()[None]])

    def _load_from_state_dict(self, state: dict, prefix: str, meta: Any, strict: bool, missing: list, *rest: Any):
        if prefix + "packed" not in state:
            missing.append(prefix + "packed")
            return
        self.weight.data.copy_(state[prefix + "packed"][:-1])
        self.bias.data = state[prefix + "packed"][-1].to(self.bias.device)


class Anew(Linear):
    """Loads new parameters and a buffer of another shape."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("seen", torch.zeros(3))

    def _load_from_state_dict(self, state: dict, prefix: str, *rest: Any) -> None:
        self.weight = torch.nn.Parameter(state[prefix + "weight"].to(self.weight.device, copy=True))
        self.seen = state[prefix + "seen"].to(self.seen.device, copy=True)
        super()._load_from_state_dict(state, prefix, *rest)


class Extra(Linear):
    def get_extra_state(self) -> Any:
        return {"times": 3, "weight": self.weight, "copy": self.bias.detach().clone()}

    def set_extra_state(self, state: Any) -> None:
        self.times = state["times"]
        with torch.no_grad():
            self.bias.mul_(2)


class Recurrent(torch.nn.GRU):
    """Notes its parameters in more than one place."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def _load_from_state_dict(self, state: dict, prefix: str, *rest: Any) -> None:
        self.weight_hh_l0 = torch.nn.Parameter(state[prefix + "weight_hh_l0"].clone())
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Tied(torch.nn.Module):
    """Saves a tied parameter once; a hook of one module reads another's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = Linear(8, 8), Linear(8, 8), torch.nn.BatchNorm1d(8)
        self.b.weight = self.a.weight
        weight = self.a.weight
        self.norm.register_state_dict_post_hook(
            lambda module, state, prefix, meta: state.update({"sum": weight.sum().detach()})
        )
        self.register_state_dict_post_hook(self.once)
        self.register_load_state_dict_post_hook(lambda module, keys: [one.clear() for one in keys] and None)

    @staticmethod
    def once(module: Tied, state: dict, prefix: str, *unused: Any) -> None:
        del state[prefix + "b.weight"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.b(self.a(x)))


class Root(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.names = Linear(8, 8), ["weight"]

    def state_dict(self, *args: Any, **more: Any) -> Any:
        return {f"root.{name}": one.clone() for name, one in super().state_dict(*args, **more).items()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        plain = {name.removeprefix("root."): one for name, one in state.items()}
        return super().load_state_dict(plain, strict, assign)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def made(kind: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    if kind == "Root":
        return Root()
    inside = {"Packed": lambda: Packed(8, 8), "Extra": lambda: Extra(8, 8)}.get(kind) or globals()[kind]
    model = torch.nn.Sequential(Linear(8, 8), inside(), torch.nn.Tanh(), Linear(8, 8))
    for name, buffer in model.named_buffers():
        if name.endswith("seen"):
            model[1].seen = torch.full((5 + seed,), float(seed))
        elif buffer.is_floating_point() and "norm" in name:
            buffer.uniform_(0.5, 1)
    return model


KINDS = ("Renamed", "Copied", "Packed", "Anew", "Extra", "Recurrent", "Tied", "Root")


def old(kind: str, state: dict) -> dict:
    """What some kinds can load besides."""
    if kind == "Renamed":
        state = {name.replace("1.new.", "1.old."): one for name, one in state.items() if name != "1.later"}
    if kind == "Tied":  # as a plain dict, so that nothing says of which version it is
        state = {name: one for name, one in state.items() if "num_batches" not in name}
    return state


def differences(found: Any, wanted: Any) -> list[str]:
    if list(found) != list(wanted):
        return [f"{list(found)} is not {list(wanted)}"]
    wrong = []
    for name, value in wanted.items():
        if isinstance(value, dict):
            wrong += [f"{name}.{one}" for one in differences(found[name], value)]
        elif isinstance(value, torch.Tensor):
            if found[name].dtype != value.dtype or not torch.equal(found[name], value.detach().cpu()):
                wrong.append(f"{name}: {found[name]} is not {value}")
        elif found[name] != value:
            wrong.append(name)
    return wrong


def trained(model: torch.nn.Module, optimizer: Any, backward: Any, device: str) -> list[float]:
    losses = []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, generator=generator).to(device)).square().mean()
        backward(loss)
        if not isinstance(optimizer, GeminiAdamOptimizer):
            for param in model.parameters():
                param.grad = average(param.grad)
        optimizer.step()
        losses.append(loss.item())
    return losses


def alike(placement: str, kinds: tuple[str, ...] = KINDS, device: str = "cpu") -> dict[str, list[str]]:
    """What differs from a plain model, by kind: when it is saved, loaded, trained on, and saved again."""
    found = {}
    for kind in kinds:
        one, other = made(kind, 1), made(kind, 2).to(device)
        options = {"mixed_precision": torch.float32, "placement_policy": placement} | SMALL_CHUNKS
        chunked = GeminiDDP(made(kind, 1), device, **options)
        state = one.state_dict()
        wrong = differences(chunked.state_dict(), state)
        chunked = GeminiDDP(made(kind, 2), device, **options)
        empty = [param.untyped_storage().nbytes() for param in chunked.parameters()]
        names = [id(param) for param in chunked.module.parameters()]
        for given in (copy.deepcopy(state), old(kind, copy.deepcopy(state))):
            told = (other.load_state_dict(given), chunked.load_state_dict(given))
            wrong += ["told"] * (told[0] != told[1])
            wrong += differences(chunked.state_dict(), other.state_dict())
        if [param.untyped_storage().nbytes() for param in chunked.parameters()] != empty:
            wrong.append("memory is left")
        if [id(param) for param in chunked.module.parameters()] != names:
            wrong.append("other parameters")
        adam = torch.optim.AdamW(other.parameters(), fused=True, **ADAM)
        optimizer = GeminiAdamOptimizer(chunked, **ADAM)
        losses = [
            trained(chunked, optimizer, optimizer.backward, device),
            trained(other, adam, torch.Tensor.backward, device),
        ]
        if losses[0] != losses[1]:
            wrong.append(f"{losses[0]} is not {losses[1]}")
        found[kind] = wrong + differences(chunked.state_dict(), other.state_dict())
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_model_in_chunks_saves_and_loads_as_a_plain_one(placement: str):
    for found in on_ranks(2, alike, placement):
        assert found == {kind: [] for kind in KINDS}


@pytest.mark.distributed
@pytest.mark.slow
def test_it_does_where_buffers_are_on_a_device_and_the_values_on_the_host():
    kinds = tuple(kind for kind in KINDS if kind != "Recurrent")  # the device that stands in has none
    for found in on_ranks(2, alike, "device", kinds, "cuda", device="cuda"):
        assert found == {kind: [] for kind in kinds}


def halves() -> tuple[bool, dict[str, Any], list[str]]:
    """A state dict between forward and backward, in another type than the masters'; on the first rank only."""
    gradients = []
    for saves in (False, True):
        model = GeminiDDP(made("Packed", 1), "cpu", mixed_precision=torch.bfloat16, **SMALL_CHUNKS)
        optimizer = GeminiAdamOptimizer(model, max_norm=1.0, **ADAM)
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        state = model.state_dict(only_rank_0=True, prefix="m.") if saves else {}
        optimizer.backward(loss)
        gradients.append(optimizer.clip_grad_norm())
    wanted = {f"m.{name}": one for name, one in made("Packed", 1).state_dict().items()}
    return gradients[0] == gradients[1], state, differences(state, wanted) if state else []


@pytest.mark.distributed
def test_a_state_dict_between_forward_and_backward():
    first, second = on_ranks(2, halves)
    assert first[0] and second[0] and first[2] == [] and first[1]["m.1.packed"].dtype is torch.float32
    assert second[1] == {}


# ---- what cannot be


class Growing(Linear):
    def _load_from_state_dict(self, state: dict, prefix: str, *rest: Any) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(9, 8))
        self.more = Linear(2, 2)
        self.seen = torch.ones(1)


class Untying(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Linear(8, 8)
        self.b = Linear(8, 8)
        self.b.weight = self.a.weight

    def _load_from_state_dict(self, *unused: Any) -> None:
        self.a.weight = torch.nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Broken(Linear):
    """Raises when something was loaded already."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_load_state_dict_post_hook(self.fail)

    @staticmethod
    def fail(*unused: Any) -> None:
        raise ArithmeticError("not today")


def wrapped(model: torch.nn.Module, **more: Any) -> GeminiDDP:
    return GeminiDDP(model, "cpu", **({"mixed_precision": torch.float32} | SMALL_CHUNKS | more))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Growing(8, 8), r"1.weight is made anew.*\(shape \(8, 8\), then \(9, 8\)\).*1 gets other modules"),
        (Untying, "1.a.weight, 1.b.weight are tied, and made anew apart"),
        (Broken, "not today"),
        (lambda: torch.nn.BatchNorm1d(8), r"size mismatch for 1.weight(.|\n)*; missing: 3.bias; unexpected: other"),
    ],
)
def test_what_does_not_fit_is_said_and_changes_nothing(make: Any, message: str):
    torch.manual_seed(1)
    model = wrapped(torch.nn.Sequential(Linear(8, 8), make(), torch.nn.BatchNorm1d(8), Linear(8, 8)))
    before, modules = model.state_dict(), list(model.module.modules())
    bad = {name: value + 1 for name, value in before.items() if name != "3.bias"} | {"other": torch.ones(1)}
    if "1.running_mean" in bad:
        bad["1.weight"] = torch.ones(9)
    with pytest.raises((RuntimeError, ArithmeticError), match=message):
        model.load_state_dict(bad)
    assert differences(model.state_dict(), before) == []
    assert list(model.module.modules()) == modules and all(len(one.weight) == 8 for one in (model.module[0],))
    optimizer = GeminiAdamOptimizer(model, **ADAM)
    optimizer.backward(model(torch.randn(4, 8)).square().mean())
    optimizer.step()
    assert model.state_dict()["0.weight"].ne(before["0.weight"]).any()


def test_what_a_hook_writes_while_a_state_dict_is_taken_is_not_kept_and_said(caplog: Any):
    model = wrapped(torch.nn.Sequential(Linear(8, 8), Linear(8, 8)))
    before = model.state_dict()

    def double(module: torch.nn.Module, *unused: Any) -> None:
        module.weight.mul_(2)
        module.bias = torch.nn.Parameter(torch.ones(8))

    handle = model.module[1].register_state_dict_pre_hook(double)
    with caplog.at_level(logging.WARNING):
        state = model.state_dict()
    assert torch.equal(state["1.weight"], 2 * before["1.weight"]) and "wrote to 1.bias, 1.weight" in caplog.text
    handle.remove()
    assert differences(model.state_dict(), before) == []


def test_hooks_of_the_wrapped_model_are_called_with_it():
    model, called = wrapped(Linear(8, 8)), []

    def noted(name: str) -> Any:
        return lambda module, *rest: called.append((name, module is model))

    handles = [
        model.register_state_dict_pre_hook(noted("before saving")),
        model.register_state_dict_post_hook(noted("after saving")),
        model.register_load_state_dict_pre_hook(noted("before loading")),
        model.register_load_state_dict_post_hook(noted("after loading")),
        model._register_state_dict_hook(
            lambda module, state, *rest: {**state, "more": copy.deepcopy(module.module.weight)}
        ),
    ]
    state = model.state_dict()
    assert torch.equal(state.pop("more"), state["weight"])
    model.load_state_dict(state)
    assert called == [(f"{when} {what}", True) for what in ("saving", "loading") for when in ("before", "after")]
    for handle in handles:
        handle.remove()
    assert differences(model.state_dict(), state) == [] and len(called) == 4
