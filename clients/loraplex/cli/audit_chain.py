"""Reads audit logs (runtime/tenancy/audit_log.py), and checks the chains of their records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import tee, zip_longest
from pathlib import Path
from typing import Any

from loraplex.runtime.tenancy.audit_log import BEGINNING, ChainHead, parse


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a log; `values` is None if it is not a record, `whole` False if it lacks its line end."""

    path: Path
    number: int
    sha256: str
    values: Mapping[str, Any] | None
    whole: bool = True

    @property
    def head(self) -> ChainHead:
        """Return the line as a head; the number of a line that is no record is 0."""
        return ChainHead(self.values["number"] if self.values else 0, self.sha256)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a line; `number` counts a file's lines from 1."""

    path: Path
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number}: {self.what}"


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a look at a whole log: its records' count, its last one, and what is wrong."""

    records: int
    head: ChainHead
    faults: Sequence[Fault]


def lines_of(path: Path) -> Iterator[Line]:
    """Yield the lines of a file. Raises OSError."""
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            line = text.removesuffix(b"\n")
            yield Line(path, number, hashlib.sha256(line).hexdigest(), parse(line), line != text)


def read(paths: Iterable[Path]) -> Iterator[Line]:
    """Yield the lines of a log's files, in order of their first records. Raises OSError."""

    def first(path: Path) -> int:
        line = next(lines_of(path), None)
        return line.values["number"] if line is not None and line.values is not None else 0

    for path in sorted(paths, key=first):
        yield from lines_of(path)


def verify(lines: Iterable[Line], anchor: ChainHead | None = None) -> Verified:
    """Check a log from its first record, or from the one after `anchor`, whose record may also be among the lines."""
    faults: list[Fault] = []
    records, before, last = 0, BEGINNING, None
    anchored = anchor is None or anchor == BEGINNING
    lines, ahead = tee(lines)
    next(ahead, None)
    for line, following in zip_longest(lines, ahead):
        if line.values is None or not line.whole:
            faults.append(Fault(line.path, line.number, "is cut" if not line.whole else "is not a record"))
            before, last = ChainHead(before.number + 1, line.sha256), line
            continue
        records += 1
        number, previous = line.values["number"], line.values["previous"]
        if last is None and anchor is not None and number == anchor.number + 1:
            before, anchored = anchor, True
        if number != before.number + 1:
            faults.append(Fault(line.path, line.number, _misplaced(before.number, number)))
        elif previous != before.sha256:
            fault = _altered(last, line, following)
            if not faults or (faults[-1].path, faults[-1].number) != (fault.path, fault.number):
                faults.append(fault)
        before, last = line.head, line
        if anchor is not None and number == anchor.number:
            anchored = True
            if line.sha256 != anchor.sha256:
                faults.append(Fault(line.path, line.number, f"is another record than the known one, {anchor}"))
    if not anchored:
        path, number, what = (
            (Path("log"), 0, "has no record") if last is None else (last.path, last.number, "is the last record")
        )
        faults.append(Fault(path, number, f"{what}; the known one, {anchor}, is missing"))
    return Verified(records, before, faults)


def _misplaced(before: int, number: int) -> str:
    if number <= before:
        return f"record {number} is out of order: it follows record {before}"
    missing = f"records {before + 1} to {number - 1} are" if number - before > 2 else f"record {before + 1} is"
    return f"{missing} missing before record {number}"


def _altered(last: Line | None, line: Line, following: Line | None) -> Fault:
    """Return the fault of the line that was altered, where a line does not have the hash of the `last` one.

    The following line says whether it is this line that was altered, or the last one.
    """
    if last is None:
        return Fault(line.path, line.number, "is not the first record of a log")
    intact = following is not None and following.values is not None and following.values["previous"] == line.sha256
    if following is None or intact:
        return Fault(last.path, last.number, f"record {last.head.number} has been altered")
    return Fault(line.path, line.number, f"record {line.head.number} has been altered")
