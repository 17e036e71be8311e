"""The picture of a sweep: hits and goodput over the number of replicas, a line for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

STYLES = ("-", "--", "-.", ":")  # lines may coincide
PANELS = {"hits": "prompt tokens found cached, %", "met": "requests within both targets, %"}


def draw(rows: Sequence[dict[str, str | float]], title: str, path: Path) -> None:
    """Rows of cluster.py as an SVG."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    figure.suptitle(title, fontsize=9)
    for axes, (name, label) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for policy, style in zip(dict.fromkeys(row["policy"] for row in rows), STYLES, strict=False):
            of_policy = [row for row in rows if row["policy"] == policy]
            places = [row["replicas"] for row in of_policy]
            axes.plot(places, [100 * float(row[name]) for row in of_policy], style, marker="o", label=policy)
        axes.set(xscale="log", xlabel="replicas", ylabel=label, ylim=(0, 102))
        axes.set_xticks(ticks := list(dict.fromkeys(row["replicas"] for row in rows)), map(str, ticks))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower left")
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tokenwright"}):
        figure.savefig(path, metadata={"Date": None})
