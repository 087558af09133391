"""`loraplex usage report`: the tokens and costs of a month as CSV, out of routers' files of usage events."""

from __future__ import annotations

import csv
import re
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, TextIO

import msgspec
import typer

from loraplex.cli.terminal import CommandError
from loraplex.contracts.plans import NANO, money

# Columns that a row of the report is of, and those that it sums up.
_OF = ("month", "tenant", "key", "model", "adapter", "currency")
_SUMS = ("input_tokens", "cached_tokens", "output_tokens", "cost")
_COLUMNS = ("id", "tokens", "request", *_OF, *_SUMS)
# Of two events with an id the larger counts.
_ADD = (
    f"INSERT INTO events VALUES ({', '.join('?' * len(_COLUMNS))}) ON CONFLICT (id) DO UPDATE SET "
    f"{', '.join(f'{column} = excluded.{column}' for column in _COLUMNS[1:])} WHERE excluded.tokens > tokens"
)
_SUM = (
    f"SELECT {', '.join(_OF)}, count(DISTINCT request), {', '.join(f'sum({column})' for column in _SUMS)} FROM events "
    f"WHERE month = ? GROUP BY {', '.join(_OF)} ORDER BY {', '.join(_OF)}"
)


class _Used(msgspec.Struct, frozen=True):
    tenant: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    key: str = ""
    model: str = ""
    adapter_revision: str = ""
    cost: str = "0"
    currency: str = ""


class _Event(msgspec.Struct, frozen=True):
    id: str
    time: datetime
    data: _Used


def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="All files of routers' --usage-file.")],
    month: Annotated[str, typer.Option(metavar="YYYY-MM", help="The month in which calls ended, by UTC.")],
) -> None:
    """Print what calls that ended in a month used and cost, as CSV: a row for each tenant, key, model and adapter.

    One event counts for each id. A line that a router's death has torn is left out: its event is in another one.

    [bold]loraplex usage report --month 2026-11 usage-*.jsonl > 2026-11.csv[/]
    """
    if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", month):
        raise CommandError(f"--month {month}: write it as 2026-11")
    write_report(files, month, sys.stdout)


def write_report(files: Sequence[Path], month: str, out: TextIO) -> None:
    """Write the report of files. Raises CommandError, which names the file and the line at fault, and OSError."""
    with closing(sqlite3.connect("")) as rows:  # on the disk: a month may be larger than the memory
        rows.execute(f"CREATE TABLE events ({', '.join(_COLUMNS)}, PRIMARY KEY (id))")
        for file in files:
            rows.executemany(_ADD, _read(file))
        written = csv.writer(out, lineterminator="\n")
        written.writerow((*_OF[:-1], "requests", *_SUMS, "currency"))
        written.writerows(_row(*row) for row in rows.execute(_SUM, (month,)))


def _row(*values: str | int) -> Iterable[str | int]:
    *of, currency = values[: len(_OF)]
    *sums, cost = values[len(_OF) :]
    return (*of, *sums, money(int(cost)) if currency else "", currency)


def _read(file: Path) -> Iterator[tuple[str | int, ...]]:
    decoder = msgspec.json.Decoder(_Event)
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                event = decoder.decode(line)
                cost = _nanos(event.data.cost)
            except msgspec.ValidationError as error:
                raise CommandError(f"{file}: line {number} is not a usage event: {error}") from error
            except msgspec.DecodeError:  # torn
                continue
            used, ended = event.data, event.time.astimezone(UTC)
            adapter = used.adapter_revision.partition("/revisions/")[0]
            yield (
                *(event.id, used.input_tokens + used.output_tokens, event.id.rpartition(":")[0]),
                *(f"{ended:%Y-%m}", used.tenant, used.key, used.model, adapter, used.currency),
                *(used.input_tokens, used.cached_tokens, used.output_tokens, cost),
            )


def _nanos(cost: str) -> int:
    """Return a cost in nano-units. Raises ValidationError."""
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", cost):
        raise msgspec.ValidationError(f"{cost!r} is not an amount of money")
    return int(Decimal(cost) * NANO)
