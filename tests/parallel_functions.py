"""torch functions with example inputs: what a split model may do with a tensor, for `tests/parallel/test_functions.py`.

Each takes `y`, [4, 4] in fp64 between -1 and 1, or between 1 and 2 where its name ends in " above one", and returns
tensors, nested as they like; rounded to fp32 where it ends in " in fp32". What they compute with beside `y` are plain
tensors, as a model makes them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[[torch.Tensor], Any]
ABOVE_ONE = " above one"
IN_FP32 = " in fp32"
PLACES = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 2, 2], [0, 0, 3, 3]])
LABELS = torch.tensor([1, 0, 3, 2])
MASK = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 1]]).bool()


def numbers(*shape: int) -> torch.Tensor:
    """The same in each call, of both signs, none of them 0."""
    count = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    return ((count * count * 0.7).sin() * 0.8 + 0.05).view(shape)


C = numbers(4, 4)
FUNCTIONS: dict[str, Function] = {}


def of_names(owner: Any, names: str, *more: Any, above: bool = False, say: str = "", **named: Any) -> None:
    """``owner.name(y, *more, **named)`` for each."""
    for name in names.split():
        function = getattr(owner, name)
        FUNCTIONS[f"{name}{say}{ABOVE_ONE * above}"] = lambda y, function=function: function(y, *more, **named)


def of_two(say: str, names: str, call: Callable[[Callable, torch.Tensor], Any], owner: Any = torch) -> None:
    """``call(owner.name, y)`` for each."""
    for name in names.split():
        FUNCTIONS[say.format(name)] = functools.partial(call, getattr(owner, name))


TWO = "add sub mul div atan2 hypot copysign fmax fmin maximum minimum logaddexp logaddexp2 fmod remainder rsub"
COMPARED = "eq ne lt le gt ge logical_and logical_or logical_xor isclose"

# ---- element by element

of_names(
    torch,
    "abs angle asin asinh atan atanh acos ceil conj_physical cos cosh deg2rad erf erfc erfinv exp exp2 expm1 fix floor "
    "frac i0 isfinite isinf isnan isneginf isposinf isreal logical_not nan_to_num neg positive rad2deg real relu round "
    "selu sgn sigmoid sign signbit sin sinc sinh square tan tanh trunc reciprocal frexp",
)
of_names(torch, "acosh digamma lgamma log log10 log1p log2 rsqrt sqrt", above=True)
of_names(torch.special, "erfcx expit i0e i1 i1e log_ndtr ndtr bessel_j0 bessel_j1 modified_bessel_i0")
of_names(torch.special, "entr psi gammaln bessel_y0", above=True)
of_names(torch.special, "multigammaln", 1, above=True)
of_names(
    F,
    "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu silu softplus "
    "softshrink softsign tanhshrink",
    say=" F",
)
of_names(F, "glu softmax softmin log_softmax normalize", dim=0, say=" F 0")
of_names(F, "glu softmax softmin log_softmax normalize", dim=1, say=" F 1")
FUNCTIONS |= {
    "gelu, tanh": lambda y: F.gelu(y, approximate="tanh"),
    "threshold": lambda y: F.threshold(y, 0.1, 0.3),
    "rrelu, evaluated": lambda y: F.rrelu(y, training=False),
    "prelu": lambda y: F.prelu(y, numbers(4)),
    "logit above one": lambda y: torch.logit(y / 3),
    "ndtri above one": lambda y: torch.special.ndtri(y / 3),
    "polygamma above one": lambda y: torch.polygamma(1, y),
    "clamp": lambda y: y.clamp(-0.2, 0.3),
    "clamp by tensors": lambda y: torch.clamp(y, C - 0.3, C + 0.3),
    "clamp, least": lambda y: y.clamp_min(0.1) + y.clamp_max(-0.1),
    "clip": lambda y: torch.clip(y, min=0.0),
    "nan_to_num of nan": lambda y: torch.nan_to_num(y.masked_fill(MASK, math.nan), 2.0),
    "heaviside": lambda y: (y, torch.heaviside(y.detach(), C)),
    "round, digits": lambda y: (y, y.round(decimals=1)),
    "bitwise": lambda y: (y, (y * 9).long() & 3, (y * 9).long() | 4, (y * 9).long() ^ 5, ~(y * 9).long()),
    "shifts": lambda y: (y, (y * 9).long() << 1, (y * 9).long() >> 1),
    "gcd": lambda y: (y, torch.gcd((y * 9).long(), LABELS), torch.lcm((y * 9).long(), LABELS)),
    "complex": lambda y: torch.view_as_real(torch.complex(y, C) * torch.complex(C, y)),
    "polar": lambda y: torch.view_as_real(torch.polar(y.abs(), y)),
    "types in fp32": lambda y: (y.float().double(), y.to(torch.float32).type_as(C), y.bool(), y.int()),
}
of_two("{}, whole", TWO, lambda f, y: f(y, C))
of_two("{}, of whole", TWO, lambda f, y: f(C, y))
of_two("{}, both", TWO, lambda f, y: f(y, y * 2 - 0.3))
of_two("{}, row", TWO, lambda f, y: (f(y, C[0]), f(C[:, :1], y)))
of_two("{}", COMPARED, lambda f, y: (y, f(y, C), f(C, y), f(y, y * 2)))
FUNCTIONS |= {
    "by a number": lambda y: y + 1 - 2 * y / 3 + 1.5 - y - (2 - y),
    "divided": lambda y: (1 / (y + 3), y / 2, torch.div(y, 0.3, rounding_mode="floor"), y.detach() // 0.3, y % 0.3),
    "div, rounded": lambda y: (y, torch.div(y, C, rounding_mode="trunc"), torch.div(C, y, rounding_mode="floor")),
    "powers": lambda y: (y**2, y**3, y.pow(1), torch.pow(2.0, y), y.float_power(2)),
    "pow above one": lambda y: (y**C, y.pow(y), torch.pow(C.abs(), y), y**0.5, y**-1),
    "xlogy above one": lambda y: (torch.xlogy(C, y), torch.xlogy(y, y), torch.special.xlog1py(C, y)),
    "zeta above one": lambda y: (y, torch.special.zeta(y.detach() + 1, 2.0)),
    "ldexp": lambda y: torch.ldexp(y, LABELS),
    "nextafter": lambda y: (y, torch.nextafter(y, C)),
    "lerp": lambda y: (y.lerp(C, 0.3), torch.lerp(C, y, 0.3), torch.lerp(C, C + 1, y), y.lerp(y * 2, C)),
    "addcmul": lambda y: (y.addcmul(C, C), torch.addcmul(C, y, y, value=0.5), torch.addcmul(y, y, C)),
    "addcdiv": lambda y: (y.addcdiv(C, C + 2), torch.addcdiv(C, y, y + 3, value=0.5)),
    "where": lambda y: (torch.where(MASK, y, C), torch.where(y > 0, y, 0.5), torch.where(MASK, 0.5, y)),
    "where, two": lambda y: (torch.where(MASK, y, y * 2), torch.where(y > 0, C, y), y.where(MASK, C[0])),
    "masked_fill": lambda y: (y.masked_fill(MASK, 2.0), y.masked_fill(y > 0, -1.0), C.masked_fill(y > 0, 1.0), y),
    "masked_fill, tensor": lambda y: y.masked_fill(MASK, torch.tensor(2.0, dtype=y.dtype)),
    "clone and contiguous": lambda y: y.t().contiguous() + y.clone() + y.detach(),
    "type promoted": lambda y: y + torch.arange(4) + (y > 0),
    "sums of sums": lambda y: (y.sum(0) + y.sum(1)) * 2 + C[0],
    "sum times sum": lambda y: y.sum(0) * y.sum(1) + y.sum() * y.sum(0),
    "plus a constant": lambda y: y + C + 1,
    "minus its mean": lambda y: y - y.mean() - y.mean(0) - y.mean(1, keepdim=True),
}

# ---- reductions

of_names(
    torch,
    "sum mean amax amin aminmax prod std var max min nansum nanmean median nanmedian count_nonzero norm",
    say=", all",
)
of_names(torch, "argmax argmin all any std_mean var_mean numel", say=", all")
for dim in (0, 1):
    of_names(
        torch,
        "sum mean amax amin prod std var max min nansum nanmean median nanmedian count_nonzero argmax argmin all any "
        "logsumexp std_mean var_mean mode cumsum cummax cummin logcumsumexp cumprod argsort sort unbind",
        dim,
        say=f", {dim}",
    )
KEPT = "sum mean amax amin std var nansum logsumexp aminmax prod max any all argmax"
of_two("{}, kept", KEPT, lambda f, y: f(y, dim=0, keepdim=True))
BOTH = "sum mean amax amin std var nansum logsumexp count_nonzero any all"
of_two("{}, both", BOTH, lambda f, y: f(y, dim=(0, 1)))
of_two("{}, no dims", "sum mean amax amin std var nansum", lambda f, y: f(y, dim=[], keepdim=True))
for order in (0, 1, 2, 3, math.inf, -math.inf):
    FUNCTIONS[f"vector_norm {order}"] = lambda y, p=order: (
        torch.linalg.vector_norm(y, p),
        torch.linalg.vector_norm(y, p, dim=0),
        y.norm(p, dim=1),
    )
FUNCTIONS |= {
    "nansum of nan": lambda y: y.masked_fill(MASK, math.nan).nansum(0),
    "nanmean of nan": lambda y: y.masked_fill(MASK, math.nan).nanmean(1),
    "any, then not": lambda y: (
        y,
        (y > 0.5).any(0).logical_not(),
        (y > 0.5).any(1).double() * 2,
        (y > 0.5).any() & True,
    ),
    "all, then not": lambda y: (y, ~(y > -0.5).all(0), (y > -0.5).all(1).double() * 2, (y > -0.5).all() | False),
    "any, both dims": lambda y: (y, (y > 0).any(dim=(0, 1)), (y > 0).any(dim=[0])),
    "any of a sum": lambda y: (y, (y - y).any(), (y * 0).any(0), y.any(0), y.all(1)),
    "frobenius": lambda y: (torch.linalg.matrix_norm(y), torch.linalg.norm(y), torch.norm(y, "fro")),
    "nuclear": lambda y: torch.linalg.matrix_norm(y, "nuc"),
    "matrix norms": lambda y: (torch.linalg.matrix_norm(y, 1), torch.linalg.matrix_norm(y, math.inf)),
    "softmax of a sum": lambda y: (y.sum(0).softmax(0), y.sum(1).log_softmax(0)),
    "dist": lambda y: (torch.dist(y, C), torch.dist(C, y, 1), torch.dist(y, y * 2)),
    "trace": lambda y: (y.trace(), y.diagonal().sum()),
    "quantile": lambda y: (y.quantile(0.3), y.nanquantile(0.5, 0)),
    "kthvalue": lambda y: (y.kthvalue(2, 0), y.kthvalue(2, 1)),
    "topk": lambda y: (y.topk(2, 0), y.topk(2, 1, largest=False)),
    "msort": lambda y: (y.msort(), torch.sort(y, stable=True, dim=1, descending=True)),
    "histc": lambda y: (y, torch.histc(y, 4, -1, 1)),
    "histogram": lambda y: (y, torch.histogram(y.detach(), 4, range=(-1.0, 1.0))),
    "bincount": lambda y: (y, (y * 3).long().abs().flatten().bincount()),
    "unique": lambda y: (y, (y > 0).unique(), torch.unique_consecutive((y > 0).long(), dim=0)),
    "searchsorted": lambda y: (y, torch.searchsorted(C[0].sort().values, y), torch.bucketize(y, C[0].sort().values)),
    "isin": lambda y: (y, torch.isin((y * 3).long(), torch.tensor([0, 1]))),
    "equal": lambda y: (y * (2 if torch.equal(y, y * 1) else 3), torch.allclose(y, y)),
    "cov": lambda y: (torch.cov(y), torch.corrcoef(y)),
    "diff": lambda y: (y.diff(dim=0), y.diff(dim=1, n=2), y.diff(prepend=C)),
    "trapezoid": lambda y: (torch.trapezoid(y), torch.cumulative_trapezoid(y, dim=0), torch.trapz(y, dx=0.5)),
    "gradient": lambda y: torch.gradient(y),
    "renorm": lambda y: (y.renorm(2, 0, 0.5), y.renorm(1, 1, 0.5)),
    "segments": lambda y: torch.segment_reduce(y, "sum", lengths=torch.tensor([1, 3])),
    "cumsum of a sum": lambda y: y.sum(0).cumsum(0),
    "sum to size": lambda y: (y.sum_to_size(1, 4), y.sum_to_size(4, 1)),
    "sum, type in fp32": lambda y: (y.float().sum(0, dtype=torch.float64), y.mean(1, dtype=torch.float64)),
}

# ---- shapes

of_names(
    torch, "t adjoint ravel flatten fliplr flipud rot90 tril triu diag diagflat diagonal diag_embed atleast_3d squeeze"
)
of_names(torch.Tensor, "view_as reshape_as expand_as type_as", C)
FUNCTIONS |= {
    "reshape": lambda y: (y.reshape(2, 8), y.reshape(2, 2, 4), y.reshape(-1), y.reshape(1, 16)),
    "view": lambda y: (y.view(16), y.view(4, 2, 2), y.view(4, 1, 4), y.view(1, 4, 4)),
    "view, merged": lambda y: y.view(2, 8),
    "view, split rows": lambda y: y.view(2, 2, 4),
    "unflatten": lambda y: (y.unflatten(0, (2, 2)), y.unflatten(1, (4, 1))),
    "unflatten columns": lambda y: y.unflatten(1, (2, 2)).transpose(0, 1).flatten(1),
    "heads": lambda y: y.view(4, 2, 2).transpose(0, 1).reshape(2, 8).view(2, 4, 2).transpose(0, 1).flatten(1),
    "permute": lambda y: (y.permute(1, 0), y.T, y.mT, y.movedim(0, 1), y.swapaxes(0, 1), torch.moveaxis(y, 1, 0)),
    "transpose": lambda y: (y.transpose(0, 1), y[None].transpose(0, 2), torch.swapdims(y, 0, 1)),
    "unsqueeze": lambda y: (y[None], y[:, None], y[..., None], y.unsqueeze(-1).squeeze(-1)),
    "squeeze, dims": lambda y: (
        y[:, None, :, None].squeeze(),
        y[:1].squeeze(0),
        y[:, :1].squeeze(1),
        y[None].squeeze((0,)),
    ),
    "expand": lambda y: (y.expand(2, 4, 4), y[:1].expand(4, 4), y[:, :1].expand(-1, 3), y.broadcast_to(3, 4, 4)),
    "broadcast_tensors": lambda y: torch.broadcast_tensors(y, C[0], C[:, :1]),
    "repeat": lambda y: (y.repeat(2, 3), y.tile(2), y.tile((2, 1))),
    "repeat_interleave": lambda y: (
        y.repeat_interleave(2, 0),
        y.repeat_interleave(2, 1),
        y.repeat_interleave(LABELS, 0),
    ),
    "cat": lambda y: (torch.cat([y, y * 2]), torch.cat([y, C], 1), torch.concat([C, y]), torch.concatenate([y, y], 1)),
    "stack": lambda y: (torch.stack([y, y], 1), torch.stack([C, y]), torch.stack([y, C], -1)),
    "hstack": lambda y: (torch.hstack([y, C]), torch.vstack([y, C]), torch.dstack([y, y]), torch.column_stack([y, C])),
    "block_diag": lambda y: torch.block_diag(y, C),
    "cartesian_prod": lambda y: torch.cartesian_prod(y[0], y[:, 0]),
    "combinations": lambda y: torch.combinations(y[0]),
    "meshgrid": lambda y: torch.meshgrid(y[0], y[:, 0], indexing="ij"),
    "split": lambda y: (y.split(2), y.split([1, 3], 1), y.split(3, 1)),
    "split_with_sizes": lambda y: (y.split_with_sizes([3, 1]), y.split_with_sizes([2, 2], 1)),
    "chunk": lambda y: (y.chunk(2), y.chunk(2, 1)[1], y.chunk(3)),
    "tensor_split": lambda y: (y.tensor_split(3), y.tensor_split((1, 2), 1)),
    "hsplit": lambda y: (y.hsplit(2), y.vsplit(2)[1], y[None].dsplit(2)),
    "unbind": lambda y: (y.unbind(), y.unbind(1)[2], [row * n for n, row in enumerate(y)]),
    "narrow": lambda y: (y.narrow(0, 1, 2), y.narrow(1, 0, 3), y.narrow_copy(0, 1, 2)),
    "select": lambda y: (y.select(0, 1), y.select(1, 3), y[2], y[:, -1]),
    "slices": lambda y: (y[1:3], y[:, ::2], y[::3], y[1:, :-1], y[..., 1:2], y[-2:]),
    "getitem": lambda y: (y[1, 2], y[None, 1], y[..., 0], y[1:2, 0], y[()]),
    "index by tensors": lambda y: (y[LABELS], y[:, LABELS], y[LABELS, LABELS], y[LABELS[:2], 1:]),
    "index by lists": lambda y: (y[[0, 2]], y[:, [1, 1]], y[[0], [1]]),
    "index by masks": lambda y: (y[MASK], y[y > 0], y[MASK[0]], y[:, MASK[1]]),
    "index_select": lambda y: (y.index_select(0, LABELS), y.index_select(1, LABELS[:2])),
    "gather": lambda y: (y.gather(0, PLACES), y.gather(1, PLACES), y.gather(1, PLACES[:2, :2])),
    "take": lambda y: (y.take(PLACES), y.take_along_dim(PLACES, 1), y.take_along_dim(y.argsort(0), 0)),
    "masked_select": lambda y: (y.masked_select(MASK), y.masked_select(y > 0)),
    "nonzero": lambda y: (y, (y > 0).nonzero(), (y > 0).argwhere(), (y > 0).nonzero(as_tuple=True)),
    "diagonals": lambda y: (y.diagonal(1), y.diag(-1), y.diag_embed(), torch.diagonal_copy(y, -1)),
    "triangles": lambda y: (y.tril(-1), y.triu(1), y[None].tril()),
    "roll": lambda y: (y.roll(1, 0), y.roll(3), y.roll((1, 2), (0, 1))),
    "flip": lambda y: (y.flip(0), y.flip(1), y.flip((0, 1)), y.rot90(2)),
    "unfold": lambda y: (y.unfold(0, 2, 1), y.unfold(1, 3, 1)),
    "as_strided": lambda y: y.as_strided((2, 2), (4, 1)),
    "scatter": lambda y: (y.scatter(0, PLACES[:1], 2.0), C.scatter(1, PLACES, y), y.scatter(1, PLACES[:, :1], C)),
    "scatter_add": lambda y: (y.scatter_add(0, PLACES, C), C.scatter_add(1, PLACES, y)),
    "scatter_reduce": lambda y: (y.scatter_reduce(0, PLACES, y * 2, "sum"), C.scatter_reduce(1, PLACES, y, "amax")),
    "index_add": lambda y: (y.index_add(0, LABELS, C), C.index_add(1, LABELS, y, alpha=2)),
    "index_copy": lambda y: (y.index_copy(0, LABELS[:2], C[:2]), C.index_copy(1, LABELS, y)),
    "index_fill": lambda y: (y.index_fill(0, LABELS[:2], 2.0), y.index_fill(1, LABELS[:1], 0.0)),
    "index_put": lambda y: (y.index_put((LABELS,), C), y.index_put((LABELS, LABELS), C[0], accumulate=True)),
    "index_reduce": lambda y: y.index_reduce(0, LABELS, C, "amax"),
    "put": lambda y: y.put(PLACES[:1], C[:1]),
    "masked_scatter": lambda y: (y.masked_scatter(MASK, C), C.masked_scatter(MASK, y)),
    "slice_scatter": lambda y: (y.slice_scatter(C[:2], 0, 1, 3), y.slice_scatter(C[:, :1], 1, 0, 1)),
    "select_scatter": lambda y: (y.select_scatter(C[0], 0, 1), C.select_scatter(y[0], 1, 2)),
    "diagonal_scatter": lambda y: y.diagonal_scatter(C[0]),
    "new ones": lambda y: (y, y.new_ones(4) + y.new_zeros(4, 4), y.new_full((2,), 3.0), y.new_tensor([1.0, 2.0])),
    "like it": lambda y: (
        y,
        torch.zeros_like(y),
        torch.ones_like(y) * 2,
        torch.full_like(y, 3.0),
        y.new_empty(2).zero_(),
    ),
    "like a sum": lambda y: (
        y,
        torch.ones_like(y.sum(0)) + torch.zeros_like(y.sum(1)),
        torch.full_like(y.mean(0), 2.0),
    ),
    "item": lambda y: y * y.sum().item() + y[1, 2].item() + float(y.max()),
    "tolist": lambda y: y * sum(y.sum(0).tolist()),
    "if": lambda y: y * (2 if (y > 0.1).any() else 3) * (2 if y.sum() > 0 else 3),
    "pad": lambda y: (F.pad(y, (0, 0, 1, 2)), F.pad(y, (1, 2), value=3.0), F.pad(y, (-1, 0, 0, -1))),
    "pad, modes": lambda y: (F.pad(y[None], (1, 2), mode="reflect"), F.pad(y[None], (2, 0), mode="replicate")),
    "pad, circular": lambda y: F.pad(y[None], (1, 1), mode="circular"),
}

# ---- products

B = numbers(2, 4, 4)
FUNCTIONS |= {
    "mm": lambda y: (y @ C, C @ y, y @ y, torch.mm(y.t(), y)),
    "mv": lambda y: (y @ C[0], C @ y[0], torch.mv(y, y[0]), torch.dot(y[0], C[0]), torch.vdot(y[0], y[1])),
    "bmm": lambda y: (torch.bmm(B, y.expand(2, 4, 4)), y @ B, B @ y),
    "matmul of vectors": lambda y: (y[0] @ C, y[:, 0] @ y[0], C[0] @ y),
    "addmm": lambda y: (torch.addmm(C, y, C), torch.addmm(y, C, C, beta=0.5), torch.addmm(C[0], y, y, alpha=2)),
    "addmv": lambda y: (torch.addmv(C[0], y, C[1]), torch.addmv(y[0], C, C[1]), torch.addr(C, y[0], y[1])),
    "baddbmm": lambda y: (torch.baddbmm(B, B, y.expand(2, 4, 4)), torch.addbmm(y, B, B)),
    "outer": lambda y: (torch.outer(y[0], y[:, 1]), torch.inner(y, C), torch.inner(y[0], y[1]), torch.ger(C[0], y[0])),
    "kron": lambda y: torch.kron(y, C),
    "tensordot": lambda y: (torch.tensordot(y, C, 1), torch.tensordot(y, C, ([0], [0])), torch.tensordot(y, y, 2)),
    "einsum": lambda y: (
        torch.einsum("ij,kj->ik", y, C),
        torch.einsum("ij->j", y),
        torch.einsum("ij,jk,kl->il", y, C, y),
    ),
    "einsum, diagonal": lambda y: (
        torch.einsum("ii->i", y),
        torch.einsum("ij,ij->", y, C),
        torch.einsum("i,j->ij", y[0], y[1]),
    ),
    "einsum, batch": lambda y: torch.einsum("bij,jk->bik", B, y),
    "multi_dot": lambda y: torch.linalg.multi_dot([y, C, y]),
    "matrix_power": lambda y: (torch.matrix_power(y, 3), torch.linalg.matrix_power(y, 2)),
    "cross": lambda y: torch.linalg.cross(y[:, :3], C[:, :3]),
    "vecdot": lambda y: (torch.linalg.vecdot(y, C), torch.linalg.vecdot(y, y, dim=0)),
    "cdist": lambda y: (torch.cdist(y, C), torch.cdist(C, y, p=1.0)),
    "pdist": lambda y: F.pdist(y),
    "linear": lambda y: (F.linear(y, C), F.linear(y, C, C[0]), F.linear(C, y), F.linear(y, y, y[0])),
    "bilinear": lambda y: F.bilinear(y, C, numbers(2, 4, 4)),
    "det": lambda y: (torch.det(y), torch.linalg.slogdet(y)),
    "inverse": lambda y: (torch.inverse(y), torch.linalg.pinv(y)),
    "solve": lambda y: (torch.linalg.solve(y, C), torch.linalg.solve(C, y)),
    "cholesky": lambda y: torch.linalg.cholesky(y @ y.t() + torch.eye(4, dtype=y.dtype)),
    "qr": lambda y: torch.linalg.qr(y),
    "svdvals": lambda y: torch.linalg.svdvals(y),
    "eigvalsh": lambda y: torch.linalg.eigvalsh(y + y.t()),
    "matrix_exp": lambda y: torch.matrix_exp(y),
    "triangular": lambda y: torch.linalg.solve_triangular(y.tril() + 2 * torch.eye(4, dtype=y.dtype), C, upper=False),
    "lstsq": lambda y: torch.linalg.lstsq(C, y).solution,
    "fft": lambda y: (torch.view_as_real(torch.fft.fft(y)), torch.view_as_real(torch.fft.fft2(y))),
    "rfft": lambda y: (torch.view_as_real(torch.fft.rfft(y, dim=0)), torch.fft.irfft(torch.fft.rfft(y), 4)),
    "fftshift": lambda y: torch.fft.fftshift(y),
}

# ---- networks

IMAGE = (1, 1, 4, 4)
K1, K2 = numbers(2, 4, 3), numbers(2, 1, 3, 3)
FUNCTIONS |= {
    "conv1d": lambda y: (F.conv1d(y[None], K1, padding=1), F.conv1d(y[:, None], numbers(2, 1, 3), stride=2)),
    "conv1d, weights": lambda y: F.conv1d(numbers(2, 4, 6), y[:, :, None].expand(4, 4, 2)),
    "conv2d": lambda y: (F.conv2d(y.view(IMAGE), K2, padding=1), F.conv2d(y.view(4, 1, 2, 2), K2, padding=1)),
    "conv2d, groups": lambda y: F.conv2d(y.view(1, 4, 2, 2), numbers(4, 1, 1, 1), groups=4),
    "conv3d": lambda y: F.conv3d(y.view(1, 1, 2, 2, 4), numbers(1, 1, 1, 2, 3)),
    "conv_transpose1d": lambda y: F.conv_transpose1d(y[None], numbers(4, 2, 3), stride=2),
    "conv_transpose2d": lambda y: F.conv_transpose2d(y.view(IMAGE), numbers(1, 2, 2, 2)),
    "avg_pool": lambda y: (F.avg_pool1d(y, 2), F.avg_pool2d(y.view(IMAGE), 2), F.avg_pool2d(y[None], 3, 1, 1)),
    "avg_pool3d": lambda y: F.avg_pool3d(y.view(1, 1, 2, 2, 4), 2),
    "max_pool": lambda y: (F.max_pool1d(y, 2), F.max_pool2d(y.view(IMAGE), 2), F.max_pool2d(y[None], 3, 1, 1)),
    "max_pool3d": lambda y: F.max_pool3d(y.view(1, 1, 2, 2, 4), 2),
    "max_pool, places": lambda y: F.max_pool2d(y.view(IMAGE), 2, return_indices=True),
    "max_unpool": lambda y: F.max_unpool1d(*F.max_pool1d(y[None], 2, return_indices=True), 2),
    "lp_pool": lambda y: (F.lp_pool1d(y[None], 2, 2), F.lp_pool2d(y.view(IMAGE), 2, 2)),
    "adaptive_avg_pool": lambda y: (F.adaptive_avg_pool1d(y, 2), F.adaptive_avg_pool2d(y.view(IMAGE), (1, 2))),
    "adaptive_max_pool": lambda y: (F.adaptive_max_pool1d(y, 2), F.adaptive_max_pool2d(y.view(IMAGE), (3, 2))),
    "interpolate": lambda y: (F.interpolate(y[:, None], scale_factor=2, mode="linear"), F.interpolate(y[None], size=3)),
    "interpolate 2d": lambda y: (
        F.interpolate(y.view(IMAGE), size=(8, 2)),
        F.interpolate(y.view(IMAGE), scale_factor=2, mode="bilinear"),
        F.interpolate(y.view(IMAGE), size=(3, 5), mode="bicubic", align_corners=True),
        F.interpolate(y.view(IMAGE), size=(2, 2), mode="area"),
    ),
    "grid_sample": lambda y: F.grid_sample(y.view(IMAGE), numbers(1, 2, 2, 2), align_corners=False),
    "grid_sample, grid": lambda y: F.grid_sample(numbers(*IMAGE), y.view(1, 4, 2, 2), align_corners=False),
    "affine_grid": lambda y: F.affine_grid(y[:3, :2].t()[None], (1, 1, 2, 3), align_corners=False),
    "pixel_shuffle": lambda y: (F.pixel_shuffle(y.view(1, 4, 2, 2), 2), F.pixel_unshuffle(y.view(IMAGE), 2)),
    "channel_shuffle": lambda y: F.channel_shuffle(y.view(1, 4, 2, 2), 2),
    "patches": lambda y: F.unfold(y.view(IMAGE), 2),
    "fold": lambda y: F.fold(y.t()[None], (3, 3), 2),
    "layer_norm": lambda y: (F.layer_norm(y, (4,)), F.layer_norm(y, (4, 4), C, C), F.layer_norm(y, (4,), y[0], y[1])),
    "rms_norm": lambda y: (F.rms_norm(y, (4,)), F.rms_norm(y, (4,), C[0]), F.rms_norm(y, (4, 4))),
    "group_norm": lambda y: (F.group_norm(y, 2), F.group_norm(y[None], 4, C[0], C[1])),
    "batch_norm": lambda y: (F.batch_norm(y, None, None, training=True), F.batch_norm(y, C[0], C[1] + 2)),
    "batch_norm, weights": lambda y: F.batch_norm(y[:, :, None], None, None, y[0], C[1], training=True),
    "instance_norm": lambda y: (F.instance_norm(y[None]), F.instance_norm(y.view(4, 2, 2))),
    "local_response_norm": lambda y: F.local_response_norm(y[None], 2),
    "embedding": lambda y: (F.embedding(LABELS, y), F.embedding(PLACES, y)),
    "embedding, ids": lambda y: (y, F.embedding((y > 0).long(), C)),
    "embedding_bag": lambda y: F.embedding_bag(PLACES, y, mode="sum"),
    "one_hot": lambda y: (y, F.one_hot((y > 0).long(), 3)),
    "attention": lambda y: F.scaled_dot_product_attention(*[y.view(1, 4, 2, 2).transpose(1, 2)] * 3),
    "attention, masked": lambda y: (
        F.scaled_dot_product_attention(y[None, None], C[None, None], y[None, None], MASK | torch.eye(4).bool()),
        F.scaled_dot_product_attention(*[y.view(4, 1, 2, 2)] * 3, attn_mask=C[:2, :2]),
        F.scaled_dot_product_attention(*[y.view(4, 1, 2, 2)] * 3, C[:, :, None, None].expand(4, 4, 2, 2)[:, :1]),
    ),
    "attention, causal": lambda y: F.scaled_dot_product_attention(y[None], y[None], y[None], is_causal=True),
    "dropout, evaluated": lambda y: (F.dropout(y, 0.5, False), F.dropout1d(y, 0.5, False), F.alpha_dropout(y, 0.5)),
    "dropout": lambda y: F.dropout(y * 1, 0.5),
    "gumbel_softmax": lambda y: F.gumbel_softmax(y),
    "rand_like": lambda y: (y, torch.rand_like(y), torch.randn_like(y), torch.bernoulli(y.sigmoid())),
    "cosine_similarity": lambda y: (F.cosine_similarity(y, C), F.cosine_similarity(y, y * 2, dim=0)),
    "pairwise_distance": lambda y: (F.pairwise_distance(y, C), F.pairwise_distance(y, y * 2, p=1.0)),
}

# ---- losses

LOSSES: dict[str, Callable] = {
    "mse_loss": lambda y, **how: F.mse_loss(y, MASK.to(y.dtype), **how),
    "l1_loss": lambda y, **how: F.l1_loss(y, MASK.to(y.dtype), **how),
    "smooth_l1_loss": lambda y, **how: F.smooth_l1_loss(y, MASK.to(y.dtype), **how),
    "huber_loss": lambda y, **how: F.huber_loss(y, MASK.to(y.dtype), **how),
    "soft_margin_loss": lambda y, **how: F.soft_margin_loss(y, MASK.to(y.dtype) * 2 - 1, **how),
    "multilabel_soft_margin_loss": lambda y, **how: F.multilabel_soft_margin_loss(y, MASK.to(y.dtype), **how),
    "binary_cross_entropy": lambda y, **how: F.binary_cross_entropy(y.sigmoid(), MASK.to(y.dtype), **how),
    "with_logits": lambda y, **how: F.binary_cross_entropy_with_logits(y, MASK.to(y.dtype), C[0].abs(), **how),
    "cross_entropy": lambda y, **how: F.cross_entropy(y, LABELS, **how),
    "cross_entropy, weights": lambda y, **how: F.cross_entropy(y, LABELS, C[0].abs(), label_smoothing=0.1, **how),
    "cross_entropy, ignored": lambda y, **how: F.cross_entropy(y, LABELS, ignore_index=0, **how),
    "cross_entropy, probabilities": lambda y, **how: F.cross_entropy(y, C.softmax(1), **how),
    "nll_loss": lambda y, **how: F.nll_loss(y, LABELS, **how),
    "kl_div": lambda y, **how: F.kl_div(y, C.softmax(1), **how),
    "kl_div, both": lambda y, **how: F.kl_div(y.log_softmax(1), (y * 2).log_softmax(1), log_target=True, **how),
    "poisson_nll_loss": lambda y, **how: F.poisson_nll_loss(y, C.abs(), **how),
    "gaussian_nll_loss": lambda y, **how: F.gaussian_nll_loss(y, C, y.square() + 0.5, **how),
    "hinge_embedding_loss": lambda y, **how: F.hinge_embedding_loss(y, MASK.to(y.dtype) * 2 - 1, **how),
    "margin_ranking_loss": lambda y, **how: F.margin_ranking_loss(y, C, MASK.to(y.dtype) * 2 - 1, **how),
    "cosine_embedding_loss": lambda y, **how: F.cosine_embedding_loss(y, C, MASK[0].to(y.dtype) * 2 - 1, **how),
    "triplet_margin_loss": lambda y, **how: F.triplet_margin_loss(y, y * 2, C, **how),
    "multi_margin_loss": lambda y, **how: F.multi_margin_loss(y, LABELS, **how),
    "multilabel_margin_loss": lambda y, **how: F.multilabel_margin_loss(y, PLACES, **how),
    "ctc_loss": lambda y, **how: F.ctc_loss(
        y.log_softmax(1)[:, None], torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2]), **how
    ),
}
FUNCTIONS |= LOSSES
FUNCTIONS |= {
    f"{name}, {reduction}": lambda y, loss=loss, reduction=reduction: loss(y, reduction=reduction)
    for name, loss in LOSSES.items()
    for reduction in ("sum", "none")
}

# ---- in place


def changed(change: Callable[[torch.Tensor], Any]) -> Function:
    """Of a copy of `y`."""

    def run(y: torch.Tensor) -> torch.Tensor:
        y = y * 1
        change(y)
        return y

    return run


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "abs_": lambda x: x.abs_(),
    "add_": lambda x: x.add_(C).add_(1).sub_(C[0]),
    "mul_": lambda x: x.mul_(2).mul_(C).div_(3),
    "exp_": lambda x: x.exp_(),
    "relu_": lambda x: F.relu(x, inplace=True),
    "leaky_relu_": lambda x: F.leaky_relu(x, 0.1, inplace=True),
    "clamp_": lambda x: x.clamp_(-0.1, 0.1),
    "copy_": lambda x: x.copy_(C),
    "fill_": lambda x: x[0].fill_(2.0),
    "zero_": lambda x: x.zero_(),
    "masked_fill_": lambda x: x.masked_fill_(MASK, 2.0),
    "masked_scatter_": lambda x: x.masked_scatter_(MASK, C),
    "index_add_": lambda x: x.index_add_(0, LABELS, C),
    "index_copy_": lambda x: x.index_copy_(1, LABELS[:2], C[:, :2]),
    "index_fill_": lambda x: x.index_fill_(1, LABELS[:2], 2.0),
    "index_put_": lambda x: x.index_put_((LABELS, LABELS), C[0]),
    "scatter_": lambda x: x.scatter_(1, PLACES[:, :1], 2.0),
    "scatter_add_": lambda x: x.scatter_add_(1, PLACES, C),
    "lerp_": lambda x: x.lerp_(C, 0.3),
    "addcmul_": lambda x: x.addcmul_(C, C),
    "addmm_": lambda x: x.addmm_(C, C),
    "tril_": lambda x: x.tril_(),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(0),
    "t_": lambda x: x.t_(),
    "cumsum_": lambda x: x.cumsum_(0),
    "pow_": lambda x: x.pow_(2),
    "floor_": lambda x: x.floor_(),
    "copysign_": lambda x: x.copysign_(C),
    "sigmoid_": lambda x: x.sigmoid_(),
    "assigned": lambda x: x.__setitem__(1, C[0]),
    "assigned slice": lambda x: x.__setitem__((slice(None), slice(1, 3)), C[:, :2]),
    "assigned by mask": lambda x: x.__setitem__(MASK, 0.5),
    "assigned by tensor": lambda x: x.__setitem__(LABELS[:2], C[:2]),
    "row": lambda x: x[0].mul_(2),
    "column": lambda x: x[:, 1].add_(1),
    "transposed": lambda x: x.t().mul_(C),
    "flat": lambda x: x.view(-1).add_(1),
    "diagonal": lambda x: x.diagonal().mul_(2),
    "+=": lambda x: x.__iadd__(C),
    "out=": lambda x: torch.add(x.detach(), C, out=x.detach()),
    "cast in place": lambda x: x.data.mul_(2),
}
FUNCTIONS |= {f"in place {name}": changed(change) for name, change in IN_PLACE.items()}
