"""What the tables of `make megatron-lm` and `make peer-suite` say of two runs."""

import pytest

from tests import megatron_lm, pages, peer_suite
from tests.megatron_lm import Ended

BITS = {"0": ['[1, [["lm loss", "0x1.8p+1"]], "0x1p0"]', '[2, [["lm loss", "0x1.4p+1"]], "0x1p0"]']}
OTHER = {"0": [BITS["0"][0], '[2, [["lm loss", "0x1.40001p+1"]], "0x1p0"]']}
REPORT = """activation memory, per rank
rank        out         in recomputed
   0      {}       0.00       0.00
"""
REFUSED = """WARNING: something
mindspeed_mem: 2 problems with the options
  - --one cannot be combined
  - --two is too large
"""


@pytest.mark.parametrize(
    ("plain", "ours", "outcome"),
    [
        (Ended(0, "", BITS), Ended(0, REPORT.format("0.25"), BITS), "same bits"),
        (Ended(0, "", BITS), Ended(0, REPORT.format("0.00"), BITS), "no effect"),
        (Ended(0, "", BITS), Ended(0, REPORT.format("0.25"), OTHER), "differs: from iteration 2 on"),
        (Ended(0, "", BITS), Ended(0, "", {"0": BITS["0"][:1]}), "differs: from iteration 2 on"),
        (Ended(0, "", {}), Ended(0, REPORT.format("0.25"), {}), "differs: from iteration 0 on"),
        (
            Ended(0, "", BITS),
            Ended(2, REFUSED, {}),
            "refused: 2 problems with the options - --one cannot be combined - --two is too large",
        ),
        (Ended(0, "", BITS), Ended(1, "[rank0]: KeyError: 'x'\n[rank1]: torn", {}), "fails: KeyError: 'x'"),
        (Ended(1, "ValueError: no", {}), Ended(1, "?", {}), "Megatron alone does not run: ValueError: no"),
        (Ended(1, "ValueError: no", {}), Ended(2, REFUSED.replace("2 ", "1 "), {}), "refused: 1 problems"),
    ],
)
def test_two_runs_of_a_script(plain, ours, outcome):
    assert megatron_lm.compared(plain, ours, megatron_lm._OUT).startswith(outcome)


@pytest.mark.parametrize(
    ("ours", "outcome"),
    [
        ({"a": "passed", "b": "another Error"}, "the same"),
        ({"a": "Error: 1", "b": "Error"}, "differs: a (Error: 1)"),
        ({"a": "passed", "b": "passed"}, "differs: b (passed)"),
        ({"b": "Error"}, "differs: a (not there)"),
    ],
)
def test_two_runs_of_a_file_of_tests(ours, outcome):
    assert peer_suite.compared("file.py", "swap everything", {"a": "passed", "b": "Error"}, ours) == outcome


def test_an_explained_difference(monkeypatch):
    monkeypatch.setitem(peer_suite.EXPLAINED, ("file.py::a*", "survival"), "It counts modules.")
    outcomes = {"a[1]": "passed"}, {"a[1]": "Error"}
    assert peer_suite.compared("file.py", "survival", *outcomes) == "1 explained: It counts modules."
    assert peer_suite.compared("file.py", "swap everything", *outcomes).startswith("differs")


def test_a_table_gives_each_reason_once():
    rows = {"swap": ["works", "refused: too old"], "recompute": ["refused: too old", "works: in part"]}
    assert pages.table(["0.1", "0.2"], rows) == [
        "| | 0.1 | 0.2 |",
        "|---|---|---|",
        "| swap | works | refused (1) |",
        "| recompute | refused (1) | works (2) |",
        "",
        "1. too old",
        "2. in part",
    ]
