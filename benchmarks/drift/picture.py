"""The picture of the study: how many rollouts change, by their length."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

_CARD, _EDGE, _WORD, _SMALL = "#fcfcfa", "#c9c9c3", "#24292f", "#57606a"
_COLORS = ("#2f5f9e", "#b5402c", "#2f7d4f", "#4a52a3")
_FONTS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def draw(models: Mapping[str, Sequence[dict[str, Any]]], path: Path, title: str) -> None:
    """Write the picture as SVG, from rows as `report.by_length` returns them. The same rows give the same bytes."""
    matplotlib.use("svg")
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "drift", "font.family": "sans-serif", "font.size": 10}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(1, 2, figsize=(7.6, 3.4), facecolor=_CARD, layout="constrained")
        for axis, field, name in zip(
            axes, ("changed", "tokens"), ("rollouts that change at all, %", "tokens that change, %"), strict=True
        ):
            colors = iter(_COLORS)
            for model, rows in models.items():
                for temperature in sorted({row["temperature"] for row in rows}):
                    same = [row for row in rows if row["temperature"] == temperature]
                    _line(axis, same, field, f"{model}, {temperature}", next(colors))
            axis.set_title(name, loc="left", color=_WORD, fontsize=10)
            axis.set_xlabel("sampled tokens of a rollout", color=_SMALL)
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted({row["length"] for rows in models.values() for row in rows}))
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.set_ylim(0, None)
            axis.set_facecolor("#ffffff")
            axis.tick_params(colors=_SMALL, labelsize=9, length=3)
            axis.grid(axis="y", color="#e4e6e9", linewidth=0.8)
            for side in axis.spines.values():
                side.set_color(_EDGE)
        axes[0].legend(frameon=False, fontsize=9, labelcolor=_SMALL)
        figure.savefig(path, format="svg", metadata={"Title": title})
        pyplot.close(figure)
    # Remove what varies: the date in the metadata, and this machine's fonts.
    picture = re.sub(r" <metadata>.*?</metadata>\n", "", path.read_text(), flags=re.DOTALL)
    path.write_text(re.sub(r"font-family: [^;\"]*", f"font-family: {_FONTS}", picture))


def _line(axis: Any, rows: Sequence[dict[str, Any]], field: str, label: str, color: str) -> None:
    lengths = [row["length"] for row in rows]
    shares = [row[field] for row in rows]
    axis.plot(
        lengths,
        [100 * one["part"] / one["whole"] for one in shares],
        color=color,
        linewidth=1.5,
        marker="o",
        markersize=3,
        label=label,
    )
    low, high = ([100 * one[end] for one in shares] for end in ("low", "high"))
    axis.fill_between(lengths, low, high, color=color, alpha=0.12, linewidth=0)
