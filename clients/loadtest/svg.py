"""Plots as SVG text: lines, histograms and streams, with axes. No script, no font and no file but the page itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 62, 14, 44


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, in `label`'s unit; on a `log` axis both are above 0. `whole`: it counts things."""

    label: str
    low: float
    high: float
    log: bool = False
    whole: bool = False

    def at(self, value: float) -> float:
        """Where a value lies, 0 to 1."""
        if self.log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values to be named."""
        if self.log and self.high / self.low > 20:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            steps = (1,) if last - first > 3 else (1, 2, 5)
            found = [step * 10.0**power for power in range(first - 1, last + 1) for step in steps]
            return [value for value in found if self.low <= value * 1.0001 and value <= self.high * 1.0001]
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
        if self.whole:
            step = float(math.ceil(step))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def linear(label: str, values: Sequence[float]) -> Axis:
    """From 0 to a little beyond the largest."""
    top = max([value for value in values if math.isfinite(value)], default=0.0)
    return Axis(label, 0.0, top * 1.08 or 1.0)


def logarithmic(label: str, values: Sequence[float]) -> Axis:
    """Around all values above 0."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    return Axis(label, low / 1.15, high * 1.15, log=True)


@dataclass(frozen=True)
class Series:
    """Points to be joined. `right`: on the axis of that side. `names` go with the points."""

    name: str
    points: Sequence[tuple[float, float]]
    right: bool = False
    names: Sequence[str] = ()


def lines(x: Axis, y: Axis, series: Sequence[Series], right: Axis | None = None, *, dots: bool = False) -> str:
    """A plot of lines; each has a colour of its own, and its name below."""
    parts = [_frame(x, y, right)]
    for number, one in enumerate(series):
        axis = right if one.right and right is not None else y
        places = [(_x(x.at(a)), _y(axis.at(b))) for a, b in one.points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        dash = ' stroke-dasharray="6 3"' if one.right else ""
        parts.append(f'<polyline class="line c{number % 8}" points="{path}"{dash}/>')
        for at, (a, b) in enumerate(places if dots else ()):
            value = one.points[at]
            title = f"{one.name}: {number_text(value[0])}, {number_text(value[1])}"
            parts.append(f'<circle class="dot c{number % 8}" cx="{a:.1f}" cy="{b:.1f}" r="3.5"><title>{escape(title)}')
            parts.append("</title></circle>")
            if at < len(one.names):
                parts.append(f'<text class="name" x="{a + 6:.1f}" y="{b - 6:.1f}">{escape(one.names[at])}</text>')
    names = [f"{one.name} (right)" if one.right else one.name for one in series]
    return _svg("".join(parts) + _legend(names), HEIGHT + (20 if len(names) > 1 else 0))


def bars(x: Axis, bounds: Sequence[float], counts: Sequence[float], marks: Sequence[tuple[str, float]]) -> str:
    """A histogram with named vertical lines."""
    y = replace(linear("count", counts), whole=True)
    parts = [_frame(x, y, None)]
    for number, count in enumerate(counts):
        begin, end = _x(x.at(bounds[number])), _x(x.at(bounds[number + 1]))
        top = _y(y.at(count))
        title = f"{number_text(bounds[number])} to {number_text(bounds[number + 1])}: {count:,.0f}"
        parts.append(
            f'<rect class="bar c0" x="{begin:.1f}" y="{top:.1f}" width="{max(0.5, end - begin - 1):.1f}" '
            f'height="{_y(0) - top:.1f}"><title>{escape(title)}</title></rect>'
        )
    for number, (name, value) in enumerate(marks):
        at = _x(x.at(value))
        parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_y(0):.1f}"/>')
        parts.append(f'<text class="name" x="{at + 3:.1f}" y="{_TOP + 10 + 12 * number}">{escape(name)}</text>')
    return _svg("".join(parts))


