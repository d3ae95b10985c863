"""What whoever calls an operator sets for as long as it runs, as ms-swift's layers do with Megatron's rotary embedding
and peft with hooks, is there when the operator runs again, and nowhere else."""

import collections
import contextlib
import dataclasses
import enum
import functools
import gc
import math
import sys
import types
import weakref
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional

import mindspeed_mem
from tests.attachment.plain_models import TEXT, same

THIS = sys.modules[__name__]
PLANS = {
    "part": {"recompute_config": {"select_recompute": {"part": True}}},
    "whole": {"recompute_config": {"recompute": True}},
}
factor, factors, table = 1.0, [1.0], {"factor": 1.0}
options = types.SimpleNamespace(deep=types.SimpleNamespace(factor=1.0))
package = types.ModuleType("package")
package.inside = types.ModuleType("package.inside")
package.inside.turned = torch.sin


in_order, own = collections.OrderedDict(factor=1.0), type("Own", (dict,), {})(factor=1.0)
counts = collections.Counter(factor=1.0)


@dataclasses.dataclass(slots=True, frozen=True)
class Fixed:
    factor: float = 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    factor: float = 1.0
    fixed: Fixed = Fixed()


class Shadowing(Slotted):
    __slots__ = ("factor",)


slotted, shadowing = Slotted(), Shadowing()


class Wave(enum.Enum):
    SINE, COSINE = 1, 2


def turned(x):
    return x.sin()


def turned_in_a_package(part, x):
    return package.inside.turned(x)


class Part(nn.Module):
    factor = 1.0

    def __init__(self, read):
        super().__init__()
        self.linear, self.empty, self.read = nn.Linear(8, 8), nn.Identity(), read
        self.bent, self.tensor = torch.sin, torch.ones(())
        self.config = types.SimpleNamespace(factor=1.0, zero=0.0, wave=Wave.SINE, shape=torch.Size((1,)))

    def turned(self, x):
        return x.sin()

    def forward(self, x):
        return self.read(self, self.linear(x))


def other(scale):
    """Made anew for each call."""
    return lambda *given: (given[-1] * scale).cos()


@contextlib.contextmanager
def hooked(module, scale, hook=None):
    handle = module.register_forward_pre_hook(hook or (lambda _, given: (given[0] * scale,)))
    try:
        yield
    finally:
        handle.remove()


class Scaling:
    def __init__(self, *given):
        self.of, self.scale = given

    def hook(self, _, given):
        return (given[0] * self.scale,)


