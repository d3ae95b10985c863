"""An operator that does not repeat itself is not recomputed: gradients and what it counts stay those without recompute.

Each model is a real GPT whose second layer's MLP does something more; steps are compared bit for bit, from the first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.numerics.test_recompute import EACH
from tests.swap_runs import again
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed

WHOLE, MLP = again(recompute=True), again(["mlp"])
GLOBAL = {"runs": 0}
count = 0


class Noise:
    """An object that a module holds, with a state that no module knows."""

    def __init__(self):
        self.generator, self.python = torch.Generator().manual_seed(7), random.Random(7)

    def __call__(self, x):
        return x * torch.rand(x.shape, generator=self.generator) * self.python.random()


class Means:
    """Somebody who collects what passes, and starts anew after each step."""

    def __init__(self):
        self.found = []

    def hook(self, module, args, result):
        self.found.append(float(args[0].detach().mean()))

    def taken(self):
        found, self.found = self.found, []
        return found


class Class:
    """Counts and collects in itself."""

    runs, seen, sums = 0, [], {"values": torch.zeros(1)}

    @staticmethod
    def count(x):
        Class.runs += 1
        Class.seen.append(float(x.detach().mean()))
        Class.sums["values"][0] += x.detach().mean()


class Kind(type):
    """Of classes that count as empty, and whose attributes nobody may set."""

    def __len__(cls):
        return 0

    def __setattr__(cls, key, value):
        raise AttributeError(f"{key} is not to be set")


class Strict(metaclass=Kind):
    """Counts in itself all the same, from nothing on after each step."""

    @property
    def __module__(self):
        return "of an object"

    @classmethod
    def count(cls):
        type.__setattr__(cls, "runs", vars(cls).get("runs", 0) + 1)

    @classmethod
    def taken(cls):
        if runs := vars(cls).get("runs", 0):
            type.__delattr__(cls, "runs")
        return runs


class NotReady:
    __slots__ = ()

    def __getattr__(self, name):
        raise RuntimeError("not ready")


def collecting(found: list) -> Callable:
    return lambda module, args, result: found.append(float(args[0].detach().mean()))


def global_counter(mlp, x):
    global count
    count += 1
    GLOBAL["runs"] += 1
    return x * (1 + 0.01 * count) * (1 + 0.001 * GLOBAL["runs"])


def class_counter(mlp, x):
    Class.runs += 1
    return x * (1 + 0.01 * Class.runs)


def counter(mlp, x):
    mlp.runs += 1
    return x * (1 + 0.01 * mlp.runs)


def statistics_used(mlp, x):
    mlp.mean.mul_(0.9).add_(0.1 * x.detach().mean())
    return x * (1 + mlp.mean)


def statistics_replaced(mlp, x):
    mlp.mean = 0.9 * mlp.mean + x.detach().mean()
    return x * (1 + mlp.mean)


def numpys_random(mlp, x):
    import numpy

    return x * numpy.random.rand() * mlp.numpys.random()


BREAKS: dict[str, tuple[Callable, str]] = {
    "noise": (lambda mlp, x: mlp.noise(x), "noise"),
    "python": (lambda mlp, x: x * random.random(), "Python's random"),
    "numpy": (numpys_random, "numpy's random"),
    "counter": (counter, "MLP"),
    "global counter": (global_counter, "GLOBAL"),
    "statistics": (statistics_used, "mean"),
    "replaced": (statistics_replaced, "MLP"),
    "class counter": (class_counter, "Class"),
}


def gradients_inside(mlp, x):
    y = x.detach().requires_grad_()
    [inner] = torch.autograd.grad(y.sin().sum(), [y])
    return x * inner


def statistics_kept(mlp, x):
    mlp.mean.mul_(0.9).add_(0.1 * x.detach().mean())
    mlp.runs += 1
    mlp.seen.append(float(x.detach().mean()))
    mlp.last = x.detach().mean()
    mlp.load += mlp.runs
    type(mlp).runs_of_all += 1
    Class.count(x)
    Strict.count()
    random.random()
    return x * 1.5


def late(mlp, x):
    """The trial sees nothing of it."""
    mlp.runs += 1
    return x * (1 + 0.1 * max(0, mlp.runs - 2))


def late_by_its_class(mlp, x):
    Class.runs += 1
    return x * (1 + 0.1 * max(0, Class.runs - 2))


def two_steps(plan: dict[str, Any], change: Callable, depth: int = 2) -> tuple[list, dict, list[str]]:
    """Results of two steps, the state that they leave, and what was said."""
    import numpy

    from tests.models import build_gpt, train_step
    from tests.swap_runs import listening, swap

    global count
    count = GLOBAL["runs"] = 0
    random.seed(3)
    numpy.random.seed(3)
    with parallel(), listening() as said, swap(plan):
        chunks = build_gpt("dropout", layers=2)
        mlp = chunks[0].module.decoder.layers[1].mlp
        Class.runs, Class.seen, Class.sums, type(mlp).runs_of_all = 0, [], {"values": torch.zeros(1)}, 0
        mlp.runs, mlp.noise, mlp.numpys, mlp.seen = 0, Noise(), numpy.random.default_rng(1), []
        mlp.last, mlp.load = torch.zeros(()), numpy.zeros(2)
        mlp.means, mlp.others, mlp.lazy = Means(), [[], []], NotReady()
        with torch.inference_mode():
            mlp.one = torch.ones(())
        mlp.register_buffer("mean", torch.zeros(()))
        function = mlp.activation_func
        first = mlp.linear_fc1.forward

        def changed(x):
            hidden, bias = first(x)
            return change(mlp, hidden), bias

        mlp.linear_fc1.forward = changed
        mlp.linear_fc2.register_forward_hook(mlp.means.hook)
        for found, module in zip(mlp.others, (mlp.linear_fc1, mlp.linear_fc2), strict=True):
            module.register_forward_hook(collecting(found))
        results, means = [], []
        for step in range(2):
            results.append(train_step(chunks, step=step, micro_batches=2))
            means.append((mlp.means.taken(), Strict.taken()))
        state = {
            "means": means,
            "others": mlp.others,
            "load": mlp.load.tolist(),
            "runs": mlp.runs,
            "mean": float(mlp.mean),
            "seen": mlp.seen,
            "last": float(mlp.last),
            "globals": (count, dict(GLOBAL)),
            "classes": (Class.runs, Class.seen, float(Class.sums["values"]), type(mlp).runs_of_all),
            "python": random.getstate(),
            "numpy": str(numpy.random.get_state()),
            "torch": torch.get_rng_state().tolist(),
        }
        assert mlp.activation_func is function
        del type(mlp).runs_of_all
        return results, state, said


def compared(changes: dict[str, Callable], plans: dict[str, dict]) -> dict[str, Any]:
    from tests.swap_runs import difference

    found = {}
    for name, change in changes.items():
        without, state, _ = two_steps({"swap_config": {"swap": False}}, change)
        for plan, given in plans.items():
            results, after, said = two_steps(given, change)
            wrong = [what for one, other in zip(results, without, strict=True) for what in difference(one, other)]
            wrong += [key for key in state if state[key] != after[key]]
            found[name, plan] = wrong, said
    return found


def of_breaks() -> dict[str, Any]:
    found = compared({name: change for name, (change, _) in BREAKS.items()}, {"mlp": MLP})
    return found | compared({"noise": BREAKS["noise"][0]}, {"whole": WHOLE})


def test_what_draws_by_itself_counts_or_reads_what_it_changes_is_kept_and_named():
    [found] = on_ranks(1, of_breaks)
    for (name, plan), (wrong, said) in found.items():
        assert wrong == [], (name, plan)
        about = [line for line in said if "recompute has no effect on mlp in layer 1: run again" in line]
        assert len(about) == 1, (name, plan, said)
        assert BREAKS[name][1] in about[0]
        assert len(said) == (1 if plan == "mlp" else 2), said
        assert not any("layer 0" in line for line in said)


def of_statistics() -> dict[str, Any]:
    plans = {"whole": WHOLE, "mlp": MLP, "each": again(EACH)}
    return compared({"kept": statistics_kept}, plans) | compared(
        {"late": late, "late by its class": late_by_its_class}, {"mlp": MLP}
    )


def test_what_a_second_run_changes_besides_is_put_back():
    """Statistics that are only kept count once, also where a program puts others in their place; what depends on them
    later only is as it was in the first run. The operator is recomputed."""
    [found] = on_ranks(1, of_statistics)
    for (_, plan), (wrong, said) in found.items():
        assert (wrong, [line for line in said if "no effect" in line]) == ([], []), plan


def of_inline_code() -> tuple[list[str], list[str]]:
    """An activation function that draws from a generator of its own, under a tape."""
    from tests.models import build_gpt, train_step
    from tests.swap_runs import difference, listening, swap

    def run(plan: dict[str, Any]) -> tuple[list, list[str]]:
        with parallel(), listening() as said, swap(plan):
            chunks, noise = build_gpt("dense", layers=2), torch.Generator().manual_seed(7)
            mlp = chunks[0].module.decoder.layers[1].mlp
            mlp.activation_func = lambda x: x * torch.rand(x.shape, generator=noise).exp() * x.sigmoid()
            return [train_step(chunks, step=step, micro_batches=2) for step in range(2)], said

    without, _ = run({"swap_config": {"swap": False}})
    results, said = run(again([r"mlp\.activation_func"]))
    return [what for one, other in zip(results, without, strict=True) for what in difference(one, other)], said


def test_inline_code_with_a_generator_of_its_own_is_kept_and_named():
    [(wrong, said)] = on_ranks(1, of_inline_code)
    assert wrong == []
    assert [line for line in said if "activation_func in layer 1: it draws from a torch.Generator of its own" in line]


def of_gradients() -> dict[str, Any]:
    return compared({"inside": gradients_inside}, {"whole": WHOLE, "mlp": MLP})


def test_what_computes_gradients_in_its_forward_is_kept_and_named():
    [found] = on_ranks(1, of_gradients)
    for (_, plan), (wrong, said) in found.items():
        assert wrong == [], plan
        assert "recompute has no effect on mlp in layer 1: it computes gradients within its forward" in said


def with_flags(plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Forward in evaluation mode but for one module; all are in training mode by backward."""
    from tests.models import build_gpt, global_parameters
    from tests.swap_runs import one_forward, swap

    with parallel(), swap(plan) as engine:
        chunks = build_gpt("dropout", layers=2)
        chunks[0].zero_grad_buffer()
        chunks[0].eval()
        chunks[0].module.decoder.layers[1].self_attention.core_attention.train()
        loss = one_forward(engine, chunks)
        chunks[0].train()
        loss.sum().backward()
        assert all(module.training for module in chunks[0].modules())
        return {name: parameter.main_grad.clone() for name, parameter in global_parameters(chunks)}


