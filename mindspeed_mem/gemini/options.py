"""Options of the classes here: one that nobody knows is refused, whatever its value, with what is allowed."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

logger = logging.getLogger(__name__)


class OptionError(ValueError):
    """Options that cannot be; the message holds all that is wrong with them."""


def refuse_unknown(where: str, unknown: Mapping[str, Any], accepts: Callable, more: Iterable[str] = ()) -> list[str]:
    """What is wrong with the keywords `unknown`, given to `where`, which takes those of `accepts` and `more`."""
    if not unknown:
        return []
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    allowed = [name for name, one in inspect.signature(accepts).parameters.items() if one.kind in kinds]
    allowed = [name for name in [*allowed, *more] if name != "self"]
    found = []
    for name in unknown:
        close = difflib.get_close_matches(name, allowed, 1)
        found.append(f"{where} has no option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return [*found, f"allowed are {', '.join(allowed)}"]


def refuse(wrong: list[str]) -> None:
    """Raise OptionError with all these reasons, if there are any."""
    if wrong:
        raise OptionError("; ".join(wrong))


@functools.cache
def say_once(message: str) -> None:
    """Warn of something that has no effect here, or another one than in ColossalAI."""
    logger.warning("%s", message)
