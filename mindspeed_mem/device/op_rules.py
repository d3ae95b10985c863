"""Which operators may run again after memory ran out inside them: what they do must not be done twice.

| operator | out of memory inside it |
|---|---|
| makes new tensors | runs again; a random one from the random state that it began with |
| writes its arguments, each element from what was there (add_, index_add_, addmm_) | runs again: these allocate first |
| overwrites its arguments (out=) | runs again, unless it reads them, too, or has to resize them |
| works through lists of tensors (_foreach_add_, _fused_adam_) | is run tensor by tensor, so that each runs once |
| writes arguments that its schema does not call mutable (running statistics, what a cuDNN cell keeps) | fails |
| collective, on distributed tensors, of an unknown library, or writes its arguments in another way | fails |
| asks for pinned host memory | is none of the device's concern, see `pins` |
"""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from mindspeed_mem.device import DEVICES, collectives, onednn, refill

# Whose operators only compute (also those of their namespaces' variants, such as flash_attn_3).
_COMPUTE = ("aten", "prims", "flash_attn", "xformers", *(name for row in DEVICES.values() for name in row.operators))
_COMMUNICATES = ("all_reduce", "all_gather", "all_to_all", "alltoall", "reduce_scatter", "distribute")
_LISTS = ("_foreach_", "_fused_", "_amp_foreach_")
# They allocate all they need before they write anything; pointwise operators (which torch marks as such) do, too.
_ALLOCATE_FIRST = frozenset(
    "add_ sub_ mul_ div_ addmm_ addmv_ addr_ baddbmm_ copy_ fill_ zero_ masked_fill_ masked_scatter_ clamp_ "
    "index_put_ _index_put_impl_ index_add_ index_copy_ index_fill_ scatter_ scatter_add_ "
    "put_ tril_ triu_ cumsum_ cumprod_ normal_ uniform_ bernoulli_ random_ exponential_ geometric_ "
    "log_normal_ cauchy_ as_strided_ squeeze_ unsqueeze_ transpose_ t_ detach_ requires_grad_".split()
)
# They write what their schemas do not call mutable: the first argument named, where it and all others are given and
# true. Some are seen whole in inference mode only. Read in torch's kernels; which backwards overwrite what forward
# reserved for them shows in derivatives.yaml, which hands them a copy of it (retain_variables).
_UNSEEN = {
    "batch_norm": ("running_mean", "training"),
    "_batch_norm_impl_index": ("running_mean", "training"),
    "native_batch_norm": ("running_mean", "training"),
    "cudnn_batch_norm": ("running_mean", "training"),
    "miopen_batch_norm": ("running_mean", "training"),
    "instance_norm": ("running_mean", "use_input_stats"),
    "batch_norm_update_stats": ("running_mean",),
    "batch_norm_gather_stats": ("running_mean",),
    "batch_norm_gather_stats_with_counts": ("running_mean",),
    "batch_norm_gather_stats_update": ("running_mean",),  # of torch_npu
    "_cudnn_rnn_backward": ("reserve",),
    "miopen_rnn_backward": ("reserve",),
}
# The same, but all is allocated before a library writes.
_UNSEEN_BY_LIBRARY = {
    "_cudnn_rnn": ("dropout_state", "train", "dropout"),
    "miopen_rnn": ("dropout_state", "train", "dropout"),
    "cudnn_batch_norm_backward": ("reserveSpace",),
    "batch_norm_backward": ("reserve",),
}
_PINS = frozenset((torch.ops.aten._pin_memory.default, torch.ops.aten.pin_memory.default))


class Rule(Enum):
    AGAIN = "runs again"
    APART = "its tensors one by one"
    OVERWRITES = "runs again unless it reads what it writes, or resizes it"
    COLLECTIVE = "is a collective, which other ranks take part in"
    UNSEEN = "runs again unless it has arguments that it changes unseen by its schema"
    UNSURE = "changes its arguments, perhaps in part already"
    UNKNOWN = "is none of torch's own: it may communicate with other ranks"


