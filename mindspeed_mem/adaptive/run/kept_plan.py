"""The file in which a settled plan is kept for the next start: a `--memory-config` with what it was made for on top.

The line ``# made for: {"version": 1, ...}`` holds the facts (a JSON object of plain values) that must all be the same
for the plan to be used again: model, shapes, parallel sizes, device, limits, versions. Files without a version are of
version 1. Everything else in it is for readers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mindspeed_mem import output
from mindspeed_mem.activation.wording import MEGATRON
from mindspeed_mem.adaptive.problem.profile_file import Facts
from mindspeed_mem.adaptive.search.plan_file import as_yaml
from mindspeed_mem.plan import MemoryConfig, MemoryConfigError, load_memory_config

VERSION = 1
_MARK = "made for: "
_MOST = 3
"""Differences named."""


def write(
    target: str | os.PathLike[str],
    config: MemoryConfig,
    facts: Facts,
    remarks: Sequence[str] = (),
    planning: str = MEGATRON.planning,
) -> None:
    """Replace the file at once: a job that dies meanwhile leaves the earlier one.

    Args:
        config: of the plan.
        facts: what it was made for, by name.
        remarks: lines for readers.
        planning: who settled on it, for readers.

    Raises:
        OSError: it cannot be written.
        TypeError: a fact is no plain value.
    """
    made_for = _MARK + json.dumps({"version": VERSION, **facts}, sort_keys=True)
    title = f"mindspeed_mem: the plan that {planning} settled on"
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    output.write(path, as_yaml(config, [title, *remarks, made_for]))


def why_not(target: str | os.PathLike[str]) -> str:
    """Why no plan may be kept there, or "": there is something else, or nothing can be written."""
    path = Path(target)
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except UnicodeDecodeError:
        return "there is another file"
    except (OSError, ValueError) as error:  # a folder, a name with a null byte
        return getattr(error, "strerror", None) or str(error)
    if text.strip() and _made_for(text) is None:
        return "there is another file"
    place = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    return "" if os.access(place, os.W_OK) else f"{place} cannot be written"


def read(source: str | os.PathLike[str], facts: Facts) -> tuple[MemoryConfig | None, str]:
    """The plan of the file if it was made for these facts, otherwise None; and what to tell, "" if there is no file."""
    try:
        text = Path(source).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError) as error:  # or what it is called has a null byte
        return None, f"the plan in {source} is not used: it cannot be read ({error})"
    made_for = _made_for(text)
    layers = facts.get("layers")
    try:
        earlier = None if made_for is None else json.loads(made_for)
        content = yaml.safe_load(text)
        # another number of layers is one of the facts that may differ
        same = isinstance(earlier, dict) and earlier.get("layers") == layers
        config = load_memory_config(content, num_layers=layers if same and isinstance(layers, int) else None)
    except (ValueError, yaml.YAMLError, MemoryConfigError, RecursionError) as error:
        return None, f"the plan in {source} is not used: {error}"
    if not isinstance(content, dict):
        return None, f"the plan in {source} is not used: it holds none"
    if not isinstance(earlier, dict):
        return None, f"the plan in {source} is not used: it does not say what it was made for"
    version = earlier.pop("version", VERSION)
    if version != VERSION:
        return None, (
            f"the plan in {source} is not used: it is of version {version}, and this mindspeed_mem reads {VERSION}; "
            "another one is kept there instead"
        )
    now = json.loads(json.dumps(facts))
    differing = [name for name in sorted({*earlier, *now}) if earlier.get(name) != now.get(name)]
    if not differing:
        return config, f"the plan in {source} is used: it was made for the same job"
    named = ", ".join(f"{name} was {earlier.get(name)} and is {now.get(name)}" for name in differing[:_MOST])
    more = f" and {len(differing) - _MOST} more" if len(differing) > _MOST else ""
    return None, f"the plan in {source} is not used: {named}{more}"


def digest(*values: Any) -> str:
    """A fact that stands for what is too long to be one: short, and equal for equal values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _made_for(text: str) -> str | None:
    """The facts as written in a file of ours."""
    return next((line.partition(_MARK)[2] for line in text.splitlines() if line.startswith("# " + _MARK)), None)
