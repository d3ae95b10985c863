"""What DTensor gets wrong, lacks or does dearly, operator by operator, and what is done instead.

Facts are of torch 2.13; each has a test that fails when torch does better, and then its row can go.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._random import is_rng_supported_mesh
from torch.distributed.tensor.experimental import register_sharding

from mindspeed_mem import ranks
from mindspeed_mem.parallel import norms, propagation
from mindspeed_mem.parallel.copies import OTHERWISE, copied, refuse_sum
from mindspeed_mem.parallel.meshes import everywhere
from mindspeed_mem.parallel.moves import gradient_like, moved, whole
from mindspeed_mem.parallel.parts import all_whole, first, no_sums, on_parts, settled, split_in

logger = logging.getLogger(__name__)
aten = torch.ops.aten


# ---- operators that may see some splits only


def _convolution(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """Split along the batch only: torch's handler of other splits computes on the parts and calls the result whole
    (pytorch 186129, 191926), and refuses a batch split over two axes."""
    x, (rest, kwargs) = first(args, kwargs)
    weight = rest[0] if rest else kwargs["weight"]
    return on_parts(function, (x, *rest), kwargs, where, {0} if x.dim() == weight.dim() else ())


def _of_rows(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """Each row of the batch for itself, on this rank's rows: torch has no rule for it, forward or backward."""
    return on_parts(function, args, kwargs, where, {0})


