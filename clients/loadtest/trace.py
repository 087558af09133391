"""Traces: CSV files with a header, a request a line, in the order of their times."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clients.loadtest.plan import TraceRow
from clients.loadtest.table import PlanError


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """Its rows. `at_s` must be there; every other column, and every other cell, may be missing. Raises PlanError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            _check_header(path, reader.fieldnames)
            rows: list[TraceRow] = []
            for cells in reader:
                row = _row(f"{path}:{reader.line_num}", cells)
                if rows and row.at_s < rows[-1].at_s:
                    raise PlanError(
                        f"{path}:{reader.line_num}: at_s {row.at_s:g} comes after {rows[-1].at_s:g}: "
                        "a trace must be in the order of its times"
                    )
                rows.append(row)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {getattr(error, 'strerror', None) or 'not text in UTF-8'}") from error
    except csv.Error as error:
        raise PlanError(f"{path}: {error}") from error
    if not rows:
        raise PlanError(f"{path}: the trace has no requests")
    return tuple(rows)


def _check_header(path: Path, names: Any) -> None:
    unknown = [name for name in names or () if name not in _COLUMNS]
    if unknown or "at_s" not in (names or ()):
        what = f"unknown column {unknown[0]!r}" if unknown else "no column at_s"
        raise PlanError(f"{path}: {what}; a trace has at_s and any of {', '.join(list(_COLUMNS)[1:])}")


def _row(place: str, cells: dict[str | Any, Any]) -> TraceRow:
    values: dict[str, Any] = {}
    for name, text in cells.items():
        if name is None or text is None:
            raise PlanError(f"{place}: as many cells as the header has columns are needed")
        if not text.strip():
            continue
        try:
            values[name] = _COLUMNS[name](text if name == "prompt" else text.strip())
        except ValueError:
            raise PlanError(f"{place}: {name} {text!r} is not {_MEANINGS[name]}") from None
    if "at_s" not in values:
        raise PlanError(f"{place}: at_s is missing")
    return TraceRow(**values)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def _tokens(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


_COLUMNS: dict[str, Callable[[str], Any]] = {
    "at_s": _seconds,
    "tenant": str,
    "adapter": str,
    "prompt": str,
    "prompt_tokens": _tokens,
    "answer_tokens": _tokens,
}
_MEANINGS = {
    "at_s": "a number of seconds, 0 or more",
    "prompt_tokens": "a whole number, 1 or more",
    "answer_tokens": "a whole number, 1 or more",
}
