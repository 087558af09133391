"""The drawn charts: every name of a legend and of a percentile is inside the picture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

from loraplex.loadtest.charts import WIDTH, Axis, Series, histogram_chart, line_chart
from loraplex.loadtest.report import draw_svg

# Width in pixels of a character of a text, at least.
CHARACTER = 5


def texts(svg: str) -> Iterator[tuple[str, float, float]]:
    """Yield each text of an SVG element with the places of its left and right end."""

    def walk(element: ElementTree.Element, x: float) -> Iterator[tuple[str, float, float]]:
        moved = re.match(r"translate\((-?[\d.]+)", element.get("transform", ""))
        x += float(moved[1]) if moved else 0.0
        if element.tag.endswith("}text"):
            width = CHARACTER * len(element.text or "")
            left = x - {"start": 0.0, "middle": width / 2, "end": width}[element.get("text-anchor", "start")]
            yield element.text or "", left, left + width
        for child in element:
            yield from walk(child, x)

    yield from walk(ElementTree.fromstring(svg), 0.0)


def test_a_legend_of_many_long_names_has_several_lines() -> None:
    names = ["CANCELLED", "DEADLINE_EXCEEDED", "NOT_FOUND", "OK", "RESOURCE_EXHAUSTED", "evictions from a slot"]
    lines = [Series(name, [(0.0, 1.0), (1.0, 2.0)]) for name in names]
    ends = {text: right for text, _, right in texts(draw_svg(line_chart(Axis("seconds"), Axis(""), lines)))}
    assert set(names) <= ends.keys()
    assert max(ends.values()) <= WIDTH


def test_an_axis_of_whole_numbers_has_no_halves() -> None:
    gaps = Series("gap", [(0.0, 1.0), (2.0, 2.0)])
    drawn = texts(draw_svg(line_chart(Axis("message", whole=True), Axis(""), [gaps])))
    below = [text for text, left, _ in drawn if left > 40]
    assert {"1", "2"} <= set(below)
    assert not [text for text in below if "." in text]


def test_the_name_of_a_percentile_at_the_end_is_left_of_its_line() -> None:
    marks = [("p50", 20.0), ("p99", 99.5)]
    drawn = texts(draw_svg(histogram_chart(Axis("ms", log=True), [10.0, 50.0, 100.0], [3, 4], marks)))
    places = {text: (left, right) for text, left, right in drawn}
    assert places["p99"][1] < WIDTH
    assert places["p50"][0] < WIDTH / 2
