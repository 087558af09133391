"""Charts as Vega-Lite specifications: lines, histograms, shares and timetables. `plots` draws them."""

from __future__ import annotations

import json
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
# Largest number of marks for messages in a timetable, so that a page with long streams stays a few megabytes.
MAX_TICKS = 5_000


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


@dataclass(frozen=True)
class Series:
    """A named line through points; `labels`, if any, are written beside them. The line ends where a value is None."""

    name: str
    points: Sequence[tuple[float, float | None]]
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Stream:
    """A row of a timetable from `begin` to `end`, with the time of each message. `colour` is an index."""

    name: str
    begin: float
    end: float
    messages: Sequence[float]
    colour: int
    title: str


def line_chart(x: Axis, y: Axis, series: Sequence[Series], *, dots: bool = False) -> Spec:
    """Draw lines over shared axes; `dots` marks each point."""
    return chart(_lines(x, y, series, [line.name for line in series], dots=dots, zoom=zoom("x", "y")))


def two_axis_chart(x: Axis, left: tuple[Axis, Series], right: tuple[Axis, Series], *, dots: bool = False) -> Spec:
    """Draw two lines, each with a vertical axis of its own."""
    names = [left[1].name, f"{right[1].name} (right)"]
    layers = [
        _lines(x, left[0], [Series(names[0], left[1].points)], names, dots=dots, zoom=zoom("x")),
        _lines(x, right[0], [Series(names[1], right[1].points)], names, dots=dots),
    ]
    return chart({"layer": layers, "resolve": {"scale": {"y": "independent"}}})


def histogram_chart(
    x: Axis, bounds: Sequence[float], counts: Sequence[float], marks: Sequence[tuple[str, float]]
) -> Spec:
    """Draw bars between neighbouring `bounds`, and named vertical lines."""
    bars = [
        {"low": low, "high": high, "count": count} for low, high, count in zip(bounds, bounds[1:], counts, strict=False)
    ]
    named = [{"name": name, "value": value, "row": number} for number, (name, value) in enumerate(marks)]
    at = {"field": "value", "type": "quantitative"}
    return chart(
        {
            "layer": [
                {
                    "data": {"values": bars},
                    "mark": {"type": "rect", "color": COLOURS[0]},
                    "params": [zoom("x")],
                    "encoding": {
                        "x": position("low", x, {"type": "log", "nice": False}),
                        "x2": {"field": "high"},
                        # Room for the lines' names above the bars.
                        "y": position("count", Axis("count", whole=True), {"domainMax": max(counts, default=1) * 1.2}),
                        "y2": {"datum": 0},
                        "tooltip": [tip("low", "from, ms"), tip("high", "to, ms"), tip("count", "count", ",d")],
                    },
                },
                {
                    "data": {"values": named},
                    "mark": {"type": "rule", "color": "var(--ink)", "strokeDash": [3, 3]},
                    "encoding": {"x": at, "tooltip": [tip("name", "percentile", ""), tip("value", "milliseconds")]},
                },
                {
                    "data": {"values": named},
                    "mark": {
                        "type": "text",
                        "yOffset": 6,
                        "align": {"expr": mark_side("'right'", "'left'")},
                        "dx": {"expr": mark_side("-3", "3")},
                    },
                    "encoding": {
                        "x": at,
                        "y": {"field": "row", "type": "quantitative", "scale": {"domain": [24, 0]}, "axis": None},
                        "text": {"field": "name"},
                    },
                },
            ],
            "resolve": {"scale": {"y": "independent"}},
        }
    )


def share_chart(rows: Sequence[tuple[str, str, float]]) -> Spec:
    """Draw percentages as horizontal bars: rows of (name, kind, percentage), the kinds below each other."""
    values = [{"name": name, "kind": kind, "share": share} for name, kind, share in rows]
    kinds = list(dict.fromkeys(kind for _, kind, _ in rows))
    return chart(
        {
            "data": {"values": values},
            "height": {"step": 11},
            "mark": "bar",
            "params": [zoom("x")],
            "encoding": {
                "y": {"field": "name", "type": "nominal", "sort": None, "title": None},
                "yOffset": {"field": "kind", "sort": kinds},
                "x": position("share", Axis("%")),
                "color": {"field": "kind", "scale": {"domain": kinds}, "legend": legend_of(kinds)},
                "tooltip": [tip("name", "tenant", ""), tip("kind", "", ""), tip("share", "%", ".1f")],
            },
        }
    )


