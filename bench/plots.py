"""Plots of the benchmarks: SVG files whose bytes depend only on the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_DOCS = Path(__file__).parents[1] / "docs"
BENCHMARKS_PAGE, PLOTS = _DOCS / "results" / "benchmarks.md", _DOCS / "plots"

# Size of a panel in inches.
_WIDTH, _HEIGHT = 3.6, 2.8


@dataclass(frozen=True)
class Panel:
    """A drawing: lines by name, each of (x, y) points."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    logarithmic: bool = True


def draw(panels: Sequence[Panel], path: Path, columns: int = 3) -> None:
    """Draw panels side by side, `columns` a line, with one legend. The y axis is logarithmic or begins at zero."""
    # Imported here, because only a full run needs matplotlib.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    lines = -(-len(panels) // columns)
    # Without a salt, the ids in the file are random.
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure = Figure(figsize=(_WIDTH * min(columns, len(panels)), _HEIGHT * lines + 0.4), layout="constrained")
        grid = figure.subplots(lines, min(columns, len(panels)), squeeze=False)
        for axes, panel in zip(grid.flat, panels, strict=False):
            for name, points in panel.lines.items():
                axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=name)
            axes.set_title(panel.title, fontsize="medium")
            axes.set_xlabel(panel.x_label)
            axes.set_ylabel(panel.y_label)
            axes.set_xscale("log", base=2)
            ticks = sorted({x for points in panel.lines.values() for x, _ in points})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            if panel.logarithmic:
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        names = panels[0].lines
        if len(names) > 1:
            figure.legend(grid.flat[0].get_legend_handles_labels()[0], list(names), loc="outside lower center", ncols=6)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
