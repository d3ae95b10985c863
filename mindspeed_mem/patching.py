"""The patch registry: declare, apply, verify, undo. It knows nothing of Megatron.

A patch names one upstream symbol as ``module:dotted.name`` and either goes around it (`around`) or takes its place
(`replace`). Applying it rebinds the symbol on its owner and wherever ``from module import name [as other]`` copied it;
when the module is not imported yet, this happens right after its import, before the importer binds any name.

What it cannot reach: copies held by closures, partials, default arguments and already built ``ModuleSpec`` objects.
So patches name functions and methods, not classes that others hold.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import wrapt

logger = logging.getLogger(__name__)

_MISSING = object()


class PatchError(RuntimeError):
    """A patch cannot be applied or undone as declared; the message names the symbol and the reason."""


@dataclass(eq=False)
class Patch:
    """One upstream symbol and what goes around it or takes its place."""

    target: str
    """``module:dotted.name``"""
    function: Any
    """Called as ``function(original, *args, **kwargs)``; for ``kind="replace"`` the new value itself."""
    kind: str = "around"
    upstream: frozenset[str] = frozenset()
    """Hashes (`source_hash`) of the upstream sources this patch was written against; empty: not checked."""
    optional: bool = False
    """A missing symbol gives the status ``absent`` instead of an error."""
    status: str = "declared"
    """``declared``, ``waiting`` (module not imported yet), ``applied``, ``absent`` or ``undone``."""
    notes: list[str] = field(default_factory=list)
    declared_by: str = ""

    _owner: Any = None
    _name: str = ""
    _found: Any = None
    _ours: Any = None
    _inherited: bool = False

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    def resolve(self) -> tuple[Any, str, Any]:
        """The owner (module or class), the attribute's name and its raw value now.

        Resolved through ``sys.modules``: ``megatron.core.distributed.finalize_model_grads`` taken as an attribute is a
        function of that name, not the module.
        """
        if self._owner is not None:
            return self._owner, self._name, _raw(self._owner, self._name)
        return wrapt.resolve_path(sys.modules[self.module], self.target.partition(":")[2])

    def install(self) -> tuple[Any, Any] | None:
        """Patch the owner; return (old, new) when copies in other modules have to follow."""
        if self.status != "waiting":
            return None
        self.notes.clear()
        try:
            owner, name, found = self.resolve()
        except AttributeError as error:
            if not self.optional:
                raise PatchError(f"{self.target} does not exist in the installed version") from error
            self.status = "absent"
            return None
        self._owner, self._name, self._found = owner, name, found
        self._inherited = isinstance(owner, type) and name not in vars(owner)
        self._ours = self._build(found)
        setattr(owner, name, self._ours)
        self.status = "applied"
        logger.debug("patched %s", self.target)
        return (found, self._ours) if isinstance(owner, ModuleType) else None

    def uninstall(self) -> tuple[Any, Any] | None:
        """Restore the owner; return (old, new) for the copies. Refuses when another wrapper is on top."""
        if self.status != "applied":
            self.status = "undone"
            return None
        owner, name = self._owner, self._name
        now = self.resolve()[2]
        if now is not self._ours:
            raise PatchError(f"{self.target}: {_origin(now)} patched on top of it, so this patch cannot be undone")
        if self._inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, self._found)
        self.status = "undone"
        return (self._ours, self._found) if isinstance(owner, ModuleType) else None

    def verify(self) -> str:
        """The status, and for an applied patch who sits on top of it, or to whom it was lost."""
        if self.status != "applied":
            return self.status
        try:
            now = self.resolve()[2]
        except AttributeError:
            return "LOST: the symbol is gone"
        if now is self._ours:
            return "applied"
        link, seen = now, 0
        while link is not None and seen < 100:
            if link is self._ours or link is getattr(self._ours, "__func__", _MISSING):
                return f"applied, beneath {_origin(now)}"
            link, seen = getattr(link, "__wrapped__", None), seen + 1
        return f"LOST to {_origin(now)}"

    def _build(self, found: Any) -> Any:
        if self.kind == "replace":
            return self.function
        original = getattr(found, "__func__", found)
        self._check(original)
        ours = _around(self.function, original)
        return type(found)(ours) if isinstance(found, (staticmethod, classmethod)) else ours

    def _check(self, original: Callable) -> None:
        """Hard: the parameters our function names lead upstream's. Soft: upstream's source is a known one."""
        try:
            theirs = list(inspect.signature(original).parameters.values())
        except (TypeError, ValueError):  # C functions have none
            return
        ours = list(inspect.signature(self.function).parameters.values())[1:]
        named = [p.name for p in ours if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.KEYWORD_ONLY)]
        variadic = any(p.kind is p.VAR_POSITIONAL for p in theirs)
        if not variadic and named != [p.name for p in theirs][: len(named)]:
            raise PatchError(
                f"{self.target} no longer begins with ({', '.join(named)}): found "
                f"({', '.join(p.name for p in theirs)}). Use a supported version of {self.module.partition('.')[0]}"
            )
        if self._owner is None or isinstance(self._owner, ModuleType):
            if _origin(original) != self.module and not _origin(original).startswith("mindspeed_mem.patches"):
                self.notes.append(f"on top of {_origin(original)}")
        if self.upstream:
            hashed = source_hash(inspect.unwrap(original))
            if hashed not in self.upstream:
                self.notes.append(f"drifted: upstream source is {hashed}")
                logger.warning(
                    "%s: upstream's source (%s) is not one this patch was written against", self.target, hashed
                )


class Registry:
    """All patches declared in this process, in the order of declaration."""

    def __init__(self) -> None:
        self.patches: list[Patch] = []
        self._applied: list[Patch] = []  # in the order of application: undone backwards

    def declare(self, patch: Patch) -> Patch:
        key = (patch.target, patch.declared_by, patch.kind)
        for known in self.patches:
            if key == (known.target, known.declared_by, known.kind) and known.function is patch.function:
                return known
        self.patches.append(patch)
        return patch

    def of(self, modules: Iterable[str] | None) -> list[Patch]:
        """The patches declared by these patch modules; ``None`` for all."""
        wanted = None if modules is None else set(modules)
        return [p for p in self.patches if wanted is None or p.declared_by in wanted]

    def apply(self, modules: Iterable[str] | None = None) -> None:
        """Apply what these patch modules declare; what is applied already stays as it is.

        Raises PatchError when a symbol is missing or its signature changed; then nothing of this call stays applied.
        """
        self._apply([p for p in self.of(modules) if p.status in ("declared", "undone", "absent")])

    def apply_method(self, owner: type, name: str, function: Callable, declared_by: str) -> Patch:
        """Go around a method of a class only known at run time. Idempotent per class, method and function."""
        target = f"{owner.__module__}:{owner.__qualname__}.{name}"
        for known in self.patches:
            if known.target == target and known.function is function and known._owner is owner:
                break
        else:
            known = Patch(target, function, declared_by=declared_by)
            known._owner, known._name = owner, name
            self.patches.append(known)
        self._apply([known] if known.status in ("declared", "undone") else [])
        return known

    def _apply(self, patches: list[Patch]) -> None:
        late: dict[str, list[Patch]] = {}
        now = []
        for patch in patches:
            patch.status = "waiting"
            if patch.module in sys.modules or patch._owner is not None:
                now.append(patch)
            else:
                late.setdefault(patch.module, []).append(patch)
        try:
            self._install(now)
        except PatchError:
            self._undo(patches)
            raise
        for module, waiting in late.items():
            wrapt.register_post_import_hook(functools.partial(self._imported, waiting), module)

    def _imported(self, waiting: list[Patch], module: ModuleType) -> None:
        self._install(waiting)

    def _install(self, patches: list[Patch]) -> None:
        moved: list[tuple[Any, Any]] = []
        try:
            for patch in patches:
                was = patch.status
                pair = patch.install()
                if was == "waiting" and patch.status == "applied":
                    self._applied.append(patch)
                if pair:
                    moved.append(pair)
        finally:
            _rebind_copies(moved)

    def undo(self, modules: Iterable[str] | None = None) -> None:
        """Undo what these patch modules applied (``None``: everything), last applied first.

        Raises PatchError, naming the culprit, when another pack has patched on top; the rest is undone all the same.
        """
        self._undo(self.of(modules))

    def _undo(self, patches: list[Patch]) -> None:
        wanted = set(map(id, patches))
        refused, moved = [], []
        for patch in reversed([p for p in self._applied if id(p) in wanted]):
            try:
                pair = patch.uninstall()
            except PatchError as error:
                refused.append(str(error))
                continue
            self._applied.remove(patch)
            if pair:
                moved.append(pair)
        _rebind_copies(moved)
        for patch in patches:
            if patch.status != "applied":
                patch.status = "undone" if patch.status != "declared" else "declared"
        if refused:
            raise PatchError("; ".join(refused))

    def verify(self, modules: Iterable[str] | None = None) -> dict[Patch, str]:
        """Each patch's status, from looking at what a call through its target reaches now."""
        return {p: p.verify() for p in self.of(modules)}


