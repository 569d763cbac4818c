"""The picture of a run: the router's resources and throughput over time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from benchmarks.soaking.verdict import LAG_MS
from benchmarks.soaking.watch import Sample

_CARD, _EDGE, _WORD, _SMALL = "#fcfcfa", "#c9c9c3", "#24292f", "#57606a"
_COLORS = ("#2f5f9e", "#2f7d4f", "#b5402c", "#4a52a3")
_FONTS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def draw(samples: Sequence[Sample], path: Path, title: str) -> None:
    """Write the picture as SVG. The same samples give the same bytes."""
    matplotlib.use("svg")
    style = {"svg.fonttype": "none", "svg.hashsalt": "soak", "font.family": "sans-serif", "font.size": 10}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(4, 1, figsize=(7.6, 6.4), sharex=True, facecolor=_CARD, layout="constrained")
        minutes = [sample.at / 60 for sample in samples]
        rows: list[tuple[str, list[float]]] = [
            ("memory of the process, MB", [sample.rss for sample in samples]),
            ("tokens remembered, thousands", [sample.tree_tokens / 1000 for sample in samples]),
            ("event loop lag, p99, ms", [sample.lag_p99 for sample in samples]),
            ("requests a second", [sample.per_second for sample in samples]),
        ]
        for axis, color, (name, values) in zip(axes, _COLORS, rows, strict=True):
            _panel(axis, minutes, values, name, color)
        axes[2].axhline(LAG_MS, color=_SMALL, linewidth=0.8, linestyle=(0, (4, 3)))
        axes[-1].set_xlabel("minutes", color=_SMALL)
        figure.savefig(path, format="svg", metadata={"Title": title})
        pyplot.close(figure)
    # Remove what varies: the date in the metadata, and this machine's fonts.
    picture = re.sub(r" <metadata>.*?</metadata>\n", "", path.read_text(), flags=re.DOTALL)
    path.write_text(re.sub(r"font-family: [^;\"]*", f"font-family: {_FONTS}", picture))


def _panel(axis: Any, minutes: list[float], values: list[float], name: str, color: str) -> None:
    axis.plot(minutes, values, color=color, linewidth=1.3)
    axis.set_title(name, loc="left", color=_WORD, fontsize=10)
    axis.set_facecolor("#ffffff")
    axis.set_xlim(0, minutes[-1])
    axis.set_ylim(0, 1.15 * max(*values, 1e-9))
    axis.tick_params(colors=_SMALL, labelsize=9, length=3)
    axis.grid(axis="y", color="#e4e6e9", linewidth=0.8)
    for side in axis.spines.values():
        side.set_color(_EDGE)