WAYS = {
    "function": (lambda part, x: turned(x), lambda part, scale: patch.object(THIS, "turned", other(scale))),
    "function by its module": (
        lambda part, x: THIS.turned(x),
        lambda part, scale: patch.object(THIS, "turned", other(scale)),
    ),
    "function in a package": (
        turned_in_a_package,
        lambda part, scale: patch.object(package.inside, "turned", other(scale)),
    ),
    "torch's function": (
        lambda part, x: functional.softsign(x),
        lambda part, scale: patch.object(functional, "softsign", other(scale)),
    ),
    "method": (lambda part, x: part.turned(x), lambda part, scale: patch.object(Part, "turned", other(scale))),
    "function of a module": (
        lambda part, x: part.bent(x),
        lambda part, scale: patch.object(part, "bent", other(scale)),
    ),
    "number": (lambda part, x: (x * factor).sin(), lambda part, scale: patch.object(THIS, "factor", scale)),
    "list": (lambda part, x: (x * factors[0]).sin(), lambda part, scale: patch.object(THIS, "factors", [scale])),
    "what a list has": (lambda part, x: (x * factors[0]).sin(), lambda part, scale: in_place(factors, scale)),
    "dictionary": (lambda part, x: (x * table["factor"]).sin(), lambda part, scale: patch.dict(table, factor=scale)),
    "dictionary with an order": (
        lambda part, x: (x * in_order["factor"]).sin(),
        lambda part, scale: patch.dict(in_order, factor=scale),
    ),
    "counter": (
        lambda part, x: (x * counts["factor"]).sin(),
        lambda part, scale: patch.dict(counts, factor=scale),
    ),
    "dictionary of a class of its own": (
        lambda part, x: (x * own["factor"]).sin(),
        lambda part, scale: patch.dict(own, factor=scale),
    ),
    "slot": (lambda part, x: (x * slotted.factor).sin(), lambda part, scale: patch.object(slotted, "factor", scale)),
    "slot of the same name as a base's": (
        lambda part, x: (x * shadowing.factor).sin(),
        lambda part, scale: patch.object(shadowing, "factor", scale),
    ),
    "object in a slot": (
        lambda part, x: (x * slotted.fixed.factor).sin(),
        lambda part, scale: patch.object(slotted, "fixed", Fixed(scale)),
    ),
    "tensor": (
        lambda part, x: (x * part.tensor).sin(),
        lambda part, scale: patch.object(part, "tensor", torch.tensor(scale)),
    ),
    "class": (lambda part, x: (x * part.factor).sin(), lambda part, scale: patch.object(Part, "factor", scale)),
    "configuration": (
        lambda part, x: (x * part.config.factor).sin(),
        lambda part, scale: patch.object(part.config, "factor", scale),
    ),
    "one of an enumeration": (
        lambda part, x: x.sin() if part.config.wave is Wave.SINE else x.cos(),
        lambda part, scale: patch.object(part.config, "wave", Wave.COSINE),
    ),
    "shape": (
        lambda part, x: (x * part.config.shape[0]).sin(),
        lambda part, scale: patch.object(part.config, "shape", torch.Size((round(4 * scale),))),
    ),
    "object in another": (
        lambda part, x: (x * options.deep.factor).sin(),
        lambda part, scale: patch.object(options, "deep", types.SimpleNamespace(factor=scale)),
    ),
    "sign of zero": (
        lambda part, x: (x * math.copysign(2.0, part.config.zero)).cos(),  # whose gradient has the sign
        lambda part, scale: patch.object(part.config, "zero", -0.0),
    ),
    "hook of an object": (
        lambda part, x: part.empty(x).sin(),
        lambda part, scale: hooked(part.empty, scale, Scaling(part, scale).hook),
    ),
    "hook with room for more": (
        lambda part, x: part.empty(x).sin(),
        lambda part, scale: hooked(part.empty, scale, lambda _, given, *more, to={}: (given[0] * scale, *more)),
    ),
    "hook": (lambda part, x: part.empty(x).sin(), lambda part, scale: hooked(part.empty, scale)),
}


@contextlib.contextmanager
def in_place(values, scale):
    before = values[:]
    values[0] = scale
    try:
        yield
    finally:
        values[:] = before


def all_that_is_set(model):
    """Which objects there are, and their values."""
    part = model.blocks[0].part
    alike = (
        turned,
        package.inside.turned,
        functional.softsign,
        Part.turned,
        part.bent,
        part.tensor,
        factors,
        options.deep,
        slotted.fixed,
    )
    hooks = [len(block.part.empty._forward_pre_hooks) for block in model.blocks]
    numbers = factor, *factors, table["factor"], *in_order.values(), *own.values(), slotted.factor, slotted.fixed.factor
    return [
        *map(id, alike),
        *numbers,
        Part.factor,
        *vars(part.config).values(),
        *hooks,
        *counts.values(),
        shadowing.factor,
    ]


class Block(nn.Module):
    def __init__(self, way, scale):
        super().__init__()
        read, self.around = WAYS[way]
        self.part, self.scale = Part(read), scale

    def forward(self, x):
        with self.around(self.part, self.scale) if self.scale else contextlib.nullcontext():
            x = x + self.part(x)
        return x * x


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.blocks = nn.ModuleList(Block(way, scale) for scale in (0.5, 0.0, 2.0))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def trained(way, plan, before_each_step=lambda step, model: None):
    """Three steps, of two forwards before their backward; bytes that were recomputed; what is left of the model."""
    torch.manual_seed(3)
    model, found, recomputed = Model(way), [], 0
    then = all_that_is_set(model)
    attached = mindspeed_mem.attach(model, plan) if plan else None
    for step in range(3):
        before_each_step(step, model)
        losses = [model(torch.randn(4, 8)).mean() for _ in range(2)]
        sum(losses).backward()
        found += [*(loss.detach() for loss in losses), *(one.grad.clone() for one in model.parameters())]
        assert all_that_is_set(model) == then
    if attached is not None:
        recomputed = attached.engine.report().recomputed_bytes
        attached.detach()
    alive = weakref.ref(model)
    del model, attached, losses
    gc.collect()
    return found, recomputed, alive()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", WAYS)
def test_a_second_run_finds_it(way, plan, caplog):
    plain, *_ = trained(way, None)
    found, recomputed, model = trained(way, PLANS[plan])
    assert same(found, plain)
    assert recomputed and "no effect" not in caplog.text and model is None


