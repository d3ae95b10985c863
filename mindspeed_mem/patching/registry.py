"""The patch registry: declare, apply, verify, undo. It knows nothing of Megatron.

A patch names one upstream symbol as ``module:dotted.name`` and either goes around it (`around`) or takes its place
(`replace`); or it joins a list of our own that stands under such a name (`join`). Applying it rebinds the symbol on its
owner and wherever ``from module import name [as other]`` copied it; when the module is not imported yet, this happens
right after its import, before the importer binds any name.

What it cannot reach: copies held by closures, partials, default arguments and already built ``ModuleSpec`` objects,
and those of other packages' symbols that somebody has put into torch, what torch imports, or the standard library.
So patches name functions and methods, not classes that others hold.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import wrapt

from mindspeed_mem.patching import upstream

logger = logging.getLogger(__name__)

_MISSING = object()
# Shared by unrelated names (there is one True): only the symbol itself is rebound, never its "copies".
_INTERNED = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset)
# Import nothing of the packages that are patched, but for each other: nine of ten names that there are.
_BENEATH = sys.stdlib_module_names | {"torch", "numpy", "scipy", "sympy", "mpmath", "networkx", "triton", "setuptools"}
_DECORATORS = {"torch", "contextlib", "functools", "typing_extensions", "mindspeed_mem"}  # no pack that patched later


def _nobody(module: str) -> str:
    return ""


asked_by: Callable[[str], str] = _nobody
"""The flags, in words, for which a patch module is applied; the adaptor puts its own function here."""


class PatchError(RuntimeError):
    """A patch cannot be applied or undone as declared; the message names the symbol and the reason."""


class _Move(NamedTuple):
    """Wherever a module binds ``old``, it shall bind ``new``; ``home`` declared the patch and keeps what it holds."""

    old: Any
    new: Any
    home: str
    module: str
    """Of which it is a symbol."""


class Direct:
    """What goes around a symbol that is called all the time, given as what makes it from the original: that saves a
    call and the packing of arguments each time. It rests while it has nothing to do: see `Registry.rest`. Unless
    ``rests`` is False: upstream compares it with what it has kept, which has to stay the same."""

    def __init__(self, make: Callable[[Callable], Callable], rests: bool = True):
        self.make, self.rests, self.__module__ = make, rests, make.__module__

    def __call__(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        return self.make(original)(*args, **kwargs)


@dataclass(eq=False)
class Patch:
    """One upstream symbol and what goes around it or takes its place."""

    target: str
    """``module:dotted.name``"""
    function: Any
    """Called as ``function(original, *args, **kwargs)``; for ``kind="replace"`` the new value itself, for
    ``kind="join"`` what joins the list."""
    kind: str = "around"
    optional: bool = False
    """A missing symbol gives the status ``absent`` instead of an error."""
    create: bool = False
    """A missing symbol is created (for ``kind="replace"``); undoing removes it again."""
    since: str = ""
    """The first version of the package that it is for; in others it gives the status ``absent``."""
    before: str = ""
    """The first version of the package that it is not for any more."""
    status: str = "declared"
    """``declared``, ``waiting`` (module not imported yet), ``applied``, ``resting``, ``absent``, ``undone`` or
    ``FAILED``."""
    notes: list[str] = field(default_factory=list)
    declared_by: str = ""

    _bound_to: Any = None  # the owner, where it is not to be found through the target: see `Registry.apply_method`
    _owner: Any = None
    _name: str = ""
    _found: Any = None
    _ours: Any = None
    _added: bool = False  # the owner itself had no such attribute: it was inherited or missing

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    def install(self) -> _Move | None:
        """Patch the owner; return what copies in other modules have to follow."""
        if self.status != "waiting":
            return None
        self.notes.clear()
        try:
            owner, name, found = self._resolve()
        except AttributeError as error:
            if self.create and "." not in self.target.partition(":")[2]:
                owner, name, found = self._bound_to or sys.modules[self.module], self.target.split(":")[1], _MISSING
            elif self.optional:
                self.status = "absent"
                return None
            else:
                raise PatchError(f"{self.target} does not exist in the installed version{self._for()}") from error
        if self.kind == "join":
            found.append(self.function)
            self._owner, self._name, self._ours, self.status = owner, name, found, "applied"
            return None
        ours = self._build(owner, found)
        self._compare(found)
        self._added = found is _MISSING or (isinstance(owner, type) and name not in vars(owner))
        setattr(owner, name, ours)
        self._owner, self._name, self._found, self._ours = owner, name, found, ours
        self.status = "applied"
        logger.debug("patched %s", self.target)
        return self._move(found, ours)

    def uninstall(self) -> _Move | None:
        """Restore the owner; return what copies have to follow. Refuses when another wrapper is on top."""
        if self.status != "applied":
            self.status = "undone" if self.status != "declared" else "declared"
            return None
        if self.kind == "join":
            self._ours[:] = [one for one in self._ours if one is not self.function]
            self.status, self._owner, self._ours = "undone", None, None
            return None
        now = _raw(self._owner, self._name)
        if now is not self._ours:
            raise PatchError(f"{self.target}: {_origin(now)} patched on top of it, so this patch cannot be undone")
        if self._added:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._found)
        move = self._move(self._ours, self._found)
        self.status, self._owner, self._found, self._ours = "undone", None, None, None
        return move

    def verify(self) -> str:
        """The status, and for an applied patch who sits on top of it, or to whom it was lost."""
        if self.status != "applied":
            return self.status
        now = _raw(self._owner, self._name)
        if now is _MISSING:
            return "LOST: the symbol is gone"
        if now is self._ours:
            gone = self.kind == "join" and all(one is not self.function for one in now)
            return "LOST: taken off the list" if gone else "applied"
        link, ours = now, (self._ours, getattr(self._ours, "__func__", _MISSING))
        for _ in range(100):
            if any(link is one for one in ours):
                return f"applied, beneath {_origin(now)}"
            link = getattr(link, "__wrapped__", None)
        return f"LOST to {_origin(now)}"

    def _resolve(self) -> tuple[Any, str, Any]:
        """The owner (module or class), the attribute's name and its raw value now.

        Resolved through ``sys.modules``: ``megatron.core.distributed.finalize_model_grads`` taken as an attribute is a
        function of that name, not the module.
        """
        path = self.target.partition(":")[2]
        if self._bound_to is None:
            return wrapt.resolve_path(sys.modules[self.module], path)
        name = path.rpartition(".")[2]
        found = _raw(self._bound_to, name)
        if found is _MISSING:
            raise AttributeError(name)
        return self._bound_to, name, found

    def _move(self, old: Any, new: Any) -> _Move | None:
        shared = isinstance(old, _INTERNED) or old is _MISSING or new is _MISSING
        if shared or not isinstance(self._owner, ModuleType):
            return None
        return _Move(old, new, self.declared_by, self.module)

    def _build(self, owner: Any, found: Any) -> Any:
        if self.kind == "replace":
            return self.function
        original = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
        if inspect.isclass(original) or not callable(original):
            raise PatchError(f"{self.target} is not a function but {original!r}: replace() can take its place")
        self._check(owner, original)
        ours = _around(self.function, original, self.declared_by)
        return type(found)(ours) if isinstance(found, (staticmethod, classmethod)) else ours

    def _check(self, owner: Any, original: Callable) -> None:
        """The parameters our function names lead upstream's."""
        package, origin = upstream.package_of(self.module), _origin(original)
        if hasattr(original, "__globals__") and upstream.package_of(origin) not in {package, *_DECORATORS}:
            self.notes.append(f"on top of {origin}")
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
                f"({', '.join(p.name for p in theirs)}). Use a supported version of {package}{self._for()}"
            )

    def _for(self) -> str:
        flags = asked_by(self.declared_by)
        return f", or leave {flags} out" if flags else ""

    def _compare(self, found: Any) -> None:
        difference = upstream.difference(self.target, found) if found is not _MISSING else None
        if difference is None:
            return
        text, is_change = difference
        self.notes.append(text)
        if is_change:
            where = self.declared_by.rpartition(".")[2]
            logger.warning("%s (patches/%s.py): %s%s", self.target, where, text, self._for())
        else:
            _say_once(f"{text}. What differs: python -m mindspeed_mem doctor")