@dataclass(frozen=True)
class Strip:
    """One request: a row from `begin` to `end` with a tick for each message. `colour` is a number."""

    name: str
    begin: float
    end: float
    ticks: Sequence[float]
    colour: int
    title: str


def strips(x: Axis, rows: Sequence[Strip]) -> str:
    """Requests beside each other over time: pale until the first message, a tick for each."""
    pitch = 22 if len(rows) <= 12 else 12
    height = _TOP + _BOTTOM + pitch * len(rows)
    parts = [_ticks_x(x, height)]
    for number, row in enumerate(rows):
        top, thick = _TOP + pitch * number, pitch - 4
        begin, end = _x(x.at(row.begin)), _x(x.at(row.end))
        first = _x(x.at(row.ticks[0])) if row.ticks else end
        tone = f"c{row.colour % 8}"
        parts.append(
            f'<g><title>{escape(row.title)}</title><rect class="wait" x="{begin:.1f}" y="{top}" '
            f'width="{max(0.5, first - begin):.1f}" height="{thick}"/>'
            f'<rect class="span {tone}" x="{first:.1f}" y="{top}" width="{max(0.5, end - first):.1f}" '
            f'height="{thick}"/>'
        )
        marks = "".join(f"M{_x(x.at(tick)):.1f} {top}v{thick}" for tick in row.ticks)
        parts.append(f'<path class="line {tone}" d="{marks}"/></g>')
        parts.append(f'<text class="tick end" x="{_LEFT - 6}" y="{top + thick - 2}">{escape(row.name[:9])}</text>')
    return _svg("".join(parts), height)


def number_text(value: float) -> str:
    """A number in at most four digits or so."""
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _frame(x: Axis, y: Axis, right: Axis | None) -> str:
    parts = [_ticks_x(x, HEIGHT)]
    for value in y.ticks():
        at = _y(y.at(value))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 6}" y="{at + 4:.1f}">{number_text(value)}</text>')
    middle = (HEIGHT - _BOTTOM + _TOP) / 2
    parts.append(f'<text class="label" transform="translate(12 {middle}) rotate(-90)">{escape(y.label)}</text>')
    if right is not None:
        for value in right.ticks():
            at = _y(right.at(value))
            parts.append(f'<text class="tick" x="{WIDTH - _RIGHT + 6}" y="{at + 4:.1f}">{number_text(value)}</text>')
        place = f"translate({WIDTH - 8} {middle}) rotate(-90)"
        parts.append(f'<text class="label" transform="{place}">{escape(right.label)}</text>')
    return "".join(parts)


def _ticks_x(x: Axis, height: int) -> str:
    parts = []
    bottom = height - _BOTTOM
    for value in x.ticks():
        at = _x(x.at(value))
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick mid" x="{at:.1f}" y="{bottom + 16}">{number_text(value)}</text>')
    parts.append(f'<text class="label" x="{WIDTH / 2}" y="{height - 8}">{escape(x.label)}</text>')
    return "".join(parts)


def _legend(names: Sequence[str]) -> str:
    """The colours' names in a line below; none for one colour."""
    parts, left = [], _LEFT
    for number, name in enumerate(names if len(names) > 1 else ()):
        parts.append(f'<path class="line c{number % 8}" d="M{left} {HEIGHT + 8}h18"/>')
        parts.append(f'<text class="tick" x="{left + 24}" y="{HEIGHT + 12}">{escape(name)}</text>')
        left += 44 + round(6.2 * len(name))
    return "".join(parts)


def _svg(content: str, height: int = HEIGHT) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">{content}</svg>'


def standalone(plot: str, css: str) -> str:
    """A plot of these functions as the content of an SVG file, with the page's colours."""
    head, _, rest = plot.partition(">")
    style = "svg{font-family:system-ui,sans-serif;background:var(--paper)}"
    return f"{head}><style>{escape(css, quote=False)}{style}</style>{rest}\n"


def _x(share: float) -> float:
    return _LEFT + share * (WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)
