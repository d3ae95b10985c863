"""The file in which a settled plan is kept for the next start: a `--memory-config` with what it was made for on top.

The line ``# made for: {...}`` holds the facts (a JSON object of plain values) that must all be the same for the plan to
be used again: model, shapes, parallel sizes, device, limits, versions. Everything else in it is for readers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mindspeed_mem import output
from mindspeed_mem.adaptive.search.plan_file import as_yaml
from mindspeed_mem.plan import MemoryConfigError, load_memory_config

_MARK = "made for: "
_MOST = 3
"""Differences named."""

Facts = Mapping[str, Any]


def write(target: str | os.PathLike[str], config: Mapping[str, Any], facts: Facts, remarks: Sequence[str] = ()) -> None:
    """Replace the file at once: a job that dies meanwhile leaves the earlier one. Raises OSError."""
    made_for = _MARK + json.dumps(facts, sort_keys=True)
    text = as_yaml(
        dict(config), ["mindspeed_mem: the plan that --adaptive-memory-optimization settled on", *remarks, made_for]
    )
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    output.write(path, text)


def read(source: str | os.PathLike[str], facts: Facts) -> tuple[dict[str, Any] | None, str]:
    """The plan of the file if it was made for these facts, otherwise None; and what to tell, "" if there is no file."""
    try:
        text = Path(source).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None, ""
    except (OSError, UnicodeDecodeError) as error:
        return None, f"the plan in {source} is not used: it cannot be read ({error})"
    made_for = next((line.partition(_MARK)[2] for line in text.splitlines() if line.startswith("# " + _MARK)), None)
    try:
        earlier = None if made_for is None else json.loads(made_for)
        config = yaml.safe_load(text)
        load_memory_config(config, num_layers=facts.get("layers"))
    except (ValueError, yaml.YAMLError, MemoryConfigError, RecursionError) as error:
        return None, f"the plan in {source} is not used: {error}"
    if not isinstance(config, dict):
        return None, f"the plan in {source} is not used: it holds none"
    if not isinstance(earlier, dict):
        return None, f"the plan in {source} is not used: it does not say what it was made for"
    now = json.loads(json.dumps(facts))
    differing = [name for name in sorted({*earlier, *now}) if earlier.get(name) != now.get(name)]
    if not differing:
        return config, f"the plan in {source} is used: it was made for the same job"
    named = ", ".join(f"{name} was {earlier.get(name)} and is {now.get(name)}" for name in differing[:_MOST])
    more = f" and {len(differing) - _MOST} more" if len(differing) > _MOST else ""
    return None, f"the plan in {source} is not used: {named}{more}"