class Registry:
    """All patches declared in this process, in the order of declaration."""

    def __init__(self) -> None:
        self.patches: list[Patch] = []
        self._applied: list[Patch] = []  # in the order of application: undone backwards
        self._unverified = False

    def declare(self, patch: Patch) -> Patch:
        """Add a patch; one declared before (same target, file, kind and function) is returned instead."""
        key = (patch.target, patch.declared_by, patch.kind)
        for known in self.patches:
            if key == (known.target, known.declared_by, known.kind) and known.function is patch.function:
                return known
        self.patches.append(patch)
        return patch

    def of(self, modules: Iterable[str] | None) -> list[Patch]:
        """The patches declared by these patch modules, in that order; ``None`` for all, as they were declared."""
        wanted = None if modules is None else list(modules)
        found = [p for p in self.patches if wanted is None or p.declared_by in wanted]
        return found if wanted is None else sorted(found, key=lambda p: wanted.index(p.declared_by))

    def apply(self, modules: Iterable[str] | None = None, *, keep_going: bool = False) -> None:
        """Apply what these patch modules declare; what is applied already stays as it is.

        Raises PatchError when a symbol is missing or its signature changed; then nothing of this call stays applied.
        With ``keep_going`` such a patch gets the status ``FAILED`` and a note instead, and the others are applied.
        """
        self._apply([p for p in self.of(modules) if p.status not in ("waiting", "applied")], keep_going)

    def apply_method(self, owner: type, name: str, function: Callable, declared_by: str) -> Patch:
        """Go around a method of a class only known at run time. Idempotent per class, method and function."""
        target = f"{owner.__module__}:{owner.__qualname__}.{name}"
        for known in self.patches:
            if known.target == target and known.function is function and known._bound_to is owner:
                break
        else:
            known = Patch(target, function, declared_by=declared_by, _bound_to=owner)
            self.patches.append(known)
        self._apply([known] if known.status != "applied" else [])
        return known

    def undo(self, modules: Iterable[str] | None = None) -> None:
        """Undo what these patch modules applied (``None``: everything), last applied first.

        Raises PatchError, naming the culprit, when another pack has patched on top; the rest is undone all the same.
        """
        refused = self._undo(self.of(modules))
        if refused:
            raise PatchError("; ".join(refused))

    def lift(self, keep: Iterable[str] = ()) -> list[Patch]:
        """Take all applied patches off for a moment, but for those declared by ``keep``; `put_back` takes the result.

        For another pack that removes and applies its patches again: it would drop what it finds on top of its own.
        """
        kept = set(keep)
        lifted = [p for p in self._applied if p.declared_by not in kept]
        for refusal in self._undo(lifted):
            logger.warning(refusal)
        return [p for p in lifted if p.status != "applied"]

    def put_back(self, lifted: list[Patch]) -> None:
        """Apply again, on top, what `lift` took off."""
        self._apply([p for p in lifted if p.status != "applied"])

    def rest(self) -> None:
        """Take what is `Direct` off until `wake`, or until it is applied again: it would do nothing. What others have
        patched on top of stays."""
        direct = [p for p in self._applied if isinstance(p.function, Direct) and p.function.rests]
        self._undo(direct)
        for patch in direct:
            if patch.status == "undone":
                patch.status = "resting"

    def wake(self) -> None:
        """Apply again what rests."""
        self._apply([p for p in self.patches if p.status == "resting"])

    def originals(self) -> dict[str, Any]:
        """What the applied patches have found, by target; None for targets that this environment lacks."""
        patched = sorted(reversed(self.patches), key=lambda p: p.status == "applied")
        return {p.target: p._found if p.status == "applied" else None for p in patched if p.kind != "join"}

    def verify(self, modules: Iterable[str] | None = None) -> dict[Patch, str]:
        """Each patch's status, from looking at what a call through its target reaches now."""
        return {p: p.verify() for p in self.of(modules)}

    def verify_once(self, log: logging.Logger = logger) -> list[str]:
        """Log an error for each applied patch that calls no longer reach; returns these lines.

        For the end of the first training step, when everybody has patched. Later calls cost nothing and return [],
        until something is applied anew.
        """
        if not self._unverified:
            return []
        self._unverified = False
        lost = [f"{p.target} ({p.declared_by}): {s}" for p, s in self.verify().items() if s.startswith("LOST")]
        for line in lost:
            log.error("a patch takes no effect: %s. Import mindspeed_mem.megatron_adaptor after that package", line)
        return lost

    def _apply(self, patches: list[Patch], keep_going: bool = False) -> None:
        for patch in patches:
            of_version = upstream.within(upstream.package_of(patch.module), patch.since, patch.before)
            patch.status = "waiting" if of_version else "absent"
        self._install([p for p in patches if p._bound_to or p.module in sys.modules], patches, keep_going)
        late: dict[str, list[Patch]] = {}
        for patch in patches:
            if patch.status == "waiting":
                late.setdefault(patch.module, []).append(patch)
        for module, group in late.items():
            wrapt.register_post_import_hook(functools.partial(self._imported, group, keep_going), module)

    def _imported(self, group: list[Patch], keep_going: bool, module: ModuleType) -> None:
        self._install(group, group, keep_going)

    def _install(self, patches: list[Patch], undo_on_failure: list[Patch], keep_going: bool) -> None:
        moves: list[_Move] = []
        failure = None
        for patch in patches:
            was = patch.status
            try:
                move = patch.install()
            except PatchError as error:
                patch.status, failure = "FAILED", error
                patch.notes.append(str(error))
                if not keep_going:
                    break
                continue
            if was == "waiting" and patch.status == "applied":
                self._applied.append(patch)
                self._unverified = True
            moves += [move] if move else []
        _rebind_copies(moves)
        if failure is not None and not keep_going:
            self._undo([p for p in undo_on_failure if p.status != "FAILED"])
            raise failure

    def _undo(self, patches: list[Patch]) -> list[str]:
        """Undo in the order opposite to application; return why some could not be."""
        wanted, refused, moves = set(patches), [], []
        for patch in reversed([p for p in self._applied if p in wanted]):
            try:
                move = patch.uninstall()
            except PatchError as error:
                refused.append(str(error))
                continue
            self._applied.remove(patch)
            moves += [move] if move else []
        _rebind_copies(moves)
        for patch in patches:
            if patch.status != "applied":
                patch.uninstall()
        return refused


