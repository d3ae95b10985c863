"""Throughput over memory, one point per variant: what lies up and to the left of another is better in both."""

from __future__ import annotations

from pathlib import Path


def draw(
    rows: dict[str, dict], target: Path, title: str, base: str = "no recompute", peers: str = "Megatron alone"
) -> None:
    """``rows``: name -> ``device_bytes_at_peak``, ``median_of_ratios`` (to ``base``) and ``peer``. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 6.5))
    for peer, colour, label in ((True, "tab:red", peers), (False, "tab:blue", "mindspeed_mem")):
        mine = [(n, r["device_bytes_at_peak"] / 2**20, 1 / r["median_of_ratios"]) for n, r in rows.items()]
        mine = [point for point in mine if rows[point[0]]["peer"] == peer]
        axes.scatter([x for _, x, _ in mine], [y for _, _, y in mine], c=colour, label=label, zorder=3)
        for name, x, y in mine:
            short = name.removeprefix("Megatron ")
            axes.annotate(short, (x, y), fontsize=7, color=colour, xytext=(4, 4), textcoords="offset points")
    for peer, colour in ((True, "tab:red"), (False, "tab:blue")):
        xs, ys = frontier(rows, peer)
        axes.step(xs, ys, where="post", color=colour, alpha=0.4)
    axes.set_xlabel("device memory of a step at its peak, MiB")
    axes.set_ylabel(f"throughput ({base} = 1)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def frontier(rows: dict[str, dict], peer: bool) -> tuple[list[float], list[float]]:
    """The best throughput within each amount of memory, ascending."""
    points = sorted(
        (r["device_bytes_at_peak"] / 2**20, 1 / r["median_of_ratios"])
        for r in rows.values()
        if r["peer"] == peer or r["median_of_ratios"] == 1
    )
    xs, ys, best = [], [], 0.0
    for x, y in points:
        if y > best:
            best = y
            xs.append(x)
            ys.append(y)
    return xs, ys
