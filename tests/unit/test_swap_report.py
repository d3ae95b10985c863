"""The end-of-run report, from made-up figures."""

from mindspeed_mem.activation.figures import EngineFigures, OperatorFigures, PinnedFigures
from mindspeed_mem.report.swap_report import format_report

MIB = 2**20
FIGURES = {
    "bytes_out": 3 * MIB,
    "bytes_in": 2 * MIB,
    "peak_bytes": 4 * MIB,
    "peak_bytes_without": 16 * MIB,
    "stall_seconds": 0.0123,
    "host_peak_bytes": 1 * MIB,
    "stayed_bytes": 0,
    "passes_kept": 0,
    "passes": 0,
    "pinned": [],
    "recomputed_bytes": 0,
    "recomputed_by_operator": [],
    "swaps": True,
    "recomputes": False,
}


def lines(*ranks):
    return format_report(
        [EngineFigures(rank=number, **FIGURES | more) for number, more in enumerate(ranks)]
    ).splitlines()


def again(layer, op, size, runs):
    return OperatorFigures(layer=layer, op=op, bytes=int(size * MIB), runs=runs)


def test_one_row_per_rank():
    title, head, *rows = lines({}, {"peak_bytes_without": 0})
    assert title.startswith("activation memory, per rank")
    assert head.split() == "rank out in recomputed peak without saved stall ms host peak".split()
    assert rows[0].split() == "0 3.00 2.00 0.00 4.00 16.00 75 % 12.3 1.00".split()
    assert rows[1].split() == "1 3.00 2.00 0.00 4.00 0.00 - 12.3 1.00".split()
    assert {len(row) for row in rows} == {len(head)}


def test_recomputed_operators_over_layers_and_ranks():
    first = {"recomputed_bytes": 5 * MIB, "recomputes": True, "recomputed_by_operator": [
        again(0, "mlp", 1, 4), again(1, "mlp", 1, 4), again(2, "", 3, 1)]}  # fmt: skip
    second = {"recomputed_bytes": 2 * MIB, "recomputes": True, "recomputed_by_operator": [again(3, "mlp", 2, 4)]}
    *_, one, other, mlp, whole = lines(first, second)
    assert one.split()[3] == "5.00" and other.split()[3] == "2.00"
    assert mlp == "recomputed: mlp of layers 0-1, 3: 4.00 MiB dropped, 12 second runs"
    assert whole == "recomputed: the whole of layer 2: 3.00 MiB dropped, 1 second run"


def test_remarks_only_about_what_is_configured():
    nothing = {"bytes_out": 0, "bytes_in": 0}
    assert lines({**nothing})[-1].startswith("rank 0: nothing was moved: ")
    assert len(lines({**nothing, "swaps": False, "recomputes": True, "recomputed_bytes": MIB})) == 3
    only = lines({**nothing, "swaps": False, "recomputes": True})
    assert len(only) == 4 and only[-1].startswith("rank 0: nothing was recomputed: ")
    places = [(2, "", "a list"), (3, "mlp", "the cache"), (4, "mlp", "the cache"), (-1, "", "a loss")]
    pinned = [PinnedFigures(layer=layer, op=op, bytes=MIB, by=by) for layer, op, by in places]
    both = lines({"stayed_bytes": MIB, "pinned": pinned})[3:]
    assert both == [
        "rank 0: 1.00 MiB in all stayed on the device: the host budget was used up "
        "(--swap-host-memory-gib, attach: host_memory_gib)",
        "rank 0: layer 2: 1.00 MiB pinned by a list",
        "rank 0: mlp in layers 3-4: 1.00 MiB in each pinned by the cache",
        "rank 0: what was made outside the layers: 1.00 MiB pinned by a loss",
    ]


def test_passes_that_stayed():
    assert lines({"passes_kept": 6, "passes": 8})[-1] == (
        "rank 0: 6 of 8 forwards, since that was decided, kept their activations on the device: swapping them lowers "
        "no peak of the job (swap_config.pp_aware)"
    )
