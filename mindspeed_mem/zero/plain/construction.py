"""A tape of what a model's construction would have computed, from which any one tensor can be computed alone.

Inside `Recorder` and `Disguise` the host's new tensors are on torch's meta device, without content, though they say
that they are on the host. Every operator on them is noted, random ones with the state of the generator; the generator
itself advances as if all had been computed. (A tensor's worth of numbers is drawn and thrown away at once.) A value
is found by repeating the operators that wrote a tensor's storage, and what these needed, in order. The idea is that of
torchdistX's deferred initialisation (Meta, 2022).

Tensors are known by storage, offset and strides, so that views need no notes of their own.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from mindspeed_mem.device import is_host_device
from mindspeed_mem.device.op_rules import written_arguments

_HOST, _META = torch.device("cpu"), torch.device("meta")


class _Where(NamedTuple):
    """A tensor as a view of a storage on the tape."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool
    """Both are flags of a view: torch changes values only when somebody reads them."""


@dataclass
class _Note:
    """One operator."""

    op: Any
    args: tuple
    kwargs: dict[str, Any]
    """With a `_Where` in the place of each meta tensor."""
    reads: set[int]
    made: list[_Where | None]
    """Its results that have storages of their own."""
    random: tuple[torch.Generator, torch.Tensor] | None = None
    """The generator that it draws from, and its state before."""


@dataclass
class Construction:
    """What was noted, in order."""

    notes: list[_Note] = field(default_factory=list)
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    """All on the tape, so that none of their numbers is used again."""
    writers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Storage -> the notes that write to it."""
    replaying: bool = False
    """Whether values are being computed now: with real tensors, of which nothing is noted."""

    def knows(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.storages

    @torch.no_grad()
    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new host tensor: what the meta tensor `tensor` would hold by now. Random generators stay as they are."""
        before, self.replaying = self.replaying, True
        try:
            return self._view(self._where(tensor), self._replayed({tensor.untyped_storage()._cdata})).clone()
        finally:
            self.replaying = before

    def note(self, op: Any, args: tuple, kwargs: dict, result: Any, generator: torch.Generator | None) -> None:
        """`op` has run on meta tensors."""
        reads = {one.untyped_storage()._cdata for one in _meta_tensors((args, kwargs))}
        for one in _meta_tensors((args, kwargs, result)):
            self.storages.setdefault(one.untyped_storage()._cdata, one.untyped_storage())
        made = [
            self._where(one) if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in reads else None
            for one in tree_flatten(result)[0]
        ]
        writes = {one.storage for one in made if one} | {
            one.untyped_storage()._cdata for one in _changed(op, args, kwargs)
        }
        if not writes:
            return  # a view
        random = None if generator is None else (generator, generator.get_state())
        args, kwargs = tree_map(self._kept, (args, kwargs))
        for storage in writes:
            self.writers[storage].append(len(self.notes))
        self.notes.append(_Note(op, args, kwargs, reads, made, random))

    # ---- inside

    def _replayed(self, wanted: set[int]) -> dict[int, torch.Tensor]:
        """The storages `wanted` with their content, as flat tensors of bytes, by number."""
        chosen: set[int] = set()
        seen: dict[int, int] = {}
        todo = [(storage, len(self.notes)) for storage in wanted]
        while todo:
            storage, before = todo.pop()
            if seen.get(storage, -1) >= before:
                continue
            seen[storage] = before
            for number in self.writers.get(storage, ()):
                if number < before and number not in chosen:
                    chosen.add(number)
                    todo += [(read, number) for read in self.notes[number].reads]
        real: dict[int, torch.Tensor] = {}
        for number in sorted(chosen):
            self._repeat(self.notes[number], real)
        return real

    def _repeat(self, note: _Note, real: dict[int, torch.Tensor]) -> None:
        args, kwargs = tree_map(
            lambda one: self._view(one, real) if isinstance(one, _Where) else one,
            (note.args, note.kwargs),
            is_leaf=lambda one: isinstance(one, _Where),
        )
        with contextlib.nullcontext() if note.random is None else _as_of(*note.random):
            result = note.op(*args, **kwargs)
        for where, tensor in zip(note.made, tree_flatten(result)[0], strict=True):
            if where is not None:
                self._view(where, real).copy_(tensor)

    def _view(self, where: _Where, real: dict[int, torch.Tensor]) -> torch.Tensor:
        if where.storage not in real:
            nbytes = self.storages[where.storage].nbytes()
            real[where.storage] = torch.empty(nbytes, dtype=torch.uint8, device=_HOST)
        viewed = torch.empty(0, dtype=where.dtype, device=_HOST)
        viewed.set_(real[where.storage].untyped_storage(), where.offset, where.size, where.stride)
        viewed = viewed.conj() if where.conjugate else viewed
        return torch._neg_view(viewed) if where.negative else viewed

    def _where(self, tensor: torch.Tensor) -> _Where:
        storage = tensor.untyped_storage()._cdata
        return _Where(
            storage,
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def _kept(self, one: Any) -> Any:
        """An argument as a note keeps it: real tensors as copies, since they may change later."""
        if isinstance(one, torch.Tensor):
            return self._where(one) if _is_meta(one) else one.detach().clone()
        return _on_host(one)


class Recorder(TorchDispatchMode):
    """Notes on `tape` what happens to meta tensors."""

    def __init__(self, tape: Construction) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.tape.replaying:
            return op(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():  # here tensors say where they really are
            return self._note(op, args, kwargs or {})

    def _note(self, op: Any, args: tuple, kwargs: dict) -> Any:
        known = any(self.tape.knows(one) for one in _meta_tensors((args, kwargs)))
        changed = _changed(op, args, kwargs)
        if known and any(not _is_meta(one) for one in changed):
            return op(*self._real(args), **self._real(kwargs))  # content is copied out
        shadows, given = tree_map(_to_meta, (args, kwargs)) if known else (args, kwargs)
        if any(one.name == "device" for one in op._schema.arguments) and (known or not _tensors((args, kwargs))):
            device = given.get("device")
            given = given | {"device": _META if is_host_device(device) else device}
        try:
            result = op(*shadows, **given)
        except (NotImplementedError, RuntimeError):
            if not known or changed:
                raise
            return op(*self._real(args), **self._real(kwargs))  # its result depends on content
        if not any(True for _ in _meta_tensors((args, kwargs, result))):
            return result
        generator = None
        if torch.Tag.nondeterministic_seeded in op.tags:
            generator = kwargs.get("generator") or torch.default_generator
        self.tape.note(op, args, kwargs, result, generator)
        if generator is not None:
            self._draw(op, args, kwargs)
        return result

    def _real(self, tree: Any) -> Any:
        return tree_map(lambda one: self.tape.value(one) if _is_meta(one) else _on_host(one), tree)

    def _draw(self, op: Any, args: tuple, kwargs: dict) -> None:
        """Let the generator advance by as much as `op` takes."""
        changed = {id(one) for one in _changed(op, args, kwargs)}

        def stand_in(one: Any) -> Any:
            if id(one) in changed:
                return torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=_HOST)
            return self.tape.value(one) if _is_meta(one) else _on_host(one)

        op(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))


