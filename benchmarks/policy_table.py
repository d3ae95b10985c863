"""Policies under one cap as a table: measured figures beside predicted ones."""

from __future__ import annotations

from policies import ADAPTIVE, FULL, KEEP_ALL, Policy

from mindspeed_mem.adaptive import Problem


def predictions(problem: Problem, policies: dict[str, Policy], cap: int) -> dict[str, dict]:
    """Name -> predicted time as a ratio to keeping everything, bytes above a step's start, whether they fit."""
    kept = policies[KEEP_ALL].predicted.seconds
    static = max(stage.static_bytes for stage in problem.stages)
    rows = {}
    for name, policy in policies.items():
        peak = max(policy.predicted.peaks)
        rows[name] = {"predicted_ratio": policy.predicted.seconds / kept, "predicted_bytes": peak - static}
        rows[name] |= {"predicted_ms": 1e3 * policy.predicted.seconds, "corrected": policy.corrected}
        rows[name] |= {"peer": policy.peer, "fits": peak <= cap or name == KEEP_ALL}
    return rows


def table(rows: dict[str, dict]) -> str:
    """Measured where there is something measured; throughput against full recompute, or against keeping all."""
    measured = any("median_of_ratios" in row for row in rows.values())
    key = "median_of_ratios" if measured else "predicted_ratio"
    full = rows[FULL].get(key)
    head = f"{'policy':46} {'ratio':>7} {'over full':>9} {'MiB':>9} {'fits':>5} {'losses':>7}"
    lines = [head + (f" {'predicted':>10} {'MiB':>9}" if measured else "")]
    for name, row in rows.items():
        ratio, size = row.get(key), row.get("device_bytes_at_peak" if measured else "predicted_bytes")
        words = [
            f"{name:46}",
            "      -" if ratio is None else f"{ratio:>7.3f}",
            "        -" if ratio is None or full is None else f"{100 * (full / ratio - 1):>+7.1f} %",
            "        -" if size is None else f"{size / 2**20:>9.1f}",
            f"{'yes' if row['fits'] else 'no':>5}",
            f"{ {True: 'equal', False: 'DIFFER', None: '-'}[row.get('same')]:>7}",
        ]
        if measured:
            words += [
                f"{row['predicted_ratio']:>10.3f}",
                f"{row['predicted_bytes'] / 2**20:>9.1f}{'*' * row['corrected']}",
            ]
        lines.append(" ".join(words))
    if measured and any(row["corrected"] for row in rows.values()):
        lines.append("* predicted after what an earlier plan of this cap took had corrected the problem")
    return "\n".join([*lines, *_errors(rows), *_best(rows, key)])


def _errors(rows: dict[str, dict]) -> list[str]:
    """How far predictions are off at most that nothing was measured for before."""
    first = [row for row in rows.values() if not row["corrected"]]
    times = [row["predicted_ratio"] / row["median_of_ratios"] - 1 for row in first if "median_of_ratios" in row]
    sizes = [
        row["predicted_bytes"] / row["device_bytes_at_peak"] - 1 for row in first if row.get("device_bytes_at_peak")
    ]
    if not times:
        return []
    worst = [f"{100 * max(errors, key=abs):+.1f} %" for errors in (times, sizes)]
    return [f"not corrected by any measurement, predictions are off at most by {worst[0]} of time, {worst[1]} of MiB"]


def _best(rows: dict[str, dict], key: str) -> list[str]:
    """How the plan compares with the best that was found by hand."""
    fitting = {n: r[key] for n, r in rows.items() if r["peer"] and r["fits"] and key in r and n != KEEP_ALL}
    mine = rows.get(ADAPTIVE, {})
    if not fitting or key not in mine or not mine["fits"]:
        return []
    best = min(fitting, key=fitting.get)
    return [f"adaptive plan against the best by hand ({best}): {100 * (fitting[best] / mine[key] - 1):+.1f} %"]
