"""Traces: CSV files with a header and one line for each request, in the order of their times."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from clients.loadtest.decoding import PlanError, convert, read_text
from clients.loadtest.plan import TraceRow


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """Read a trace. Only `at_s` must be there; other columns and cells may be missing. Raises PlanError."""
    rows: list[TraceRow] = []
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        for cells in reader:
            row = _row(f"{path}:{reader.line_num}", cells)
            if rows and row.at_s < rows[-1].at_s:
                raise PlanError(
                    f"{path}:{reader.line_num}: at_s {row.at_s:g} comes after {rows[-1].at_s:g}: "
                    "a trace must be in the order of its times"
                )
            rows.append(row)
    except csv.Error as error:
        raise PlanError(f"{path}: {error}") from error
    if not rows:
        raise PlanError(f"{path}: the trace has no requests")
    return tuple(rows)


def _row(place: str, cells: dict[str, str | None]) -> TraceRow:
    if None in cells or None in cells.values():
        raise PlanError(f"{place}: the line needs as many cells as the header has columns")
    # A prompt's own spaces stay.
    stripped = {name: text if name == "prompt" else text.strip() for name, text in cells.items() if text}
    return convert({name: text for name, text in stripped.items() if text}, TraceRow, place, strict=False)
