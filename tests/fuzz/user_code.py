"""What users' own layers do: pieces of code between [sequence, batch, hidden] and the same, differentiable, each with
something that a saved-tensor hook, a copy or a second run may get wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.models import DEVICE

PIECES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}


def piece(function: Callable) -> Callable:
    PIECES[function.__name__] = function
    return function


# ---- writing in place
@piece
def writes_its_own_result(x):
    y = x * 1.25
    y.mul_(0.9)
    return y * y


@piece
def writes_through_a_view(x):
    y = x.clone()
    y.narrow(-1, 0, y.size(-1) // 2).mul_(2)
    return y * y + (y.view(-1) * 0.5).view_as(y)


@piece
def writes_a_copy_of_what_was_saved(x):
    s = torch.sigmoid(x)
    c = s.clone()
    c.add_(1)
    z = x * s
    z += c
    z[..., 0] = 0
    return z


@piece
def relu_in_place(x):
    return F.relu_(x + 0.01)


@piece
def dropout_in_place(x):
    return F.dropout(x * 1.1, 0.2, True, inplace=True)


@piece
def writes_by_index(x):
    y = x.clone()
    rows = torch.tensor([0, 1], device=x.device)
    y[rows] = y[rows] * 2
    y.index_add_(0, rows, x[:2])
    return y * y


@piece
def masks_in_place(x):
    mask = x > 0
    y = x.masked_fill(mask, 0.5).clone().masked_fill_(~mask, 0.25)
    return torch.where(mask, y * x, x * x)


@piece
def writes_past_autograd(x):
    y = torch.exp(x * 0.1)
    y.data.mul_(2)
    return y * x


@piece
def writes_a_list_at_once(x):
    parts = torch._foreach_mul(list(x.unbind(0)), 2.0)
    torch._foreach_add_(parts, 1.0)
    return torch.stack(torch._foreach_exp([part * 0.1 for part in parts]))


# ---- views
@piece
def views_of_views(x):
    a, b = x.chunk(2, -1)
    t = (a * b).transpose(0, 1)
    every_other = t[..., ::2].contiguous()
    return torch.cat([t.transpose(0, 1), b.flip(0)], -1) * x.unbind(0)[0] * every_other.sum().tanh() + x


@piece
def expanded(x):
    return x * x.mean(-1, keepdim=True).expand_as(x).tanh()


@piece
def strided(x):
    y = torch.exp(torch.sin(x)).contiguous()
    return y.as_strided(y.size(), y.stride()) * y.transpose(0, 1).contiguous().transpose(0, 1)


@piece
def returns_a_view_of_its_input(x):
    return x.view(x.size())


@piece
def unbound_and_stacked(x):
    state, found = x[0], []
    for row in x:
        state = torch.tanh(state * 0.5 + row)
        found.append(state)
    return torch.stack(found)


@piece
def negative_bit(x):
    v = torch._neg_view(x)
    return x + v * v * v


@piece
def conjugated(x):
    c = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).contiguous())
    z = c.conj() * c * c
    return torch.view_as_real(z).reshape_as(x).to(x.dtype)


# ---- functions of autograd
class _SavesItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y * (1 - y)


class _WritesItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(3)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 + 0 * x


class _SeveralOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        a, b, count = x.tanh(), x.cos(), torch.ones(3, dtype=torch.long, device=x.device)
        ctx.save_for_backward(a, x)
        ctx.mark_non_differentiable(count)
        return a, b, count

    @staticmethod
    def backward(ctx, of_a, of_b, _):
        a, x = ctx.saved_tensors
        return of_a * (1 - a * a) - of_b * x.sin()


class _KeepsTensorsOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.double = x.detach() * 2
        return x * 1.5

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.double


@piece
def saves_its_output(x):
    return _SavesItsOutput.apply(x) * x


@piece
def writes_its_input(x):
    return _WritesItsInput.apply(x * 2)


@piece
def several_outputs(x):
    a, b, count = _SeveralOutputs.apply(x)
    return a * b + count.sum()


@piece
def keeps_tensors_on_its_context(x):
    return _KeepsTensorsOnContext.apply(x)


# ---- others' hooks and checkpoints
@piece
def checkpointed(x):
    return checkpoint(lambda t: torch.sin(t * t).exp() * F.dropout(t, 0.1), x, use_reentrant=False)


@piece
def checkpointed_reentrant(x):
    return checkpoint(lambda t: torch.sin(t * t).exp() * F.dropout(t, 0.1), x, use_reentrant=True)


# (Pack hooks detach: what holds the tensor itself, as save_on_cpu does on a CPU, is never freed without backward.)
@piece
def nested_hooks(x):
    with (
        saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t),
        saved_tensors_hooks(lambda t: [t.detach()], lambda held: held[0]),
    ):
        return torch.sin(x * x).exp()


@piece
def hooks_that_change_the_type(x):
    with saved_tensors_hooks(lambda t: t.detach().double(), lambda t: t.to(x.dtype)):
        return torch.sin(x * x).exp()


@piece
def gradient_hooks(x):
    y = x * x
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 1.5)
        y.retain_grad()
    return y * 2


# ---- gradients within forward
@piece
def gradient_of_a_leaf_of_its_own(x):
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((leaf * leaf * leaf).sum(), leaf)
    return x + 0.1 * gradient


@piece
def gradient_of_its_input(x):
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x * 1.0
    (gradient,) = torch.autograd.grad((torch.sin(x) * x).sum(), x, create_graph=True)
    return x + 0.1 * gradient


@piece
def functional_gradient(x):
    return x * torch.func.vjp(torch.sin, x)[1](torch.ones_like(x))[0]


@piece
def mapped(x):
    return torch.vmap(lambda t: torch.sin(t) * t)(x)


# ---- numbers, types, random
@piece
def draws(x):
    return x * torch.rand_like(x) + x * torch.empty_like(x).bernoulli_(0.7)


@piece
def permutes(x):
    return x[..., torch.randperm(x.size(-1), device=x.device)] * x


@piece
def sorts(x):
    values, places = x.topk(4, -1)
    return x.sort(-1)[0].scatter_add(-1, places, x.gather(-1, places) * values)


@piece
def mixes_types(x):
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        y = x.float() @ torch.eye(x.size(-1), device=x.device)
    return (y.float() + F.layer_norm(x.float(), x.shape[-1:])).to(x.dtype) + x.double().sin().to(x.dtype)


@piece
def products(x):
    return torch.stack([(x * (i + 1)).sin() for i in range(3)]).prod(0) + torch.cumsum(x, 0)


@piece
def statistics_without_gradient(x):
    with torch.no_grad():
        scale = x.std(-1, keepdim=True)
    return x / (scale + 1)


@piece
def scalars(x):
    return x * x.sum().tanh() + x.pow(2).mean().sqrt()


@piece
def fourier(x):
    f = torch.fft.rfft(x.float(), dim=-1)
    return torch.fft.irfft(f * f.abs(), n=x.size(-1), dim=-1).to(x.dtype)


@piece
def sparse(x):
    places, values = torch.tensor([[0, 1], [1, 0]]), torch.tensor([1.0, 2.0])
    matrix = torch.sparse_coo_tensor(places, values, (x.size(0), x.size(0))).to(x.device)
    return x + torch.sparse.mm(matrix, x.float().reshape(x.size(0), -1)).view_as(x).to(x.dtype)


@piece
def attends(x):
    q = x.transpose(0, 1).unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1).transpose(0, 1)


# ---- what does not repeat itself
_GENERATOR = torch.Generator(DEVICE)
_COUNTS = {"runs": 0}
_AVERAGE = torch.zeros((), device=DEVICE)


def start_again() -> None:
    """Before a training run: users' own states are as at first."""
    random.seed(5)
    numpy.random.seed(5)
    _GENERATOR.manual_seed(5)
    _COUNTS["runs"] = 0
    _AVERAGE.zero_()


