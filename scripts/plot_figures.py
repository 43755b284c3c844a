# SPDX-License-Identifier: Apache-2.0
"""Draw the plots of docs/images from benchmarks/results: `python scripts/plot_figures.py` (needs matplotlib).

A file has a title, the ways that were compared, and for each load the lowest, middle and highest figure of each way.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
COLORS = ("#76b900", "#4a6fa5", "#b0763b", "#8a8a8a")
WIDTH = 0.2
"""A bar's width; loads are 1 apart."""


def draw(figures: dict[str, Any], path: Path) -> None:
    """Bars with the range of the rounds, a group for each load; 1 is a line."""
    ways, rows = figures["ways"], figures["rows"]
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    axes = figure.subplots()
    for number, (way, color) in enumerate(zip(ways, COLORS, strict=False)):
        bars = [(place + WIDTH * number, row[number]) for place, row in enumerate(rows.values()) if row[number]]
        places, ranges = zip(*bars, strict=True)
        lows, middles, highs = zip(*ranges, strict=True)
        errors = [
            [middle - low for low, middle in zip(lows, middles, strict=True)],
            [high - middle for middle, high in zip(middles, highs, strict=True)],
        ]
        axes.bar(places, middles, WIDTH * 0.92, label=way, color=color, yerr=errors, error_kw={"elinewidth": 0.8})
    axes.axhline(1, color="#333333", linewidth=0.8, zorder=0)
    middle = WIDTH * (len(ways) - 1) / 2
    axes.set_xticks([place + middle for place in range(len(rows))], [textwrap.fill(load, 16) for load in rows])
    axes.set_title(figures["title"], fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)
    axes.legend(frameon=False, ncols=len(ways), fontsize=9)
    axes.set_ylim(0, max(2.1, axes.get_ylim()[1]))
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hf_triton", "font.family": "sans-serif"})
    for results in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        figures = json.loads(results.read_text(encoding="utf-8"))
        if "ways" in figures:  # others stand in tables
            draw(figures, ROOT / "docs" / "images" / f"{results.stem}.svg")
