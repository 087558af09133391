"""Parts of the charts' Vega-Lite specifications: size, colours, axes, legends, tooltips and zoom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Spec: TypeAlias = dict[str, Any]

WIDTH, HEIGHT = 640, 300
# Widths in pixels of an entry of a legend without its name, and of a character of a name.
_LEGEND_ENTRY, _CHARACTER = 34, 6

COLOURS = [f"var(--c{number})" for number in range(8)]
_TEXT = {"labelColor": "var(--dim)", "titleColor": "var(--dim)", "titleFontWeight": "normal"}
_CONFIG = {
    "aria": False,
    "font": "system-ui, sans-serif",
    "range": {"category": COLOURS},
    "view": {"stroke": None},
    "axis": {
        **_TEXT,
        "gridColor": "var(--rule)",
        "domain": False,
        "tickColor": "var(--rule)",
        "labelFlush": False,
        "titlePadding": 10,
    },
    "axisX": {"tickCount": 8, "labelSeparation": 5},
    # Vega measures texts with a font that may be narrower than the browser's.
    "legend": {**_TEXT, "orient": "bottom", "title": None, "columnPadding": 24},
    "text": {"color": "var(--ink)", "align": "left", "fontSize": 11},
}


@dataclass(frozen=True)
class Axis:
    """An axis with its title: linear from 0, or logarithmic. Ticks of a `whole` axis are integers."""

    title: str
    log: bool = False
    whole: bool = False


def chart(body: Spec) -> Spec:
    """Return a whole specification."""
    fit = {"type": "fit-x", "contains": "padding"}
    return {"background": None, "width": WIDTH, "height": HEIGHT, "autosize": fit, "config": _CONFIG} | body


def legend_of(names: Sequence[str]) -> Spec:
    """Return a legend with as many columns as the chart has room for: Vega cuts what is beyond its width."""
    return {"columns": {"expr": f"max(1, floor(width / {_LEGEND_ENTRY + _CHARACTER * max(map(len, names))}))"}}


def mark_side(left: str, right: str) -> str:
    """Return an expression of Vega's language: `left` for a mark at the chart's right end, else `right`."""
    return f"scale('x', datum.value) > width - {_CHARACTER * 4} ? {left} : {right}"


def position(field: str, axis: Axis, scale: Spec | None = None) -> Spec:
    """Return the encoding of a field along an axis."""
    if scale is None:
        # Padding in pixels, so that points at the ends are not cut in half.
        scale = {"type": "log", "nice": False, "padding": 8} if axis.log else {"zero": True}
    # Vega has ticks between 0, 1 and 2 in spite of tickMinStep: these get no label.
    whole = {"tickMinStep": 1, "format": "d", "labelExpr": "datum.value % 1 ? '' : datum.label"}
    steps = {"axis": whole} if axis.whole else {}
    return {"field": field, "type": "quantitative", "title": axis.title, "scale": scale, **steps}


def tip(field: str, title: str, number_format: str = ",.4~g") -> Spec:
    """Return a line of a tooltip; without a format it is text."""
    numeric = {"type": "quantitative", "format": number_format} if number_format else {"type": "nominal"}
    return {"field": field, "title": title or field, **numeric}


def zoom(*encodings: str) -> Spec:
    """Let dragging move the chart, the wheel with Ctrl zoom it, and a double click reset it."""
    select = {"type": "interval", "encodings": list(encodings), "zoom": "wheel![event.ctrlKey]"}
    return {"name": "zoom", "select": select, "bind": "scales"}
