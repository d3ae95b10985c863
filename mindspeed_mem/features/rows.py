"""The rows of the table of features, and the conditions on other options that they hold."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """A condition on somebody else's option; without a value: that it is set to anything but off."""

    origin: str
    """Whose it is: ``megatron-core`` (a field of TransformerConfig, flag or not), ``megatron-lm`` or ``mindspeed``."""
    flag: str
    why: str
    _: KW_ONLY
    value: str | None = None
    """Holds only for this value."""
    off: str | None = None
    """This value, too, means off."""
    field: str | None = None
    """Its name in a namespace, where that is not made from the flag."""
    unless: Callable[[Any], bool] | None = None
    """Does not hold for arguments of which this is true."""
    asks: tuple[str, ...] = ()
    """Somebody else's flags that `unless` looks at."""

    @property
    def dest(self) -> str:
        return self.field or dest_of(self.flag)

    def holds(self, args: Any) -> bool:
        """Whether `args`, a namespace or a TransformerConfig, meet the condition."""
        actual = getattr(args, self.dest, None)
        if self.unless is not None and self.unless(args):
            return False
        if self.value is not None:
            return self.value in map(str, actual if isinstance(actual, list | tuple) else [actual])
        return bool(actual) and str(actual) not in ("False", "0", self.off)

    def given(self, args: Any) -> str:
        """What `args` have of it, as on a command line."""
        return str(self) if self.off is None else f"{self.flag} {getattr(args, self.dest)}"

    def __str__(self) -> str:
        return self.flag if self.value is None else f"{self.flag} {self.value}"


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One flag and all that hangs on it."""

    flag: str
    help: str
    read: Callable[[Any], Any] = str
    """Turns what was given into the setting; raises ValueError saying what is allowed. `bool` makes it a switch."""
    metavar: str | None = None
    many: bool = False
    """Takes one value or more, and may be given again."""
    choices: tuple[str, ...] | None = None
    default: Any = None
    """The value that means off."""
    patches: tuple[str, ...] = ()
    """Modules of mindspeed_mem.patches, as shell patterns."""
    since: str = ""
    """The first version of megatron-core that can carry it."""
    before_that: str = ""
    """Why those before cannot."""
    needs: tuple[Option, ...] = ()
    """Each must hold where the arguments know the option."""
    needs_features: tuple[str, ...] = ()
    """It limits or changes one of these features, so that one must be on."""
    bars: tuple[Option, ...] = ()
    """None may hold."""
    recompute_bars: tuple[Option, ...] = ()
    """Nor any of these where it turns out to recompute."""
    section: str | None = None
    """The key of `recompute_config` for which it stands."""
    same_plan: str = ""
    """Why --adaptive-memory-optimization finds the same plan whatever it says; empty: a plan is kept with its value,
    and used again for that only."""

    each_rank: bool = False
    """Ranks of one job may have other values of it."""

    @property
    def dest(self) -> str:
        return dest_of(self.flag)

    def add_to(self, group: Any) -> None:
        if self.read is bool:
            group.add_argument(self.flag, action="store_true", help=self.help)
        else:
            kwargs: dict[str, Any] = {"metavar": self.metavar} if self.choices is None else {"choices": self.choices}
            if self.many:
                kwargs |= {"nargs": "+", "action": "extend"}
            elif self.read is not str and self.choices is None:
                kwargs |= {"type": self._parse}
            group.add_argument(self.flag, default=self.default, help=self.help, **kwargs)

    def _parse(self, text: str) -> Any:
        try:
            value = self.read(text)
        except ValueError as error:
            raise ArgumentTypeError(f"got {text!r}; allowed: {error}") from error
        # Trainers put their arguments into checkpoints, which are read back without types that are not torch's.
        return value if isinstance(value, (bool, int, float, str, list, tuple)) else text


def dest_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