def of_flags() -> list[bool]:
    without = with_flags({"swap_config": {"swap": False}})
    found = [with_flags(plan) for plan in (WHOLE, again(EACH))]
    return [torch.equal(grads[name], without[name]) for grads in found for name in without]


def test_a_second_run_has_the_training_flags_of_the_first():
    [found] = on_ranks(1, of_flags)
    assert all(found)


def masked(plan: dict[str, Any]) -> tuple[Any, list[str]]:
    from tests.models import build_gpt, train_step
    from tests.swap_runs import listening, swap

    with parallel(), listening() as said, swap(plan):
        chunks = build_gpt("dropout", layers=2)
        return [train_step(chunks, step=step, micro_batches=2, attention_mask=True) for step in range(2)], said


def of_masks() -> tuple[list[str], list[str]]:
    from tests.swap_runs import difference

    without, _ = masked({"swap_config": {"swap": False}})
    results, said = masked(again([r"self_attention\.core_attention\.scale_mask_softmax"]))
    return [what for one, other in zip(results, without, strict=True) for what in difference(one, other)], said


def test_what_writes_to_its_input_is_kept_and_named():
    [(wrong, said)] = on_ranks(1, of_masks)
    assert wrong == []
    [line] = said
    assert "core_attention.scale_mask_softmax in layers 0-1: it changes its input in place" in line