REGISTRY = Registry()


def around(target: str, *, optional: bool = False, since: str = "", before: str = "") -> Callable[[Callable], Callable]:
    """Declare that calls of ``target`` become ``function(original, *args, **kwargs)``.

    Static and class methods stay what they are; for a class method ``original`` takes the class first.
    ``since``, ``before``: it is for these versions of the target's package only (``"0.17"``).
    """

    def declare(function: Callable) -> Callable:
        REGISTRY.declare(
            Patch(target, function, optional=optional, since=since, before=before, declared_by=function.__module__)
        )
        return function

    return declare


def replace(
    target: str, value: Any, *, declared_by: str, optional: bool = False, create: bool = False, since: str = ""
) -> None:
    """Declare that ``target`` becomes ``value`` (a class, an object or a function that does not call the original).

    ``value`` is to be an object of its own: undoing puts the original back wherever ``value`` is bound, but for the
    module that declares this.
    ``create``: a module-level name that is missing is created, and removed by undoing.
    """
    how: dict[str, Any] = {"optional": optional, "create": create, "since": since}
    REGISTRY.declare(Patch(target, value, "replace", declared_by=declared_by, **how))


def join(target: str, value: Any, *, declared_by: str) -> None:
    """Declare that the list ``target``, one of ours that others read when they run, holds ``value``, too."""
    REGISTRY.declare(Patch(target, value, "join", declared_by=declared_by))