class Disguise(TorchFunctionMode):
    """Tensors on a tape say that they are on the host: others leave meta tensors out, torch.nn.init among them."""

    def __init__(self, tape: Construction) -> None:
        super().__init__()
        self._tape = tape
        self._reads = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
        says = {"is_meta": False, "is_cpu": True, "device": _HOST}
        self._says = {getattr(torch.Tensor, name).__get__: value for name, value in says.items()}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self._tape.replaying:
            return func(*args, **(kwargs or {}))
        if func in self._says and self._tape.knows(args[0]):
            return self._says[func]
        if func is torch.Tensor.__deepcopy__ and type(args[0]) is torch.Tensor:
            # torch would copy the storage without an operator, into one that it takes for one on the host.
            copied = args[1][id(args[0])] = args[0].detach().clone().requires_grad_(args[0].requires_grad)
            return copied
        if func in self._reads and self._tape.knows(args[0]):
            args = (self._tape.value(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _as_of(generator: torch.Generator, state: torch.Tensor) -> Iterator[None]:
    """Inside, `generator` goes on from `state`; afterwards it is as it was."""
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


def _changed(op: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that `op` changes in place."""
    return _tensors(written_arguments(op, args, kwargs))


def _to_meta(one: Any) -> Any:
    if not isinstance(one, torch.Tensor) or _is_meta(one):
        return one
    return torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device="meta")


def _is_meta(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.device.type == "meta"


def _on_host(one: Any) -> Any:
    return _HOST if isinstance(one, torch.device) and one.type == "meta" else one


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _meta_tensors(tree: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_flatten(tree)[0]:
        if _is_meta(leaf):
            yield leaf