@pytest.mark.parametrize("way", ["number", "function", "hook"])
def test_it_may_be_set_later_only(way):
    def warm_up(step, model):
        for block in model.blocks:
            block.scale = 0.5 * step

    assert same(trained(way, PLANS["part"], warm_up)[0], trained(way, None, warm_up)[0])


class Slots:
    __slots__ = ("to", "__weakref__")

    def __init__(self, to):
        self.to = to

    def __call__(self, *given):
        self.to.append(given[-1])


def with_an_attribute(to):
    def hook(*given):
        hook.to.append(given[-1])

    hook.to = to
    return hook


class Outer(nn.Module):
    def __init__(self, to):
        super().__init__()
        self.inner = nn.Identity()
        self.inner.to = to

    def __call__(self, *given):
        self.inner.to.append(given[-1])


def holding(collects):
    return lambda *given: collects(*given)


def in_c(to):
    kept = functools.lru_cache(lambda: to)
    return lambda *given: kept().append(given[-1])


HOOKS = {
    "default": lambda to: lambda *given, to=to: to.append(given[-1]),
    "object with slots": Slots,
    "held object with slots": lambda to: holding(Slots(to)),
    "attribute": with_an_attribute,
    "module in a module": Outer,
    "wrapper in C": in_c,
}


def holding_much():
    much = [[object() for _ in range(8)] for _ in range(250)]
    return lambda *given: much and None


@pytest.mark.parametrize(
    "whose, made, after",
    [("part", "default", 0), *(("part.empty", made, 0) for made in HOOKS), ("part.empty", "default", 5)],
)
def test_hooks_that_collect_what_modules_return_keep_nothing_without_a_backward(whose, made, after):
    """Also after others that hold many objects."""

    class Collected(list):
        pass

    model, collected = Model("hook"), []
    for block in model.blocks:
        for _ in range(after):
            block.get_submodule(whose).register_forward_hook(holding_much())
    with mindspeed_mem.attach(model, PLANS["part"]) as attached:
        for step in range(5):
            outputs = Collected()
            collected.append(weakref.ref(outputs))
            modules = [block.get_submodule(whose) for block in model.blocks]
            handles = [one.register_forward_hook(HOOKS[made](outputs)) for one in modules]
            loss = model(torch.randn(4, 8)).mean()
            for handle in handles:
                handle.remove()
            if step < 2:
                loss.backward()
        assert attached.engine.report().recomputed_bytes
        del loss, outputs, handles, handle
        gc.collect()
        assert [one() for one in collected] == [None] * 5


class Collector:
    def __init__(self, to):
        self.to = to

    def __call__(self, x):
        self.to.append(x.sin())
        return self.to[-1]


@pytest.mark.parametrize("made", [Collector, lambda to: Collector(to).__call__, lambda to: lambda x: Collector(to)(x)])
def test_functions_that_collect_what_they_return_keep_nothing_without_a_backward(made):
    class Collected(list):
        pass

    model, collected = Model("function of a module"), []
    for block in model.blocks:
        block.scale = 0.0
    with mindspeed_mem.attach(model, PLANS["part"]) as attached:
        for step in range(4):
            outputs = Collected()
            collected.append(weakref.ref(outputs))
            with contextlib.ExitStack() as around:
                for block in model.blocks:
                    around.enter_context(patch.object(block.part, "bent", made(outputs)))
                loss = model(torch.randn(4, 8)).mean()
            if step < 1:
                loss.backward()
        assert attached.engine.report().recomputed_bytes
        del loss, outputs
        gc.collect()
        assert [one() for one in collected] == [None] * 4


def test_peft_sets_where_its_adapters_begin_by_hooks():
    """In a model whose adapters begin at certain tokens (aLoRA), only hooks tell its layers in which place."""
    hf, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

    def trained(plan):
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
        model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=31, num_hidden_layers=2, **shape))
        begins = {"alora_invocation_tokens": TEXT[0, 3:5].tolist(), "init_lora_weights": False}
        model = peft.get_peft_model(model, peft.LoraConfig("CAUSAL_LM", target_modules=["q_proj", "v_proj"], **begins))
        attached = mindspeed_mem.attach(model, plan) if plan else None
        loss = model(TEXT, labels=TEXT, use_cache=False).loss
        loss.backward()
        recomputed = attached.engine.report().recomputed_bytes if attached is not None else 0
        if attached is not None:
            attached.detach()
        return [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)], recomputed

    (plain, _), (found, recomputed) = trained(None), trained({"recompute_config": {"recompute": True}})
    assert recomputed and same(found, plain)
