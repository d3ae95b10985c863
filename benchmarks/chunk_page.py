"""What `chunk_zero.py` found, as a table, as goals met or missed, and as a page. No torch here."""

from __future__ import annotations

from typing import NamedTuple

BASE = "Megatron, overlapped"
ALONE = "Megatron"
STAGE1, STAGE2, STAGE3 = (f"stage {stage}" for stage in (1, 2, 3))
FSDP_RESHARD, FSDP_KEPT = "FSDP2, resharded", "FSDP2, not resharded"
EACH, ONCE = ", reduced each time", ", reduced once"
"""Gradients with each micro-batch, as FSDP2 by itself; once in a step, as Megatron and the pack."""
FSDP_OFFLOAD, MEGATRON_OFFLOAD = "FSDP2, offloaded", "Megatron, optimizer offloaded"
MOST_TIME = 1.02
"""Of stage 1 on the device, as a ratio to `BASE`."""
EQUAL = 1.001
"""Up to this ratio memory counts as equal: step counts and the like are kept differently."""
NOTES = (
    "Step time: the slower rank's, wall clock, barriers around it; ratios are medians of the ratios to the same "
    f"round's step of {BASE}. CPU time: of all threads of both ranks, where the ranks are processes on a CPU.",
    "Device memory: the most during a step above what there was before the model was built, on the rank with most: "
    "parameters, gradients, optimizer states, activations and temporaries. Resting: between two steps.",
    "Gathered, up and down: bytes of one step on one rank, seen as torch's operators; gathered are whole parameters "
    "as they come out of all-gathers.",
    f"Losses and gradient norms of all steps are compared with those of {BASE}, whose buckets are cut alike.",
)
CPU_NOTES = (
    "On a CPU both memories are the host's. Device memory is what torch's CPU allocator hands out, less what is the "
    "host's: our host buffers lie outside it; for FSDP2's and Megatron's offload cpu(), to(), pin_memory() and is_cuda "
    "are made to do what they do on a device (a real copy), and what is allocated in their optimizers' steps, and in "
    "the making of Megatron's, is counted as the host's. What these copies cost there is in their step times.",
    "With stage 1 and chunks on the host, gradients are read where they are; on a device this rank's part of them goes "
    "down before the step, which is neither in the bytes nor in the time here.",
    "What Megatron and FSDP2 step on the device is stepped by torch's AdamW operator by operator, as it is there by "
    "default; what is stepped on the host, by its fused one.",
    "Adding a bf16 gradient to an fp32 one takes a temporary of its size on a CPU, and none on a device. The CPU "
    "patches, on in all variants with Megatron, add in tiles; FSDP2's peaks may contain one, of the largest parameter.",
    "gloo's own buffers are not counted. There is no communication that runs beside computation on cores of its own.",
)


class Goal(NamedTuple):
    text: str
    met: bool | None
    """None: it could not be told."""
    figures: str


def goals(rows: dict[str, dict], failed: dict[str, str]) -> list[Goal]:
    """rows: name -> ``device_bytes``, ``median_of_ratios``, ``peer``, ``exact``, ``same``; failed: why one has none."""
    found = []
    pairs = ((STAGE3, FSDP_RESHARD), (STAGE2, FSDP_KEPT))
    alike = [(ours + EACH, theirs) for ours, theirs in pairs] + [(ours, theirs + ONCE) for ours, theirs in pairs]
    for ours, theirs in (*pairs, *alike):
        text = f"{ours} takes no more device memory than {theirs}"
        if ours in rows and theirs in rows:
            mine, other = rows[ours]["device_bytes"], rows[theirs]["device_bytes"]
            found.append(Goal(text, mine <= EQUAL * other, f"{_mib(mine)} MiB, {_mib(other)} MiB"))
        else:
            found.append(_untold(text, failed, ours, theirs))
    text = f"{STAGE1} takes at most {MOST_TIME} of the time of {BASE}"
    if "median_of_ratios" in rows.get(STAGE1, {}):
        ratio = rows[STAGE1]["median_of_ratios"]
        found.append(Goal(text, ratio <= MOST_TIME, f"{ratio:.3f}"))
    else:
        found.append(_untold(text, failed, STAGE1))
    found += [_ahead(peer, rows, failed) for peer in (FSDP_OFFLOAD, MEGATRON_OFFLOAD)]
    exact = {name: row["same"] for name, row in rows.items() if row["exact"]}
    differ = [name for name, same in exact.items() if not same]
    figures = "they differ: " + "; ".join(differ) if differ else f"{len(exact)} variants"
    return [*found, Goal("losses are equal bit for bit where that is promised", not differ, figures)]


