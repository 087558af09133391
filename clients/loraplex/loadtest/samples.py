"""Samples of every request: exact times in columns, which stay small and merge exactly.

A request takes 20 numbers, and one for each gap between its messages: a million requests of 64 tokens are 0.7 GB.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

OK = "OK"
# Statuses of requests that the test itself ended: a planned cancel, and the end of the whole test.
LEFT = "CANCELLED_BY_CLIENT"
STOPPED = "STOPPED"

# Maximum number of characters of an error's message that are kept.
_MESSAGE_CHARACTERS = 500

NAN = float("nan")

# The first error of each status: the time at which its request ended, and its message.
FirstErrors = dict[str, tuple[float, str]]


@dataclass(slots=True)
class Outcome:
    """A request as its client saw it. Times in seconds from the run's start, nan if the event did not happen.

    `intended_s` is the time at which it was due: in an open loop latencies count from there. The server's figures
    (prompt_tokens to continuations) exist for whole answers. `gaps_s` are the times between its messages.
    """

    index: int
    tenant: int
    adapter: int
    intended_s: float
    sent_s: float
    status: str = OK
    first_s: float = NAN
    last_s: float = NAN
    end_s: float = NAN
    tokens: int = 0
    messages: int = 0
    longest_gap_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float = NAN
    adapter_s: float = NAN
    server_ttft_s: float = NAN
    continuations: int = 0
    # Texts that were answered by a vector.
    texts: int = 0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    # Message of the error that ended it.
    message: str = ""


# Columns of an Outcome's numbers; `status` is an index into the samples' list of statuses.
COLUMNS = tuple(name for name in Outcome.__slots__ if name not in ("gaps_s", "message"))
_AT = {name: number for number, name in enumerate(COLUMNS)}


class Recorder:
    """Collects outcomes of ended requests."""

    def __init__(self) -> None:
        self._rows = array("d")
        self._gaps = array("d")
        self._statuses: dict[str, int] = {}
        self._first_errors: FirstErrors = {}

    def add(self, outcome: Outcome) -> None:
        """Add an outcome."""
        status = self._statuses.setdefault(outcome.status, len(self._statuses))
        self._rows.extend(status if name == "status" else getattr(outcome, name) for name in COLUMNS)
        self._gaps.extend(outcome.gaps_s)
        if outcome.message:
            _keep_first(self._first_errors, outcome.status, (outcome.end_s, outcome.message[:_MESSAGE_CHARACTERS]))

    def samples(self) -> Samples:
        """Return the samples of all outcomes."""
        rows = np.array(self._rows, dtype=np.float64).reshape(-1, len(COLUMNS))
        gaps = np.array(self._gaps, dtype=np.float64)
        return Samples(rows, gaps, tuple(self._statuses), dict(self._first_errors))


@dataclass(frozen=True)
class Samples:
    """Outcomes as an array (requests, columns). A request of m messages has max(0, m - 1) of the `gaps`, in order."""

    rows: npt.NDArray[np.float64]
    gaps: Column
    statuses: tuple[str, ...]
    first_errors: Mapping[str, tuple[float, str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> Column:
        """Return a column: one number of each request."""
        column: Column = self.rows[:, _AT[name]]
        return column

    def with_status(self, *statuses: str) -> Mask:
        """Return a mask of the requests with this status."""
        numbers = [number for number, status in enumerate(self.statuses) if status in statuses]
        return np.isin(self.column("status"), numbers)

    def gap_counts(self) -> npt.NDArray[np.int64]:
        """Return the number of gaps of each request."""
        return np.maximum(self.column("messages") - 1, 0).astype(np.int64)

    def where(self, mask: Mask) -> Samples:
        """Return the requests that a mask selects."""
        return replace(self, rows=self.rows[mask], gaps=self.gaps[np.repeat(mask, self.gap_counts())])

    def take(self, order: npt.NDArray[np.int64]) -> Samples:
        """Return the requests at these indices, in this order."""
        counts = self.gap_counts()
        begins, taken = np.cumsum(counts) - counts, counts[order]
        # Index of each gap: the start of its request's gaps, plus its distance from the first of them.
        within = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
        return replace(self, rows=self.rows[order], gaps=self.gaps[np.repeat(begins[order], taken) + within])


def merge(parts: Iterable[Samples]) -> Samples:
    """Merge the samples of several processes, sorted by the requests' numbers."""
    parts = list(parts)
    statuses = tuple(dict.fromkeys(status for part in parts for status in part.statuses))
    rows = [_renumbered(part, statuses) for part in parts]
    empty = np.empty((0, len(COLUMNS)))
    gaps = [part.gaps for part in parts]
    errors: FirstErrors = {}
    for part in parts:
        for status, first in part.first_errors.items():
            _keep_first(errors, status, first)
    whole = Samples(np.concatenate([empty, *rows]), np.concatenate([np.empty(0), *gaps]), statuses, errors)
    return whole.take(np.argsort(whole.column("index"), kind="stable"))


def _keep_first(errors: FirstErrors, status: str, error: tuple[float, str]) -> None:
    """Keep an error if it is the first of its status."""
    errors[status] = min(errors.get(status, error), error)


def _renumbered(part: Samples, statuses: Sequence[str]) -> npt.NDArray[np.float64]:
    rows = part.rows.copy()
    if len(rows):
        numbers = np.asarray([statuses.index(status) for status in part.statuses], dtype=np.float64)
        rows[:, _AT["status"]] = numbers[rows[:, _AT["status"]].astype(np.int64)]
    return rows