REGISTRY = Registry()


def around(target: str, *, upstream: str = "", optional: bool = False) -> Callable[[Callable], Callable]:
    """Declare that calls of ``target`` become ``function(original, *args, **kwargs)``.

    ``upstream``: space-separated `source_hash` values of the sources the patch was written against.
    Static and class methods stay what they are; for a class method ``original`` takes the class first.
    """

    def declare(function: Callable) -> Callable:
        patch = Patch(target, function, "around", frozenset(upstream.split()), optional)
        patch.declared_by = function.__module__
        REGISTRY.declare(patch)
        return function

    return declare


def replace(target: str, value: Any, *, declared_by: str, optional: bool = False) -> None:
    """Declare that ``target`` becomes ``value`` (a class, an object or a function that does not call the original)."""
    REGISTRY.declare(Patch(target, value, "replace", optional=optional, declared_by=declared_by))


def source_hash(function: Callable) -> str:
    """12 hex digits over the dedented source of ``function``; ``unknown`` where there is no source."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return "unknown"
    return hashlib.sha256(textwrap.dedent(source).encode()).hexdigest()[:12]


def _around(function: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def patched(*args, **kwargs):
        return function(original, *args, **kwargs)

    return patched


def _raw(owner: Any, name: str) -> Any:
    """The value as stored (a descriptor stays one), looked up along the MRO for classes."""
    for holder in owner.__mro__ if isinstance(owner, type) else (owner,):
        if name in vars(holder):
            return vars(holder)[name]
    return getattr(owner, name)


def _rebind_copies(moved: list[tuple[Any, Any]]) -> None:
    """One pass over all modules: wherever an old object is bound, under any name, put the new one."""
    if not moved:
        return
    new_of = {id(old): (old, new) for old, new in moved}
    for module in list(sys.modules.values()):
        if type(module) is not ModuleType:  # lazy modules import on attribute access
            continue
        for key, value in list(vars(module).items()):
            pair = new_of.get(id(value))
            if pair is not None and pair[0] is value and not key.startswith("__"):
                setattr(module, key, pair[1])


def _origin(function: Any) -> str:
    """The module that really defines it, which functools.wraps does not disguise."""
    function = getattr(function, "__func__", function)
    found = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None)
    return found or repr(function)
