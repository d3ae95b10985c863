"""What docs/public.md calls public is there, and public modules say in ``__all__`` what they offer."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "public.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `(mindspeed_mem[\w.]*)` \| (.*) \|$", PAGE, re.MULTILINE))


@pytest.mark.parametrize("name", [name for name in ROWS if name != "mindspeed_mem.megatron_adaptor"])
def test_public_names_can_be_imported(name):
    check(importlib.import_module(name), ROWS[name])


def test_the_adaptor_offers_what_the_page_says(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])  # it reads the flags of a script
    module = importlib.import_module("mindspeed_mem.megatron_adaptor")
    check(module, ROWS["mindspeed_mem.megatron_adaptor"])
    assert set(module.__all__) == set(re.findall(r"`(\w+)`", ROWS["mindspeed_mem.megatron_adaptor"]))


def check(module, cell):
    public = getattr(module, "__all__", None)
    names = public if "`__all__`" in cell else re.findall(r"`(\w+)`", cell)
    assert names and [name for name in names if not hasattr(module, name)] == []
    if module.__name__ != "mindspeed_mem":
        assert public is not None and set(names) <= set(public)


def test_public_errors_are_value_errors():
    (sentence,) = re.findall(r"\*\*Exceptions\*\*.*?\n\n", PAGE, re.DOTALL)
    named = set(re.findall(r"`(\w+Error)`", sentence)) - {"ValueError"}
    found = {}
    for module in map(importlib.import_module, ROWS):
        found |= {key: getattr(module, key) for key in named if hasattr(module, key)}
    assert named and found.keys() == named and all(issubclass(error, ValueError) for error in found.values())