def _ahead(peer: str, rows: dict[str, dict], failed: dict[str, str]) -> Goal:
    """Whether the pack has something faster that takes no more memory."""
    text = f"faster than {peer} with equal device memory"
    if "median_of_ratios" not in rows.get(peer, {}):
        return _untold(text, failed, peer)
    most, ratio = rows[peer]["device_bytes"], rows[peer]["median_of_ratios"]
    ours = {name: row for name, row in rows.items() if not row["peer"]}
    mine = {name: row["median_of_ratios"] for name, row in ours.items() if row["device_bytes"] <= EQUAL * most}
    if not ours:
        return Goal(text, None, "nothing of the pack was run")
    if not mine:
        least = min(row["device_bytes"] for row in ours.values())
        return Goal(text, False, f"the pack's least is {_mib(least)} MiB, {peer} takes {_mib(most)} MiB")
    best = min(mine, key=mine.get)
    return Goal(
        text,
        mine[best] < ratio,
        f"{best}: {mine[best]:.3f}, {_mib(rows[best]['device_bytes'])} MiB; {ratio:.3f}, {_mib(most)} MiB",
    )


def _untold(text: str, failed: dict[str, str], *names: str) -> Goal:
    reasons = [f"{name}: {failed.get(name, 'not run')}" for name in names if name in failed or len(names) == 1]
    return Goal(text, None, "; ".join(reasons) or "not run")


# ---- as text
COLUMNS = ("variant", "ratio", "step ms", "CPU ms", "MiB", "resting", "gathers", "gathered", "up", "down", "losses")


def table(rows: dict[str, dict]) -> str:
    """One line a variant; sizes in MiB."""
    cells = [COLUMNS, *(_cells(name, row) for name, row in rows.items())]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    return "\n".join(
        " ".join(text.rjust(width) if column else text.ljust(width) for column, (text, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in cells)
    )


def goal_lines(found: list[Goal]) -> list[str]:
    words = {True: "met", False: "MISSED", None: "untold"}
    return [f"{words[goal.met]}: {goal.text} ({goal.figures})" for goal in found]


def page(record: dict) -> str:
    """A section of Markdown; ``record``: what `chunk_zero.py` writes as JSON."""
    rows, failed = record["variants"], record["failed"]
    lines = [f"## Chunk ZeRO on {record['ranks']} {record['device']} ranks, {record['machine']['date']}", ""]
    lines += [f"`{record['command']}`", ""]
    shape = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in record["shape"].items())
    lines += [f"{shape}; buckets and chunks of {record['chunk_elements']} elements. {record['rounds']} rounds.", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(_cells(name, row)) + " |" for name, row in rows.items()]
    lines += ["", *(f"Not run: {name}: {reason}" for name, reason in failed.items())]
    lines += ["", *(f"- {line}" for line in goal_lines(goals(rows, failed))), ""]
    lines += [*NOTES, *(CPU_NOTES if record["device"] == "cpu" else ())]
    return "\n".join(lines) + "\n"


def _cells(name: str, row: dict) -> tuple[str, ...]:
    times = [f"{row[key]:.{digits}f}" if row.get(key) else "-" for key, digits in _TIMES]
    sizes = (row["device_bytes"], row["resting_bytes"], row["gathered_bytes"])
    peak, resting, gathered = map(_mib, sizes)
    moved = _mib(row["bytes_to_device"]), _mib(row["bytes_to_host"])
    losses = "equal" if row["same"] else "DIFFER" if row["exact"] else f"{row['off']:.0e}"
    return name, *times, peak, resting, str(row["gathers"]), gathered, *moved, losses


_TIMES = (("median_of_ratios", 3), ("median_ms", 1), ("cpu_ms", 1))


def _mib(number: int) -> str:
    return f"{number / 2**20:.1f}"
