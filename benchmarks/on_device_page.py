"""What `on_device.py` found, as one page: the machine, and each piece with its goals and what it printed. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chunk_page import EQUAL, Goal, goal_lines
from chunk_page import goals as chunk_goals
from policies import ADAPTIVE, FULL, KEEP_ALL

DONE, FAILED, STOPPED, SKIPPED, NO_TIME = "done", "FAILED", "STOPPED", "skipped", "not begun"
OVER_FULL, OVER_BEST, OF_UNCAPPED = 20, 10, 5
"""Percent of throughput: of the adaptive plan over full recompute, further ahead of it than the best by hand, and at
most behind keeping everything without a cap."""
NO_SLOWER = 1.02
"""Up to this ratio times count as equal: so much runs differ."""


# ---- goals
def goals(name: str, figures: dict[str, Any]) -> list[Goal]:
    """Those of one piece."""
    found: Callable[[dict[str, Any]], list[Goal]] = (
        _bits if name.startswith("bits-") else _GOALS.get(name, lambda _: [])
    )
    return found(figures)


def _doctor(figures: dict[str, Any]) -> list[Goal]:
    return [Goal("nothing is wrong", not figures["problems"], "; ".join(figures["problems"]) or "every patch applies")]


def _tests(figures: dict[str, Any]) -> list[Goal]:
    return [Goal("no test fails", not figures["failed"], figures["closing"])]


def _bits(figures: dict[str, Any]) -> list[Goal]:
    results = {name: row["result"] for name, row in figures["rows"].items()}
    compared = {name: one for name, one in results.items() if not one.startswith("not ")}
    other = [f"{name}: {one}" for name, one in compared.items() if one not in ("equal", "close")]
    untold = [f"{name}: {one}" for name, one in results.items() if name not in compared]
    met = None if untold and not other else not other
    return [Goal("the bits are stock Megatron's", met, "; ".join([*other, *untold]) or f"{len(compared)} comparisons")]


def _same(rows: dict[str, dict[str, Any]]) -> Goal:
    differ = [name for name, row in rows.items() if row.get("same") is False]
    told = [name for name, row in rows.items() if row.get("same") is not None]
    met = not differ if told else None
    return Goal("losses and gradients are equal", met, "; ".join(differ) or f"{len(told)} variants")


def _swap(figures: dict[str, Any]) -> list[Goal]:
    return [_same(figures["variants"])]


def _recompute(figures: dict[str, Any]) -> list[Goal]:
    rows = figures["variants"]
    unmatched = []
    for name, row in rows.items():
        ours = [one for one in rows.values() if not one["peer"]]
        small = [one for one in ours if one["device_bytes_at_peak"] <= EQUAL * row["device_bytes_at_peak"]]
        quick = min((one["median_of_ratios"] for one in small), default=None)
        if row["peer"] and name != "no recompute" and not (quick and quick <= NO_SLOWER * row["median_of_ratios"]):
            unmatched.append(
                f"{name}: {row['median_of_ratios']:.3f}, ours {'none' if quick is None else f'{quick:.3f}'}"
            )
    text = f"each of Megatron's is matched with no more memory, and no more than {NO_SLOWER} of its time"
    return [_same(rows), Goal(text, not unmatched, "; ".join(unmatched) or "all")]


def _adaptive(figures: dict[str, Any]) -> list[Goal]:
    found = []
    for cap, one in figures["caps"].items():
        rows = {name: row for name, row in one["policies"].items() if "median_of_ratios" in row}
        texts = (
            f"+{OVER_FULL} % over full recompute",
            f"{OVER_BEST} points over the best of Megatron's ways",
            f"within {OF_UNCAPPED} % of keeping everything",
        )
        ratios = {name: row["median_of_ratios"] for name, row in rows.items()}
        if ADAPTIVE not in ratios or FULL not in ratios:
            found += [Goal(f"cap {cap}: {text}", None, "a plan or full recompute does not fit") for text in texts]
            continue
        mine, full = ratios[ADAPTIVE], ratios[FULL]
        best = min((n for n in ratios if rows[n]["peer"] and n != KEEP_ALL), key=lambda name: ratios[name])
        over_full, over_best = 100 * (full / mine - 1), 100 * (full / mine - full / ratios[best])
        behind = 100 * (1 - ratios[KEEP_ALL] / mine)
        found += [
            Goal(f"cap {cap}: {texts[0]}", over_full >= OVER_FULL, f"{over_full:+.1f} %"),
            Goal(f"cap {cap}: {texts[1]}", over_best >= OVER_BEST, f"{over_best:+.1f} points; the best is {best}"),
            Goal(f"cap {cap}: {texts[2]}", behind <= OF_UNCAPPED, f"{behind:.1f} % behind"),
            _same(one["policies"]),
        ]
    return found


def _attach(figures: dict[str, Any]) -> list[Goal]:
    rows = figures["variants"]
    text, plans = "found under a cap: below it, and faster than gradient checkpointing", []
    for name, row in rows.items():
        if "cap_bytes" in row:
            ahead = rows["gradient checkpointing"]["median_of_ratios"] / row["median_of_ratios"]
            plans.append((row["peak_bytes"] <= row["cap_bytes"] and ahead > 1, f"{name}: {100 * (ahead - 1):+.1f} %"))
    return [
        _same(rows),
        Goal(text, all(met for met, _ in plans) if plans else None, "; ".join(said for _, said in plans)),
    ]


def _chunk_zero(figures: dict[str, Any]) -> list[Goal]:
    return chunk_goals(figures["variants"], figures["failed"])


_GOALS = {
    "doctor": _doctor,
    "gpu-tests": _tests,
    "swap": _swap,
    "recompute": _recompute,
    "attach": _attach,
    "adaptive": _adaptive,
    "chunk_zero": _chunk_zero,
}


def wrong(records: dict[str, dict[str, Any]]) -> list[str]:
    """The pieces that did not come to an end, and those whose bits are not what they should be."""
    found = [name for name, record in records.items() if record["status"] in (FAILED, STOPPED)]
    done = {name: record["figures"] for name, record in records.items() if record["status"] == DONE}
    exact = [name for name in done if name.startswith("bits-") or name in ("doctor", "gpu-tests")]
    return found + [name for name in exact if any(goal.met is False for goal in goals(name, done[name]))]


# ---- as text
def page(facts: dict[str, Any], records: dict[str, dict[str, Any] | None]) -> str:
    """Markdown; ``records``: of all pieces, by name; None: it has not been run."""
    device = facts["device"]
    lines = [f"# {device['name']}", ""]
    lines += ["Sizes that say nothing: this tries the command out.", ""] if facts["tiny"] else []
    memory = "" if device["memory"] is None else f", {device['memory'] / 1e9:.1f} GB"
    lines += [f"- device: {device['count']} x {device['name']} ({device['type']}){memory}"]
    lines += [f"- host: {device['host']['processor']}, {device['host']['memory'] / 1e9:.0f} GB"]
    lines += ["- " + ", ".join(f"{name} {number}" for name, number in device["versions"].items())]
    lines += [f"- source {facts['source']}" + (f", commit {facts['commit']}" if facts["commit"] else ""), ""]
    lines += ["| piece | | seconds | date | goals met |", "|---|---|---|---|---|"]
    for name, record in records.items():
        lines.append(f"| {name} | " + " | ".join(_row(name, record)) + " |")
    for name, record in records.items():
        lines += [] if record is None or "seconds" not in record else _section(name, record)
    return "\n".join(lines) + "\n"


def _row(name: str, record: dict[str, Any] | None) -> tuple[str, ...]:
    if record is None:
        return "not run", "", "", ""
    status = f"{record['status']}: {record['reason']}" if "reason" in record else record["status"]
    if "seconds" not in record:
        return status, "", "", ""
    found = [goal.met for goal in goals(name, record["figures"])] if record["status"] == DONE else []
    met = f"{found.count(True)} of {len(found)}" if found else ""
    return status, f"{record['seconds']:.0f}", record["date"], met


def _section(name: str, record: dict[str, Any]) -> list[str]:
    lines = ["", f"## {name}", "", f"`python {' '.join(record['command'])}`", ""]
    if record["status"] == DONE:
        lines += [f"- {line}" for line in goal_lines(goals(name, record["figures"]))]
    shown = [] if name == "doctor" and record["status"] == DONE else record["printed"]
    if record["status"] != DONE:
        shown = [*shown, f"exit status {record['exit_status']}", *record["complained"]]
    return [*lines, "", "```", *shown, "```"] if shown else lines
