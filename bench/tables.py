"""Writes the figures of JSON files into docs/results/benchmarks.md, between the markers of each benchmark.

<!-- bench.engine -->
...replaced...
<!-- end of bench.engine -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
    return pattern.sub(lambda _: f"{begin}\n{markdown(report)}\n{end}", page)


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report's command, machine and two tables as Markdown."""
    machine, versions = report["machine"], report["versions"]
    packages = ", ".join(f"{package} {version}" for package, version in versions.items())
    where = (
        f"`{report['command']}` on {machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"OMP_WAIT_POLICY {machine['omp_wait_policy']}, load {machine['load_1_min']} at the end; {packages}."
    )
    keys = list(dict.fromkeys(key for row in report["rows"] for key in row))
    rows = [[cell(row.get(key, "")) for key in keys] for row in report["rows"]]
    ratios = [[f"`{key}`", cell(value), report["aims"][key]] for key, value in report["ratios"].items()]
    return "\n\n".join((where, _table(keys, rows), _table(("ratio", "value", "aim"), ratios)))


def cell(value: Any) -> str:
    """Return a value as text: numbers below 10 with three digits, larger ones with one decimal place."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}"
    return str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
