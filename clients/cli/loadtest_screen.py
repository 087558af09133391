"""The progress of a running load test: a live table at a terminal, a line every few seconds in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from clients.cli.terminal import err, printable, table_of
from clients.loadtest.generator import Progress
from clients.loadtest.samples import LEFT, OK

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_WAITING = "waiting for the generator processes"
# Interval of the progress lines in a pipe, in seconds.
_LINE_EVERY_S = 2.0


class Screen:
    """Shows the total progress of all generator processes on stderr; stdout is for the report."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._lined_s = time.monotonic()
        self._rate = (0.0, 0, 0.0)

    def __enter__(self) -> Self:
        if err().is_terminal:
            from rich.live import Live

            self._live = Live(console=err(), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, label: str, latest: Sequence[Progress]) -> None:
        """Show the latest progress of each process; none while they start."""
        if self._live is not None:
            self._live.update(self._table(label, latest) if latest else f"{label}: {_WAITING}", refresh=True)
        elif time.monotonic() - self._lined_s >= _LINE_EVERY_S:
            self._lined_s = time.monotonic()
            sys.stderr.write((_line(label, latest) if latest else f"{label}: {_WAITING}") + "\n")

    def _table(self, label: str, latest: Sequence[Progress]) -> Table:
        ok, errors = _ended(latest)
        at_s, tokens = max(progress.at_s for progress in latest), sum(progress.tokens for progress in latest)
        last_at_s, last_tokens, rate = self._rate
        if at_s < last_at_s:  # A new run has begun.
            last_at_s, last_tokens = 0.0, 0
        if at_s - last_at_s > 1.0:
            rate = (tokens - last_tokens) / (at_s - last_at_s)
            self._rate = (at_s, tokens, rate)
        rows: list[tuple[object, ...]] = [
            ("sent", sum(progress.sent for progress in latest)),
            ("running", sum(progress.running for progress in latest)),
            ("answered", ok),
            ("errors", errors),
            ("tokens/s", f"{rate:.0f}"),
            ("TTFT ms, p50 p99", _recent([progress.recent_ttft_s for progress in latest])),
            ("ITL ms, p50 p99", _recent([progress.recent_gap_s for progress in latest])),
        ]
        table = table_of((f"{label}, {at_s:.0f} s", ""), rows)
        for status, count in sorted(_statuses(latest).items()):
            if status != OK:
                table.add_row(printable(status), str(count), style="yellow")
        return table


def _line(label: str, latest: Sequence[Progress]) -> str:
    ok, errors = _ended(latest)
    return (
        f"{label}, {max(progress.at_s for progress in latest):.0f} s: "
        f"{sum(progress.sent for progress in latest)} sent, "
        f"{sum(progress.running for progress in latest)} running, {ok} answered, {errors} errors; "
        f"TTFT {_recent([progress.recent_ttft_s for progress in latest])} ms (p50, p99)"
    )


def _statuses(latest: Sequence[Progress]) -> dict[str, int]:
    found: dict[str, int] = {}
    for progress in latest:
        for status, count in progress.statuses.items():
            found[status] = found.get(status, 0) + count
    return found


def _ended(latest: Sequence[Progress]) -> tuple[int, int]:
    found = _statuses(latest)
    ok = found.pop(OK, 0)
    found.pop(LEFT, 0)
    return ok, sum(found.values())


def _recent(parts: Sequence[Sequence[float]]) -> str:
    values = np.asarray([value for part in parts for value in part])
    if not len(values):
        return "-"
    middle, high = np.percentile(values, [50, 99]) * 1e3
    return f"{middle:.1f} {high:.1f}"