def own() -> torch.Tensor:
    """Users' own states, as numbers: float64 [4]."""
    drawn = (random.Random(), numpy.random.RandomState(), torch.Generator(DEVICE))
    drawn[0].setstate(random.getstate())
    drawn[1].set_state(numpy.random.get_state())
    drawn[2].set_state(_GENERATOR.get_state())
    next_ones = drawn[0].random(), drawn[1].rand(), torch.rand((), generator=drawn[2], device=DEVICE).item()
    return torch.tensor([*next_ones, _COUNTS["runs"] + _AVERAGE.item()], dtype=torch.float64)


@piece
def draws_from_python(x):
    return x * random.random() + x * x


@piece
def draws_from_numpy(x):
    return x * float(numpy.random.rand()) + x * x


@piece
def draws_from_a_generator_of_its_own(x):
    return x * torch.rand(x.shape, generator=_GENERATOR, device=DEVICE).to(x.dtype) + x * x


@piece
def counts_its_runs(x):
    _COUNTS["runs"] += 1
    return x * (1 + 0.01 * _COUNTS["runs"]) + x * x


@piece
def keeps_an_average(x):
    _AVERAGE.mul_(0.9).add_(0.1 * x.detach().float().mean())
    return x * 1.5


@piece
def uses_an_average(x):
    _AVERAGE.mul_(0.9).add_(0.1 * x.detach().float().mean())
    return x * (1 + _AVERAGE).to(x.dtype)