@functools.cache
def _say_once(line: str) -> None:
    logger.info(line)


def _around(function: Callable, original: Callable, declared_by: str) -> Callable:
    def patched(*args, **kwargs):
        return function(original, *args, **kwargs)

    if isinstance(function, Direct):
        patched = function.make(original)
    functools.update_wrapper(patched, original)
    patched.__dict__["_declared_by"] = declared_by
    return patched


def _raw(owner: Any, name: str) -> Any:
    """The value as stored (a descriptor stays one), looked up along the MRO for classes; _MISSING if there is none."""
    for holder in owner.__mro__ if isinstance(owner, type) else (owner,):
        if name in vars(holder):
            return vars(holder)[name]
    return getattr(owner, name, _MISSING)


def _is_of_beneath(move: _Move) -> bool:
    """A module's symbol may itself be a copy: of what is old when it is applied, and new when it is undone."""
    defined = [str(getattr(one, "__module__", "")) for one in (move.old, move.new)]
    return any(upstream.package_of(one) in _BENEATH for one in (move.module, *defined))


def _rebind_copies(moves: list[_Move]) -> None:
    """One pass over all modules that can hold one: wherever an old object is bound, under any name, put the new one."""
    by_old = {id(move.old): move for move in moves}
    of_beneath = any(map(_is_of_beneath, moves))
    for place, module in list(sys.modules.items()) if moves else ():
        if type(module) is not ModuleType:  # lazy modules import on attribute access
            continue
        if not of_beneath and upstream.package_of(place) in _BENEATH:
            continue
        names = vars(module)
        if by_old.keys().isdisjoint(map(id, list(names.values()))):  # nearly all: in C, there are many names
            continue
        for key, value in list(names.items()):
            if id(value) not in by_old or key.startswith("__"):
                continue
            new = value
            while id(new) in by_old and by_old[id(new)].home != module.__name__:  # several patches of one symbol
                new = by_old[id(new)].new
            if new is not value:
                setattr(module, key, new)


def _origin(function: Any) -> str:
    """The module that really defines it, which functools.wraps does not disguise; for one of ours, who declared it."""
    function = getattr(function, "__func__", function)
    namespace = getattr(function, "__globals__", {})
    if namespace is globals() and hasattr(function, "_declared_by"):
        return function._declared_by
    return namespace.get("__name__") or getattr(function, "__module__", None) or repr(function)