def one_that_knows_itself():
    """A weak reference to a module that has been recomputed: all that it changes leads back to it."""
    import weakref

    from tests.models import build_gpt, train_step

    chunks = build_gpt("dense", layers=2)
    mlp = chunks[0].module.decoder.layers[1].mlp
    mlp.runs, mlp.itself = 0, [mlp]
    first = mlp.linear_fc1.forward

    def counted(x):
        mlp.runs += 1
        mlp.itself.append(mlp)
        return first(x)

    mlp.linear_fc1.forward = counted
    train_step(chunks, step=0, micro_batches=1)
    return weakref.ref(mlp)


def one_that_counts():
    """A weak reference to what lies beside the count of a recomputed module's runs."""
    import weakref

    from tests.models import build_gpt, train_step

    chunks = build_gpt("dense", layers=2)
    mlp = chunks[0].module.decoder.layers[1].mlp
    first, book = mlp.linear_fc1.forward, {"runs": 0, "table": torch.ones(8)}

    def counted(x):
        book["runs"] += 1
        return first(x)

    mlp.linear_fc1.forward = counted
    train_step(chunks, step=0, micro_batches=1)
    return weakref.ref(book["table"])


def of_a_model_that_goes() -> list[bool]:
    import gc

    from tests.swap_runs import swap

    found = []
    with parallel(), swap(MLP):
        for run in (one_that_knows_itself, one_that_counts):
            left = run()
            gc.collect()
            found.append(left() is not None)
    return found


def test_what_is_known_of_operators_keeps_no_model():
    assert on_ranks(1, of_a_model_that_goes) == [[False, False]]
