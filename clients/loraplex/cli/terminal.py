"""Output of the command: tables and colours at a terminal, plain lines in a pipe, JSON with --json."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp
    from rich.console import Console, RenderableType
    from rich.status import Status
    from rich.table import Table

# Characters that would end a cell or a line of the output.
_BREAKS = dict.fromkeys(map(ord, "\t\n\u2028\u2029"), " ")
# Control characters except tab and newline: a model's text must not control the terminal.
_CONTROLS = dict.fromkeys([*(code for code in range(32) if code not in (9, 10)), *range(127, 160)])
# Characters that JSON leaves as they are, and that control a terminal or cannot be written.
_UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class CommandError(Exception):
    """A failure that ends the command with one line. `exit_code`: 2 for bad input or an unreachable address, else 1."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@cache
def out() -> Console:
    """Return the console of stdout."""
    from rich.console import Console

    return Console(highlight=False)


@cache
def err() -> Console:
    """Return the console of stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def read_text(path: Path, flag: str) -> str:
    """Return a file's text. Raises CommandError that names the flag."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{flag}: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"{flag}: {path} is not UTF-8 text") from error


def read_stdin() -> str:
    """Return the text of stdin. Raises CommandError."""
    return "".join(_stdin())


def stdin_lines() -> Iterator[str]:
    """Yield the lines of stdin as they come, without their ends. Raises CommandError."""
    return (line.rstrip("\n") for line in _stdin())


def _stdin() -> Iterator[str]:
    try:
        for line in sys.stdin:
            line.encode()  # Python's C locale reads bytes that are not UTF-8 as surrogates.
            yield line
    except UnicodeError as error:
        raise CommandError("stdin is not UTF-8 text") from error


def printable(text: str) -> str:
    """Remove control characters from a model's or a server's text."""
    return text.translate(_CONTROLS)


def _cell(value: object) -> str:
    """Return a value as one line without tabs, which would begin another cell of the output."""
    return printable(str(value)).translate(_BREAKS)


def format_timestamp(time: Timestamp) -> str:
    """Return a time to the minute, in UTC; `-` for one that is not set."""
    return f"{time.ToDatetime():%Y-%m-%d %H:%M}" if time.seconds else "-"


def print_error(message: str) -> None:
    """Print a message as a single line on stderr."""
    from rich.text import Text

    line = " ".join(printable(message).split())
    err().print(Text("error:", style="bold red"), Text(line), soft_wrap=True)


def print_warning(message: str) -> None:
    """Print a message as a single yellow line on stderr."""
    line = " ".join(printable(message).split())
    err().print(f"warning: {line}", style="yellow", markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a JSON value, indented at a terminal; dataclasses as objects, times as texts."""
    text = json.dumps(value, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False, default=_json_value)
    sys.stdout.write(_UNSAFE_IN_JSON.sub(lambda character: f"\\u{ord(character[0]):04x}", text) + "\n")


def _json_value(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else vars(value)


def message_values(message: Any) -> dict[str, Any]:
    """Return a message as JSON values by its fields' names; a time that is not set is left out, an enum is a word."""
    values = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.enum_type is not None:
            values[field.name] = _word(field.enum_type, value)
        elif not hasattr(value, "ToJsonString") or message.HasField(field.name):
            values[field.name] = _field_value(value)
    return values


def _word(enum: Any, number: int) -> str:
    """Return WORKER_PHASE_SERVING of WorkerPhase as `serving`."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(enum.values_by_number[number].name.removeprefix(prefix).lower())


def _field_value(value: Any) -> Any:
    if hasattr(value, "ToJsonString"):
        return value.ToJsonString()
    if hasattr(value, "DESCRIPTOR"):
        return message_values(value)
    if isinstance(value, Mapping):
        return dict(value)
    return (
        [_field_value(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
    )


def say(line: str) -> None:
    """Print a line on stdout, whatever its length."""
    out().print(line, markup=False, soft_wrap=True)


# The value of each column of a table: the name of a field or key, or a function.
Columns = Mapping[str, str | Callable[[Any], object]]


def print_table(
    items: Iterable[Any],
    columns: Columns,
    *,
    as_json: bool = False,
    values: Callable[[Any], object] = lambda item: item,
) -> None:
    """Print items as a table with these columns, or as JSON the `values` of each, by default all that it has."""
    if as_json:
        print_json(list(map(values, items)))
        return
    print_rows(list(columns), table_rows(items, columns))


def table_rows(items: Iterable[Any], columns: Columns) -> list[list[object]]:
    """Return the cells of items in these columns."""
    return [[_value(item, value) for value in columns.values()] for item in items]


def _value(item: Any, column: str | Callable[[Any], object]) -> object:
    if callable(column):
        return column(item)
    return item[column] if isinstance(item, Mapping) else getattr(item, column)


def print_rows(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; in a pipe, tab-separated lines."""
    cells = [list(map(_cell, row)) for row in rows]
    if not out().is_terminal:
        for line in (headers, *cells):
            sys.stdout.write("\t".join(line) + "\n")
        return
    out().print(table_of(headers, cells))


def table_of(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Build a table for a terminal, with columns of numbers right-aligned."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [list(map(_cell, row)) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False)
    numeric = [all(_is_number(row[column]) for row in cells) for column in range(len(headers))]
    for header, right in zip(headers, numeric, strict=True):
        table.add_column(header, justify="right" if right else "left")
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def show_live(render: Callable[[], RenderableType], interval_s: float) -> NoReturn:
    """Draw a view again and again, until Ctrl-C or an error of `render`."""
    from rich.live import Live

    with Live(render(), console=out(), auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(render(), refresh=True)


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Print names with their values, one pair in each line."""
    pairs = [(name, _cell(value)) for name, value in fields]
    if not out().is_terminal:
        for name, value in pairs:
            sys.stdout.write(f"{name}\t{value}\n")
        return
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in pairs:
        grid.add_row(Text(name, style="dim"), Text(value))
    out().print(grid)


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(".", "", 1).isdigit()


class Activity:
    """Shows the current step on stderr: a spinner at a terminal, a line for each step in a pipe."""

    def __init__(self) -> None:
        self._status: Status | None = None

    def step(self, text: str) -> None:
        """Show that a step begins."""
        if not err().is_terminal:
            sys.stderr.write(f"{text} ...\n")
        elif self._status is None:
            self._status = err().status(f"{text} ...", spinner="dots")
            self._status.start()
        else:
            self._status.update(f"{text} ...")

    def stop(self) -> None:
        """Remove the spinner."""
        if self._status is not None:
            self._status.stop()
        self._status = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