def _cell(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """Of a recurrent network: each row of its input and states, which come first, for itself."""
    states = len(args[1]) if isinstance(args[1], (tuple, list)) else 1
    return on_parts(function, args, kwargs, where, {0} if args[0].dim() == 2 else (), alike=1 + states)


def _whole(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """Backward has no rule, or makes plain tensors."""
    return on_parts(function, args, kwargs, where, ())


def _element_by_element(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """On parts, however they are split: torch has no rule for backward."""
    x, in_place = args[0] if args else kwargs["input"], kwargs.get("inplace", any(one is True for one in args))
    if in_place:
        refuse_sum(x)
    args, kwargs = tuple(one for one in args if not isinstance(one, bool)), {**kwargs, "inplace": False}
    if function is F.logsigmoid:
        del kwargs["inplace"]
    result = on_parts(function, args, kwargs, where, range(x.dim()))
    return x.copy_(result) if in_place else result


def _by_element(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """On parts, however they are split, where no other tensor is to be brought in line with them."""
    x, (rest, kwargs) = first(args, kwargs)
    alike = all(not isinstance(one, torch.Tensor) for one in (*rest, *kwargs.values()))
    return on_parts(function, (x, *rest), kwargs, where, range(x.dim()) if alike else ())


def _unfold(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    dim = args[1] if len(args) > 1 else kwargs["dimension"]
    return on_parts(function, args, kwargs, where, set(range(args[0].dim())) - {dim % args[0].dim()})


def _indexed(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """By lists or tensors: on parts split along dimensions taken whole before those; torch's backward has no rule."""
    x, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    if not any(isinstance(one, (list, torch.Tensor)) for one in index):
        return function(*args, **kwargs)
    before = next(n for n, one in enumerate(index) if not (isinstance(one, slice) and one == slice(None)))
    return on_parts(function, args, kwargs, where, set(range(before)) & set(range(x.dim())))


def _attention(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """torch's composed attention of many arguments, batch by batch where nothing is masked or drawn by batch."""
    names = list(inspect.signature(function).parameters)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    drawn = given.get("dropout_p") and given.get("training", True)
    masked = given.get("key_padding_mask") is not None or given.get("attn_mask") is not None
    batched = given["query"].dim() == 3 and not drawn and not masked and not given.get("need_weights", True)
    return on_parts(function, args, kwargs, where, {1} if batched else (), alike=3)


def _normalize(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """Backward changes in place what the norm gets, and torch refuses that of a sum: by whole vectors."""
    x, (rest, kwargs) = first(args, kwargs)
    dim = kwargs.get("dim", rest[1] if len(rest) > 1 else 1)
    dims = {one % x.dim() for one in ((dim,) if isinstance(dim, int) else dim)}
    x = moved(x, split_in(x, set(range(x.dim())) - dims), where)
    return _pinned(function, (x, *rest), kwargs, where)


def _any(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """Not all are not: torch adds up what the ranks say, which is no yes or no."""
    x, (rest, kwargs) = first(args, kwargs)
    (x,) = no_sums((x,), where)
    if x.dtype is torch.uint8:
        return on_parts(function, (x, *rest), kwargs, where, ())
    return settled(torch.all(x.logical_not(), *rest, **kwargs), where).logical_not()


def _sgn(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """The gradient of a sgn that is not complex is a plain tensor."""
    x, _ = first(args, kwargs)
    return (function if x.is_complex() else torch.sign)(*args, **kwargs)


def _nansum(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """torch leaves out what is no number in a summand, and takes an empty list of dimensions for none."""
    x, (rest, kwargs) = first(args, kwargs)
    (x,) = no_sums((x,), where)
    return torch.where(x.isnan(), torch.zeros_like(x), x).sum(*rest, **kwargs)


def _of_no_sum(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    return function(*no_sums(args, where), **no_sums(kwargs, where))


def _gathered(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """Row by row only where there are as many places as rows: else torch looks in the parts of other rows."""
    x, (rest, more) = first(args, kwargs)
    dim, index = (*rest, *(more[name] for name in ("dim", "index")[len(rest) :]))
    others = set(range(x.dim())) - {dim % max(x.dim(), 1)}
    if all(x.shape[one] == index.shape[one] for one in others):
        return function(*args, **kwargs)
    return _whole(function, args, kwargs, where)


def _pooled(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """A picture without a batch has channels first: torch's rules take them for the batch."""
    x, (rest, kwargs) = first(args, kwargs)
    batched = x.dim() == (4 if function is F.avg_pool2d else 5)
    return on_parts(function, (x, *rest), kwargs, where, {0, 1} if batched else {0})


def _shuffled(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """Picture by picture: torch's backward may take a split of channels for one of rows."""
    x, (rest, kwargs) = first(args, kwargs)
    return on_parts(function, (x, *rest), kwargs, where, range(x.dim() - 3))


def _padded(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """With what lies inside, on parts split along dimensions that are not padded: torch has no rule for it."""
    x, (rest, more) = first(args, kwargs)
    if (rest[1] if len(rest) > 1 else more.get("mode", "constant")) == "constant":
        return function(*args, **kwargs)
    padded = len(rest[0] if rest else more["pad"]) // 2
    return on_parts(function, (x, *rest), more, where, range(x.dim() - padded))


def _repeated(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """As often as a tensor says: torch has no rule for it."""
    counted = any(isinstance(one, torch.Tensor) for one in (*args[1:], *kwargs.values()))
    return _whole(function, args, kwargs, where) if counted else function(*args, **kwargs)


def _pinned(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """Of no sum, and its gradient lies as it does, and is none: torch changes both in place in backward."""
    result = settled(function(*no_sums(args, where), **no_sums(kwargs, where)), where)
    return moved(result, gradient_like(result), where)


# ---- what is read, and what is changed in place


def _read(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """Of the whole tensor: torch reads this rank's part, and of a sum only this rank's summand."""
    (x,) = all_whole(args[:1], where)
    return function(x.to_local(), *args[1:], **kwargs)


def _filled(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """No sum: torch fills each summand."""
    refuse_sum(args[0])
    return function(*args, **kwargs)


def _assigned(function: Callable, args: tuple, kwargs: dict, where: str) -> None:
    """To a copy in which what is indexed is whole, and back: a view of split dimensions would be changed instead."""
    x, index, value = args
    refuse_sum(x)
    at = index if isinstance(index, tuple) else (index,)
    plain = all(isinstance(one, (int, slice)) and not isinstance(one, bool) for one in at)
    before = next((n for n, one in enumerate(at) if one != slice(None)), len(at)) if plain else 0
    if isinstance(value, torch.Tensor) and value.dim():
        like = torch.empty(x.shape, device="meta")
        if not plain or value.dim() != like[index].dim() or value.shape[:before] != x.shape[:before]:
            before = 0

    def changed(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
        x = x.clone()
        x[index] = value
        return x

    result = on_parts(changed, args, kwargs, where, range(before), alike=2)
    x.copy_(moved(result, x.placements, where))


def _changed(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """A change in place at places that tensors name, in a whole copy, and back: torch adds to each summand of a sum,
    and its backward takes this rank's part for the whole."""
    x, (rest, kwargs) = first(args, kwargs)
    refuse_sum(x)
    result = on_parts(_not_in_place(function), (x, *rest), kwargs, where, ())
    return x.copy_(moved(result, x.placements, where))


def _not_in_place(function: Callable) -> Callable:
    """``torch.dropout`` of ``torch.dropout_``."""
    name = function.__name__.rstrip("_")
    return getattr(torch.Tensor, name, None) or getattr(torch, name)


# ---- backwards that make plain tensors


def _pieces(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """Pieces nobody uses have zeros as gradients, which torch makes plain tensors."""
    made = function(*args, **kwargs)
    return type(made)(_Pieces.apply(*made))


def _unbound(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    x, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
    near = moved(x, split_in(x, set(range(x.dim())) - {dim % x.dim()}), where)
    pieces = _pieces(function, (near, dim), {}, where)
    for piece in pieces if near is not x else ():
        copied(piece, OTHERWISE)
    return pieces


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *pieces: DTensor) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*pieces)
        return tuple(piece.view_as(piece) for piece in pieces)  # type: ignore[misc]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        pairs = zip(grads, ctx.saved_tensors, strict=True)
        return tuple(torch.zeros_like(piece) if grad is None else grad for grad, piece in pairs)


def _reshaped(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """A copy where torch takes it for a view, because of strides from before a redistribution."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            raise
    return function(args[0].clone(memory_format=torch.contiguous_format), *args[1:], **kwargs)


def _product(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    x, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    kept = bool(kwargs.get("keepdim", len(args) > 2 and args[2]))
    dims = () if dim is None else range(x.dim()) if kept else range(dim % x.dim())
    return on_parts(function, args, kwargs, where, set(dims) - {dim % x.dim() if dim is not None else -1})


def _prelu(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    x, (rest, kwargs) = first(args, kwargs)
    weight = rest[0] if rest else kwargs["weight"]
    shape = [1, -1] + [1] * (x.dim() - 2)
    return torch.where(x > 0, x, x * (weight.view(shape) if weight.numel() > 1 else weight))


# ---- means over what is split unevenly, or divided by the numbers of a part


def _mean_loss(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """Element by element, and then the mean: torch's backward of a mean divides by a rank's own numbers."""
    old = [kwargs.get("size_average"), kwargs.get("reduce"), *(one for one in args if isinstance(one, (str, bool)))]
    if kwargs.get("reduction", "mean") != "mean" or any(one is not None for one in old):
        return function(*args, **kwargs)
    return settled(function(*args, **{**kwargs, "reduction": "none"}).mean(), where)


def _likelihood(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """The sum, and then divided: torch takes the mean of the ranks' means, whatever they ignored or weighed."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given = {"reduction": "mean", "ignore_index": -100, **dict(zip(names, args, strict=False)), **kwargs}
    target = given["target"]
    if given["reduction"] != "mean" or target.is_floating_point():
        return function(*args, **kwargs)
    total = settled(function(**{**given, "reduction": "sum"}), where)
    counted = target != given["ignore_index"]
    if given.get("weight") is not None:
        weight = all_whole((given["weight"],), where)[0]
        counted = counted * F.embedding(target.where(counted, 0), weight.unsqueeze(1)).squeeze(-1)
    return moved(total, [Replicate()] * total.device_mesh.ndim, where) / settled(counted.sum(), where)


# ---- random numbers


@functools.cache
def _draws_together(mesh: DeviceMesh) -> bool:
    """Whether DTensor lets the ranks draw what fits together. If not, they have to have the same random state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return is_rng_supported_mesh(mesh)


_apart: set[DeviceMesh] = set()
"""Meshes whose ranks had different random states, and were not warned of it yet."""


def _warn_of_randomness(mesh: DeviceMesh) -> None:
    if mesh in _apart:
        _apart.remove(mesh)
        if ranks.number() == 0:
            logger.warning(
                "the ranks had different random states: what they draw in forward (dropout) does not fit together; "
                "call torch.manual_seed with the same number on all of them"
            )


def _random(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """Drawn for the whole tensor on all ranks, of which each takes its part."""
    x, (rest, more) = first(args, kwargs)
    if _draws_together(x.device_mesh) or not _trains(function, args, kwargs):
        return function(*args, **kwargs)
    _warn_of_randomness(x.device_mesh)
    if kwargs.get("inplace"):
        refuse_sum(x)
        return x.copy_(moved(on_parts(function, args, {**kwargs, "inplace": False}, where, ()), x.placements, where))
    if function in _MASKS_IN_PLACE:
        return _changed(function, args, kwargs, where)
    if function not in _BY_SHAPE:
        result = on_parts(function, args, kwargs, where, ())
        alike = isinstance(result, DTensor) and result.shape == x.shape
        return moved(result, gradient_like(x), where) if alike else result
    like = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    drawn = whole(function(like, *rest, **more), x.device_mesh)
    if function.__name__.endswith("_"):
        refuse_sum(x)
        return x.copy_(moved(drawn, x.placements, where))
    return moved(drawn, gradient_like(x), where)


def _trains(function: Callable, args: tuple, kwargs: dict) -> bool:
    try:
        given = inspect.signature(function).bind(*args, **kwargs)
    except ValueError:  # C functions have none, and always draw
        return True
    given.apply_defaults()
    return given.arguments.get("training", True)


_BY_SHAPE: tuple[Callable, ...] = (
    *(inspect.unwrap(one) for one in (torch.rand_like, torch.randn_like, torch.randint_like)),  # the pack may wrap them
    *(torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.exponential_, torch.Tensor.random_),
    *(torch.Tensor.geometric_, torch.Tensor.cauchy_, torch.Tensor.log_normal_),
)
"""What draws whatever numbers the tensor has. (``bernoulli_`` may take a tensor.)"""
_MASKS_IN_PLACE = (
    torch.dropout_,
    torch.alpha_dropout_,
    torch.feature_dropout_,
    torch.feature_alpha_dropout_,
    torch.rrelu_,
)


def _scaled_dot_product(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """With dropout, as torch composes it where no kernel does: so the masks are those of one device."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, **dict(zip(names, args, strict=False)), **kwargs}
    query, key, mask, value = given["query"], given["key"], given["attn_mask"], given["value"]
    if _draws_together(query.device_mesh) or not given["dropout_p"] and mask is None:
        return function(*args, **kwargs)
    if not given["dropout_p"]:  # torch's rules for the CPU know of no mask
        alike = [dim for dim in (0, 1) if query.dim() == 4 and query.shape[dim] == key.shape[dim] == value.shape[dim]]
        dims = {dim for dim in alike if mask.dim() < 4 - dim or mask.shape[dim - 4] == 1}
        more = {name: one for name, one in given.items() if name not in names[:3]}
        return on_parts(function, (query, key, value), more, where, dims, alike=3)
    if given.get("enable_gqa"):
        key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
    scores = query @ key.transpose(-2, -1) * (given.get("scale") or query.shape[-1] ** -0.5)
    if given["is_causal"]:
        plain = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.to_local().device)
        mask = whole(plain.tril(), query.device_mesh)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(mask.logical_not(), float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return _dropout(F.dropout, (scores.softmax(-1), given["dropout_p"]), {}, where) @ value


def _dropout(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """On devices where DTensor draws on each rank for itself: the same mask on all, of which each takes its part."""
    names = ("input", "p", "train" if function is torch.dropout else "training", "inplace")
    given = {"p": 0.5, "training": True, "inplace": False, **dict(zip(names, args, strict=False)), **kwargs}
    given["training"] = given.pop("train", given["training"])
    x, draws = given["input"], given["training"] and given["p"] > 0
    if draws and given["inplace"]:
        refuse_sum(x)
    if not draws or _draws_together(x.device_mesh):
        return function(*args, **kwargs)
    x = moved(x, gradient_like(x), where)
    _warn_of_randomness(x.device_mesh)
    mask = torch.empty(x.shape, dtype=x.dtype, device=x.to_local().device).bernoulli_(1 - given["p"])
    if given["p"] < 1:
        mask.div_(1 - given["p"])
    mask = moved(whole(mask, x.device_mesh), x.placements, where)
    return x.mul_(mask) if given["inplace"] else x * mask


def _both(names: str, instead: Callable) -> dict[Callable, Callable]:
    """For functions of torch and methods of these names."""
    found = (getattr(owner, name, None) for owner in (torch, torch.Tensor) for name in names.split())
    return dict.fromkeys(filter(None, found), instead)


INSTEAD: dict[Callable, Callable] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d, torch.convolution), _convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _convolution),
    **dict.fromkeys((F.group_norm, torch.group_norm, F.unfold, F.fold), _of_rows),
    **dict.fromkeys((F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d), _of_rows),
    **dict.fromkeys((F.max_pool3d, F.adaptive_avg_pool3d), _of_rows),
    **dict.fromkeys((F.avg_pool2d, F.avg_pool3d), _pooled),
    **dict.fromkeys((F.pixel_shuffle, F.pixel_unshuffle, torch.pixel_shuffle, torch.pixel_unshuffle), _shuffled),
    **dict.fromkeys((F.logsigmoid, F.hardsigmoid, F.hardswish, F.hardtanh, F.relu6), _element_by_element),
    **dict.fromkeys((F.hardshrink, F.softshrink), _by_element),
    **_both("__lshift__ __rshift__ bitwise_left_shift bitwise_right_shift", _by_element),
    **_both("any", _any),
    **_both("sgn", _sgn),
    **_both("nansum", _nansum),
    **_both("nanmean", _of_no_sum),
    **_both("gather", _gathered),
    **_both("repeat_interleave", _repeated),
    F.pad: _padded,
    torch.Tensor.unfold: _unfold,
    torch._weight_norm: _whole,
    **dict.fromkeys((torch.trace, torch.Tensor.trace, torch.cumprod, torch.Tensor.cumprod), _whole),
    **dict.fromkeys((torch.quantile, torch.Tensor.quantile, torch.nanquantile, torch.Tensor.nanquantile), _whole),
    **_both("take put index_put index_add index_copy scatter_add scatter_reduce masked_scatter masked_select", _whole),
    **_both("nonzero argwhere bincount unique_consecutive histogram searchsorted allclose _is_all_true", _whole),
    **_both("slice_scatter select_scatter diagonal_scatter copysign cdist renorm addbmm", _whole),
    **dict.fromkeys((torch.polar, torch.combinations, torch.block_diag, torch.affine_grid_generator), _whole),
    **dict.fromkeys((F.pdist, torch.pdist, F.affine_grid, F.multi_margin_loss, F.multilabel_margin_loss), _whole),
    **dict.fromkeys((F.multilabel_soft_margin_loss, F.hinge_embedding_loss, F.ctc_loss), _whole),
    **dict.fromkeys((torch.linalg.lstsq, torch.special.multigammaln, torch.mvlgamma, torch.segment_reduce), _whole),
    **_both(
        "put_ index_put_ index_add_ index_copy_ index_fill_ scatter_add_ scatter_reduce_ masked_scatter_", _changed
    ),
    **dict.fromkeys((torch.gru_cell, torch.lstm_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell), _cell),
    **dict.fromkeys((torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu), _whole),
    **dict.fromkeys((torch.embedding_bag, F.embedding_bag, torch.bilinear, F.bilinear), _whole),
    **dict.fromkeys((torch.unique, torch.Tensor.unique), _whole),
    F.cosine_embedding_loss: _whole,  # torch takes square roots of sums not yet made
    **dict.fromkeys((torch.cummax, torch.Tensor.cummax, torch.cummin, torch.Tensor.cummin), _whole),
    **dict.fromkeys((torch.reshape, torch.Tensor.reshape, torch.flatten, torch.Tensor.flatten), _reshaped),
    torch.Tensor.__getitem__: _indexed,
    **dict.fromkeys((torch.prod, torch.Tensor.prod), _product),
    **dict.fromkeys((torch.prelu, F.prelu), _prelu),
    **dict.fromkeys((torch.split, torch.Tensor.split, torch.functional.split), _pieces),
    **dict.fromkeys((torch.chunk, torch.Tensor.chunk, torch.tensor_split, torch.Tensor.tensor_split), _pieces),
    **dict.fromkeys((torch.unbind, torch.Tensor.unbind), _unbound),
    F.multi_head_attention_forward: _attention,
    **dict.fromkeys((F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss), _mean_loss),
    **dict.fromkeys((F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.l1_loss), _mean_loss),
    **dict.fromkeys((F.cross_entropy, F.nll_loss), _likelihood),
    F.rms_norm: norms.rms_norm,
    F.normalize: _normalize,
    **dict.fromkeys((torch.norm, torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm), _pinned),
    torch.linalg.matrix_norm: _pinned,
    **dict.fromkeys((torch.dist, torch.Tensor.dist, F.cosine_similarity), _pinned),
    F.batch_norm: norms.batch_norm,
    F.instance_norm: norms.instance_norm,
    torch.Tensor.__setitem__: _assigned,
    torch.Tensor.fill_: _filled,
    **dict.fromkeys((torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__float__), _read),
    **dict.fromkeys((torch.Tensor.__int__, torch.Tensor.__bool__, torch.Tensor.__index__), _read),
    **dict.fromkeys((*_BY_SHAPE, torch.bernoulli, torch.Tensor.bernoulli, torch.multinomial, torch.normal), _random),
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout), _random),
    **dict.fromkeys((F.rrelu, F.gumbel_softmax, torch.rrelu, *_MASKS_IN_PLACE), _random),
    **dict.fromkeys((torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout), _random),
    **dict.fromkeys((torch.native_dropout, torch.poisson, torch.binomial), _random),
    **dict.fromkeys((torch._standard_gamma, torch._sample_dirichlet), _random),
    **dict.fromkeys((F.dropout, torch.dropout), _dropout),
    F.scaled_dot_product_attention: _scaled_dot_product,
}
"""What runs in place of a torch function on DTensors: ``(function, args, kwargs, where) -> result``."""


# ---- rules that torch has not


def _batch_or_heads(inputs: int, outputs: int, dims: Collection[int], after: int) -> Callable:
    """Whole, or all split alike along one of `dims`: `inputs` tensors come first, then what is no tensor.

    after: so many dimensions come after these; where there are fewer, they are others.
    """

    def rule(*args: Any, **kwargs: Any) -> Any:
        rest = [None] * (len(args) - inputs)
        missing = max(dims) + 1 + after - len(args[0].shape)
        choices: list[Any] = [Replicate(), *(Shard(dim - missing) for dim in dims if dim >= missing)]
        return [([one] * outputs, [*[one] * inputs, *rest]) for one in choices]

    return rule


_RULES = {
    "_scaled_dot_product_flash_attention_for_cpu": (3, 2, (0, 1), 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (6, 3, (0, 1), 2),
    "avg_pool2d_backward": (2, 1, (0, 1), 2),
    "avg_pool3d_backward": (2, 1, (0, 1), 3),
}
"""Inputs, outputs, along which dimensions both may be split, and how many come after these."""


def compare_random_states(mesh: DeviceMesh) -> None:
    """Note, for a warning at the first draw, where the ranks' are not the same. Collective."""
    if not _draws_together(mesh):
        state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        if len(everywhere({"state": state}, mesh)["state"]) > 1:
            _apart.add(mesh)


def register() -> None:
    """Give DTensor the rules that it has not, and let it choose as it should; what is right stays."""
    propagation.correct()
    propagator = DTensor._op_dispatcher.sharding_propagator
    for name, about in _RULES.items():
        operator = getattr(aten, name).default
        if operator not in propagator.op_strategy_funcs and not _has_single(propagator, operator):
            register_sharding(operator)(_batch_or_heads(*about))


def _has_single(propagator: Any, operator: Any) -> bool:
    return operator in getattr(propagator, "op_single_dim_strategy_funcs", ())
