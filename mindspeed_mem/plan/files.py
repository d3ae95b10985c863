"""Reading the YAML file: what can be wrong before its content means anything. Only this needs PyYAML."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import yaml


def read_yaml(name: str, sections: Collection[str]) -> tuple[Any, list[str]]:
    """The content of a YAML file, or None, and what is wrong with it.

    A key that occurs twice is wrong inside `sections` only: YAML parsers let the last one win, and the rest of a
    MindFormers file is not ours to judge.
    """
    try:
        with open(name, encoding="utf-8") as file:
            loader = yaml.SafeLoader(file)
            try:
                root = loader.get_single_node()
                problems = list(_repeated_keys(root, sections))  # first: constructing expands merges in the nodes
                content = None if root is None else loader.construct_document(root)
            finally:
                loader.dispose()
    except OSError as error:
        return None, [f"{name}: cannot be read ({error.strerror or error}); allowed: the name of a YAML file"]
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date that is none
        return None, [f"{name}: is not YAML ({' '.join(str(error).split())})"]
    except RecursionError:
        return None, [f"{name}: nested too deeply to be read; look for a bracket that is not closed"]
    return content, problems


def _repeated_keys(root: yaml.Node | None, sections: Collection[str]) -> Iterator[str]:
    entries = root.value if isinstance(root, yaml.MappingNode) else []
    seen: set[str] = set()
    looked_at: set[int] = set()
    for key, value in entries:
        if key.value in sections:
            if key.value in seen:
                yield f"{key.value}: given twice (again in line {key.start_mark.line + 1}); allowed: once"
            seen.add(key.value)
            yield from _repeated_below(value, key.value, looked_at)


def _repeated_below(node: yaml.Node, path: str, looked_at: set[int]) -> Iterator[str]:
    if id(node) in looked_at:  # aliases: of what contains them, or over and over
        return
    looked_at.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated_below(item, f"{path}[{index}]", looked_at)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            where = f"{path}.{key.value}"
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                yield f"{where}: given twice (again in line {key.start_mark.line + 1}); allowed: once"
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else str(id(key)))
            yield from _repeated_below(value, where, looked_at)
