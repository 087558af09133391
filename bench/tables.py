"""Writes the figures of JSON files into docs/results/benchmarks.md, between the markers of each benchmark.

<!-- bench.engine -->
...replaced...
<!-- end of bench.engine -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class MarkersMissingError(Exception):
    """A page without the markers for a benchmark's figures."""


def rewrite(page: str, report: Mapping[str, Any]) -> str:
    """Return the page with the tables of `report`, a benchmark's JSON values. Raises MarkersMissingError."""
    name = report["name"]
    begin, end = f"<!-- bench.{name} -->", f"<!-- end of bench.{name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise MarkersMissingError(f"the page must have one line {begin} and after it one line {end}")
    # Ratios without an aim follow from the tables: --json has them, the page does not.
    ratios = {key: value for key, value in report["ratios"].items() if report["aims"][key] != "reported"}
    return pattern.sub(lambda _: f"{begin}\n{markdown({**report, 'ratios': ratios})}\n{end}", page)


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report's command, machine, tables, and ratios with their aims in brackets as Markdown."""
    machine = report["machine"]
    where = f"`{report['command']}` on {machine['processor']}, {machine['cores']} cores, load {machine['load_1_min']}."
    aims = {key: "" if aim == "reported" else f" ({aim})" for key, aim in report["aims"].items()}
    ratios = "\n".join(f"- `{key}`: {cell(value)}{aims[key]}" for key, value in report["ratios"].items())
    rows = report["rows"] if report.get("page_rows") is None else report["page_rows"]
    return "\n\n".join(filter(None, (where, *_tables(rows), ratios)))


def _tables(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the rows as tables; a new one begins at a row whose keys neither contain the table's nor are among them."""
    parts: list[tuple[dict[str, Any], list[Mapping[str, Any]]]] = []
    for row in map(_shown, rows):
        if not parts or not (row.keys() <= parts[-1][0].keys() or row.keys() >= parts[-1][0].keys()):
            parts.append(({}, []))
        parts[-1][0].update(row)
        parts[-1][1].append(row)
    for keys, part in parts:
        (first, *others), units = keys, {row.get("unit") for row in part}
        # A unit of all rows is said once, in the head; of several each is behind its row's name.
        is_one = len(units) == 1 and "unit" in keys
        shown = [key for key in others if key != "unit"]
        head = f"{first}, {part[0]['unit']}" if is_one else first
        cells = []
        for row in part:
            name = cell(row.get(first, ""))
            named = name if is_one or "unit" not in row else f"{name}, {row['unit']}"
            cells.append([named, *(cell(row.get(key, "")) for key in shown)])
        yield _table([head, *shown], cells)


def _shown(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row without the range and the number of its runs, which the JSON file has."""
    return {key: value for key, value in row.items() if "low" not in row or key not in ("low", "high", "runs")}


def cell(value: Any) -> str:
    """Return a value as text: numbers below 10 with three digits, larger ones with one decimal place."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}"
    return str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