def timetable(x: Axis, streams: Sequence[Stream]) -> Spec:
    """Draw streams below each other: grey until the first message, then coloured, with a tick for each message.

    Shows as many of the first streams as have MAX_TICKS messages together, and at least one.
    """
    shown, ticks = 0, 0
    while shown < len(streams) and (not shown or ticks + len(streams[shown].messages) <= MAX_TICKS):
        ticks += len(streams[shown].messages)
        shown += 1
    streams = streams[:shown]
    spans, messages = [], []
    for row, stream in enumerate(streams):
        first = stream.messages[0] if stream.messages else stream.end
        common = {"row": row, "title": stream.title}
        colour = COLOURS[stream.colour % len(COLOURS)]
        spans.append({**common, "from": stream.begin, "to": first, "colour": "var(--rule)", "opacity": 1})
        spans.append({**common, "from": first, "to": stream.end, "colour": colour, "opacity": 0.28})
        messages += [{"row": row, "at": at, "colour": colour} for at in stream.messages[:MAX_TICKS]]
    # An expression of Vega's language, in which JSON's lists are literals.
    labels = json.dumps([stream.name for stream in streams])
    y = {
        "field": "row",
        "type": "ordinal",
        "title": None,
        "axis": {"labelExpr": f"{labels}[datum.value]", "labelLimit": 60},
    }
    return chart(
        {
            "height": {"step": 22 if shown <= 12 else 12},
            "encoding": {"y": y, "color": {"field": "colour", "scale": None}},
            "layer": [
                {
                    "data": {"values": spans},
                    "mark": {"type": "bar", "height": {"band": 0.8}},
                    "params": [zoom("x")],
                    "encoding": {
                        "x": position("from", x, {"nice": False}),
                        "x2": {"field": "to"},
                        "opacity": {"field": "opacity", "type": "quantitative", "scale": None},
                        "tooltip": {"field": "title"},
                    },
                },
                {
                    "data": {"values": messages},
                    "mark": {"type": "tick", "thickness": 1.5, "height": {"band": 0.8}},
                    "encoding": {
                        "x": position("at", x, {"nice": False}),
                        "tooltip": [tip("at", "milliseconds")],
                    },
                },
            ],
        }
    )


def _lines(
    x: Axis, y: Axis, series: Sequence[Series], names: Sequence[str], *, dots: bool, zoom: Spec | None = None
) -> Spec:
    values = [{"x": a, "y": b, "series": line.name} for line in series for a, b in line.points]
    labelled = [
        {"x": a, "y": b, "label": label}
        for line in series
        for (a, b), label in zip(line.points, line.labels, strict=False)
    ]
    legend = legend_of(names) if len(names) > 1 else None
    colour = {"field": "series", "scale": {"domain": names}, "legend": legend}
    places = {"x": position("x", x), "y": position("y", y)}
    tips = [tip("series", "", ""), tip("x", x.title), tip("y", y.title)]
    # Invisible points answer the pointer where no dots are drawn.
    point = {"type": "circle", "size": 42, "opacity": 1 if dots else 0}
    layers: list[Spec] = [
        {"mark": {"type": "line", "strokeWidth": 1.8}, "encoding": {**places, "color": colour}},
        {"mark": point, "encoding": {**places, "color": colour, "tooltip": tips}},
    ]
    if zoom is not None:
        layers[0]["params"] = [zoom]
    if labelled:
        text = {"mark": {"type": "text", "dx": 6, "dy": -6}, "data": {"values": labelled}}
        layers.append({**text, "encoding": {**places, "text": {"field": "label"}}})
    return {"data": {"values": values}, "layer": layers}
