"""Who produced a storage, who pins it, and that whatever view is saved comes back as it was."""

from __future__ import annotations

import pytest
import torch

from tests.worlds import on_ranks, parallel


def attribution(kind: str, sdpa: bool) -> tuple[int, list[str]]:
    """How many storages an operator keeps, and where the engine's producer is not the one that allocated it."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    from mindspeed_mem.activation import engine as engines
    from tests.models import build_gpt, forget_routing, train_step
    from tests.swap_runs import SDPA, patched, swap

    class Allocations(TorchDispatchMode):
        """Notes on each new storage which operator of the engine was running."""

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            result = op(*args, **(kwargs or {}))
            if not op.is_view:
                given = {id(t.untyped_storage()) for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
                running = engines.current().position.running()
                for tensor in tree_iter(result):
                    if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in given:
                        tensor.untyped_storage().allocated_by = running
            return result

    wrong, count = [], 0
    with patched(SDPA if sdpa else []), parallel(), swap({}, watch_only=True) as engine:
        add = engine.observation.census.add

        def compare(owner, saver, tensor, storage):
            nonlocal count
            if owner[0] >= 0:
                count += 1
                allocated = getattr(storage, "allocated_by", None)
                if allocated != owner[:2]:
                    wrong.append(f"{tuple(tensor.shape)}: engine {owner[:2]}, allocated by {allocated}")
            add(owner, saver, tensor, storage)

        engine.observation.census.add = compare
        chunks = build_gpt(kind)
        with Allocations():
            train_step(chunks, micro_batches=1)
        forget_routing(chunks)
    return count, wrong


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["dense", "swiglu_gqa_rope", "mla", "moe", "dropout"])
def test_the_producer_is_the_operator_that_allocated(kind):
    [(count, wrong)] = on_ranks(1, attribution, kind, True)
    assert count > 20
    assert wrong == []


@pytest.mark.distributed
def test_the_producer_with_megatrons_own_core_attention():
    [(_, wrong)] = on_ranks(1, attribution, "dropout", False)
    assert wrong == []


def pinned() -> list[dict]:
    """A module that keeps its last output in an attribute."""
    from tests.models import build_gpt, train_step
    from tests.swap_runs import SDPA, entry, patched, swap

    with patched(SDPA), parallel(), swap(entry()) as engine:
        chunks = build_gpt("dense", layers=2)
        attention = chunks[0].module.decoder.layers[1].self_attention.core_attention
        attention.register_forward_hook(lambda module, args, output: setattr(module, "last_output", output))
        train_step(chunks, micro_batches=2)
        del attention.last_output  # its graph would keep the model, and its layers would be known in later cases
        return engine.report().pinned


@pytest.mark.distributed
def test_what_is_held_elsewhere_is_reported_with_its_holder():
    [rows] = on_ranks(1, pinned)
    assert [(row.layer, row.op) for row in rows] == [(1, "self_attention.core_attention")]
    assert "last_output" in rows[0].by
    assert rows[0].bytes > 0


class _SavesViews(torch.autograd.Function):
    """Saves awkward views of its input and output, and uses all of them in backward."""

    @staticmethod
    def forward(ctx, x):
        doubled = torch.cat([x, x], 1)
        ctx.save_for_backward(
            doubled.t(), doubled[1:, ::2], doubled[:1].expand(5, -1), doubled.as_strided((3, 4), (1, 1)), doubled
        )
        return doubled * 1.5

    @staticmethod
    def backward(ctx, grad):
        transposed, stepped, expanded, overlapping, doubled = ctx.saved_tensors
        strides = (transposed.stride(), stepped.stride(), expanded.stride(), overlapping.stride())
        assert strides == ((1, doubled.shape[1]), (doubled.shape[1], 2), (0, 1), (1, 1)), strides
        width = grad.shape[1] // 2
        scale = stepped.sum() + expanded.sum() + overlapping.sum() + (transposed.t() - doubled).abs().sum() + 1
        return (grad[:, :width] + grad[:, width:]) * scale


def tagged(layers: list[torch.nn.Module], engine) -> None:
    """Make these modules the layers of the engine's model."""
    from mindspeed_mem.activation import regions
    from mindspeed_mem.activation.wrappers import region_forward
    from mindspeed_mem.patching import REGISTRY

    for index, layer in enumerate(layers):
        for cls in regions.tag_layer(layer, index):
            REGISTRY.apply_method(cls, "forward", region_forward, "mindspeed_mem.patches.activation_stacks")
    engine.in_force.num_layers = len(layers)