@functools.cache
def rule_of(op: Any) -> Rule:
    """What may be done when memory runs out inside `op`."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return Rule.UNKNOWN
    name = schema.name.partition("::")[2]
    if _of(op, collectives.NAMESPACES) or (
        not _of(op, ("aten", "prims")) and any(word in name for word in _COMMUNICATES)
    ):
        return Rule.COLLECTIVE
    if op.namespace == refill.NAMESPACE:
        return Rule.AGAIN
    if not _of(op, _COMPUTE):
        return Rule.UNKNOWN
    if name in _UNSEEN:  # also where it has out=
        return Rule.UNSEEN
    if not schema.is_mutable:
        return Rule.AGAIN
    if op.namespace != "aten":
        return Rule.UNSURE
    if name.startswith(_LISTS):
        return Rule.APART
    if all(argument.is_out for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write):
        return Rule.OVERWRITES
    if name in _ALLOCATE_FIRST or torch.Tag.pointwise in op.tags:
        return Rule.AGAIN
    return Rule.UNSURE


def _of(op: Any, namespaces: tuple[str, ...]) -> bool:
    return any(op.namespace == name or op.namespace.startswith(name + "_") for name in namespaces)


def why_not(op: Any, args: tuple, kwargs: dict) -> str:
    """Why `op`, which has just failed, cannot run again; empty if it can."""
    rule = rule_of(op)
    # With out= it would have to be looked at what the other rules look at, too, for calls that hardly anybody makes.
    if rule is Rule.UNSEEN and (op._schema.is_mutable or _writes_unseen(_UNSEEN, op, args, kwargs)):
        return Rule.UNSURE.value
    if rule is Rule.OVERWRITES:
        written = [leaf for leaf in tree_iter([kwargs.get(a.name) for a in op._schema.arguments if a.is_out])]
        others = (args, [value for key, value in kwargs.items() if not any(value is w for w in written)])
        targets = {storage_of(leaf) for leaf in written} - {None}
        if any(storage_of(leaf) in targets for leaf in tree_iter(others)) or not all(map(_has_its_memory, written)):
            return Rule.UNSURE.value
    if rule not in (Rule.COLLECTIVE, Rule.UNSURE, Rule.UNKNOWN):
        communicates = any(type(leaf).__module__.startswith("torch.distributed") for leaf in tree_iter((args, kwargs)))
        return "works on distributed tensors: it may have communicated" if communicates else ""
    return rule.value


def why_computed(op: Any, error: Exception) -> str:
    """Why `op` cannot run again if another kernel has computed it to the end; empty if it can."""
    if not isinstance(error, onednn.FellBackError) or not op._schema.is_mutable or rule_of(op) is Rule.OVERWRITES:
        return ""
    return "has changed its arguments already"


def why_begun(op: Any, args: tuple, kwargs: dict) -> str:
    """Why `op` cannot run again after a library in it has found no memory; empty if it can.

    Operators that allocate first have asked torch's allocator first: a library may be called later, between kernels.
    """
    again = rule_of(op) is Rule.OVERWRITES or torch.Tag.pointwise in op.tags
    changes = op._schema.is_mutable or _writes_unseen(_UNSEEN_BY_LIBRARY, op, args, kwargs)
    return Rule.UNSURE.value if changes and not again else ""


def _writes_unseen(table: dict[str, tuple[str, ...]], op: Any, args: tuple, kwargs: dict) -> bool:
    conditions = table.get(op._schema.name.partition("::")[2])
    if conditions is None:
        return False
    given = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | kwargs
    values = [given.get(name) for name in conditions]
    return all(bool(value.numel()) if isinstance(value, torch.Tensor) else bool(value) for value in values)


def pins(op: Any, kwargs: dict) -> bool:
    """Whether `op` asks for pinned host memory. Where that has run out, the driver's words are those for its device,
    but room on the device is of no use: making it would fill the host further."""
    return op in _PINS or bool(kwargs and kwargs.get("pin_memory"))


def _has_its_memory(leaf: Any) -> bool:
    """False for an output that has got its new size, but not the memory for it: run again, the operator would not
    notice and write beyond the end."""
    if not isinstance(leaf, torch.Tensor) or not leaf.numel():
        return True
    last = leaf.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True)
    )
    return (last + 1) * leaf.element_size() <= leaf.untyped_storage().nbytes()


def written_arguments(op: Any, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """Those of the arguments given that `op` writes to, by its schema: tensors, and lists of them."""
    given = ((place, name) for place, name in written_places(op) if place < len(args) or name in kwargs)
    return [args[place] if place < len(args) else kwargs[name] for place, name in given]


@functools.cache
def written_places(op: Any) -> tuple[tuple[int, str], ...]:
    schema = getattr(op, "_schema", None)  # higher-order operators have none
    if schema is None or not schema.is_mutable:
        return ()
    arguments = enumerate(schema.arguments)
    return tuple((place, one.name) for place, one in arguments if one.alias_info and one.alias_info.is_write)


def storages(args: tuple, kwargs: dict) -> set[int]:
    """The ``_cdata`` of all storages that an operator with these arguments works on."""
    return {storage for leaf in tree_iter((args, kwargs)) if (storage := storage_of(leaf)) is not None}


def storage_of(leaf: Any) -> int | None:
    """The ``_cdata`` of its storage; None for what is no tensor, or has no memory of its own."""
    if not isinstance(leaf, torch.Tensor):
        return None
    try:
        return leaf.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # subclasses without memory of their own
        return None
