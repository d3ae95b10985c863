"""Dispatch modes that leave autograd's choices alone: a mode alone makes torch compute some gradients in another way.

torch's backward formulas of a few operators ask whether any dispatch mode is on (`areAnyTensorSubclassLike` in its
FunctionsManual.cpp), and if so avoid what a tensor subclass could not do: the gradients' last bits are others. So our
modes are off while such a node of the graph runs. Found by comparing the operators that run, with a mode and without,
over all of torch's own samples (`op_db`, torch 2.13); the many formulas that differ only in writing a new tensor where
they would write in place give the same bits, and stay under the mode.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_iter

_CHOOSE = frozenset(
    "prod.default prod.dim_int cumprod.default cumprod_.default masked_fill.Tensor masked_fill_.Tensor max.default "
    "min.default median.default nanmedian.default linalg_eig.default _linalg_eigh.default ormqr.default "
    "linalg_householder_product.default".split()
)


class FormulaKeepingMode(TorchDispatchMode):
    """A mode that may be on in backward. It defines `operator` in the place of ``__torch_dispatch__``."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[torch.Tensor, int]] = []  # their nodes are known only when the next operator runs

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled under it (else torch.compile, and so Megatron's jit_fuser, gives up); what
        they do is out of its sight."""
        return True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._made:
            self._settle()
        result = self.operator(op, args, kwargs)
        if chooses(op) and torch.is_grad_enabled():
            given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if any(leaf.requires_grad for leaf in given):
                self._made.append((next(iter(tree_iter(result))), sum(leaf.nbytes for leaf in given)))
        return result

    def __exit__(self, *error: Any) -> None:
        self._settle()
        super().__exit__(*error)

    def operator(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """An operator runs: what it is to return."""
        raise NotImplementedError

    def before_unseen(self, nbytes: int, gradients: tuple) -> None:
        """A node is about to run out of this mode's sight; its operator was given ``nbytes`` in forward."""

    def _settle(self) -> None:
        """Have the nodes of what was made switch this mode off."""
        while self._made:
            made, nbytes = self._made.pop()
            node = (made if made._base is None else made._base).grad_fn  # changed in place, a view's node is its base's
            if node is not None:
                node.register_prehook(functools.partial(self._switch_off, nbytes))

    def _switch_off(self, nbytes: int, gradients: tuple) -> None:
        # Only for this node: autograd gives each one the modes that were on where backward began.
        stack = _get_current_dispatch_mode_stack()
        if self in stack:
            self.before_unseen(nbytes, gradients)
            above = stack[stack.index(self) + 1 :]
            for _ in range(len(above) + 1):
                _pop_mode()
            for mode in above:
                _push_mode(mode)


@functools.cache
def chooses(op: Any) -> bool:
    """Whether the backward of ``op`` looks at dispatch modes and gives other bits under one."""
    return op.namespace == "aten" and op.__name__ in _CHOOSE