def views(policy: dict | None, case: str) -> tuple[list[torch.Tensor], int]:
    """Gradients of a two-layer model made of the function above, run by the engine."""
    from tests.swap_runs import swap

    class Awkward(torch.nn.Module):
        def forward(self, x):
            return _SavesViews.apply(x)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.awkward, self.linear = Awkward(), torch.nn.Linear(16, 8)

        def forward(self, x):
            out = self.linear(self.awkward(x).sigmoid())
            if case == "changed in place":
                hidden = out.exp()  # saves its result
                hidden.add_(1)
                return hidden
            return out

    torch.manual_seed(0)
    layers = [Layer(), Layer()]
    x = torch.randn(4, 8, requires_grad=True)
    with swap(policy or {}, watch_only=policy is None) as engine:
        tagged(layers, engine)
        out = x
        for layer in layers:
            out = layer(out)
        loss = out.square().sum()
        del out
        loss.backward(retain_graph=case == "twice")
        if case == "twice":
            loss.backward()
        grads = [x.grad, *(p.grad for layer in layers for p in layer.parameters())]
        return grads, engine.report().bytes_out


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["once", "twice"])
@pytest.mark.parametrize("activations", ["produced", "saved", "both"])
def test_views_come_back_as_they_were(case, activations):
    from tests.swap_runs import entry

    policy = entry(activations=activations, layer_swap=[{"backward_prefetch": 1, "layers": True}])
    [(without, _)] = on_ranks(1, views, None, case)
    [(grads, moved)] = on_ranks(1, views, policy, case)
    assert moved > 0
    assert all(map(torch.equal, grads, without))


@pytest.mark.distributed
def test_a_saved_tensor_changed_in_place_is_an_error_as_without_hooks():
    from tests.swap_runs import EVERYTHING
    from tests.worlds import RankError

    with pytest.raises(RankError, match="modified by an inplace operation"):
        on_ranks(1, views, EVERYTHING, "changed in place")


class _Conjugate(torch.nn.Module):
    """A real computation that saves conjugate and negated views of storages saved plainly before."""

    def forward(self, x):
        z = torch.view_as_complex((x * 2).view(4, 4, 2))
        return ((z.real * z.real) * z.conj().imag * z.imag).flatten() + (z * z * z.conj()).abs().flatten()


class _OwnCounters(torch.nn.Module):
    """Pieces of one storage that do not share a version counter, each written in place before it is saved."""

    def forward(self, x):
        first, second = (x * 1.5).unsafe_chunk(2, 0)
        first.mul_(2)
        saved_first = first * first
        second.mul_(3)
        return torch.cat([saved_first, second * second])


def gradient(module: type, policy: dict | None) -> tuple[torch.Tensor, int]:
    from tests.swap_runs import swap

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module()

        def forward(self, x):
            return self.inner(x)

    x = torch.linspace(-1, 1, 32).requires_grad_()
    with swap(policy or {}, watch_only=policy is None) as engine:
        layers = [Layer(), torch.nn.Sequential(torch.nn.Linear(16 if module is _Conjugate else 32, 4))]
        for parameter in layers[1].parameters():
            torch.nn.init.constant_(parameter, 0.5)
        tagged(layers, engine)
        layers[1](layers[0](x)).square().sum().backward()
        return x.grad, engine.report().bytes_out


@pytest.mark.distributed
@pytest.mark.parametrize("module", [_Conjugate, _OwnCounters])
@pytest.mark.parametrize("activations", ["produced", "both"])
def test_views_that_share_a_storage_but_not_its_content(module, activations):
    from tests.swap_runs import entry

    policy = entry(activations=activations, layer_swap=[{"backward_prefetch": 1, "layers": True}])
    [(without, _)] = on_ranks(1, gradient, module, None)
    [(grad, moved)] = on_ranks(1, gradient, module, policy)
    assert moved > 0
    assert torch.equal(grad, without)


def changed_weight() -> None:
    from tests.models import build_gpt
    from tests.swap_runs import EVERYTHING, SDPA, one_forward, patched, swap

    with patched(SDPA), parallel(), swap(EVERYTHING) as engine:
        chunks = build_gpt("dense", layers=2)
        loss = one_forward(engine, chunks).sum()
        with torch.no_grad():
            chunks[0].module.decoder.layers[0].mlp.linear_fc1.weight.mul_(0.5)
        loss.backward()


@pytest.mark.distributed
def test_a_weight_changed_between_forward_and_backward_is_an_error_as_without_hooks():
    from tests.worlds import RankError

    with pytest.raises(RankError, match="modified by an inplace operation"):
        on_ranks(1, changed_weight)
