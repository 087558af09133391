"""The chain of an audit log: each record is a line of JSON that has the SHA-256 of the line before it.

    {"previous":"0000...","number":1,"time":"2026-11-22T15:00:28.120Z","process":"store","event":"started",...}
    {"previous":"<SHA-256 of the line above>","number":2,...}

So a record that is altered, removed, added or moved is found by the record after it, unless all later ones were
written anew as well. That needs a record of before (`Head`) which was kept elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Hash that the first record has of the line before it.
NOTHING = "0" * 64


@dataclass(frozen=True, slots=True)
class Head:
    """A record by its number and the SHA-256 of its line."""

    number: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.number}:{self.sha256}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """Read what `str` has written. Raises ValueError."""
        number, _, sha256 = text.partition(":")
        if not number.isdecimal() or len(sha256) != len(NOTHING) or set(sha256) - set("0123456789abcdef"):
            raise ValueError(f"{text!r} is not NUMBER:SHA256, as `loraplex audit verify` prints it")
        return cls(int(number), sha256)


BEGINNING = Head(0, NOTHING)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a log; `values` is None where it is no record, `whole` False where it has no end."""

    path: Path
    number: int
    sha256: str
    values: Mapping[str, Any] | None
    whole: bool = True

    @property
    def head(self) -> Head:
        """Return the line as a head; the number of a line that is no record is 0."""
        return Head(self.values["number"] if self.values else 0, self.sha256)


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
    head: Head
    faults: Sequence[Fault]


def encode(after: Head, record: Mapping[str, Any]) -> tuple[bytes, Head]:
    """Return the line of the record that follows `after`, and itself as the head. ASCII without control characters."""
    numbered = {"previous": after.sha256, "number": after.number + 1, **record}
    line = json.dumps(numbered, separators=(",", ":"), default=str).replace("\x7f", "\\u007f").encode()
    return line + b"\n", Head(after.number + 1, hashlib.sha256(line).hexdigest())


def parse(line: bytes) -> Mapping[str, Any] | None:
    """Return a record's values; None where the line is no record."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not isinstance(values.get("previous"), str):
        return None
    number = values.get("number")
    return values if isinstance(number, int) and not isinstance(number, bool) and number > 0 else None


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


def verify(lines: Iterable[Line], known: Head | None = None) -> Verified:
    """Check a log from its first record, or from the one after `known`, whose record may also be among the lines."""
    faults: list[Fault] = []
    records, before, last = 0, BEGINNING, None
    found = known is None or known == BEGINNING
    for line, following in _with_following(lines):
        if line.values is None or not line.whole:
            faults.append(Fault(line.path, line.number, "is cut" if not line.whole else "is not a record"))
            before, last = Head(before.number + 1, line.sha256), line
            continue
        records += 1
        number, previous = line.values["number"], line.values["previous"]
        if last is None and known is not None and number == known.number + 1:
            before, found = known, True
        if number != before.number + 1:
            faults.append(Fault(line.path, line.number, _misplaced(before.number, number)))
        elif previous != before.sha256:
            fault = _altered(last, line, following)
            if not faults or (faults[-1].path, faults[-1].number) != (fault.path, fault.number):
                faults.append(fault)
        before, last = line.head, line
        if known is not None and number == known.number:
            found = True
            if line.sha256 != known.sha256:
                faults.append(Fault(line.path, line.number, f"is another record than the known one, {known}"))
    if not found:
        path, number, what = (
            (Path("log"), 0, "has no record") if last is None else (last.path, last.number, "is the last record")
        )
        faults.append(Fault(path, number, f"{what}; the known one, {known}, is missing"))
    return Verified(records, before, faults)


def _with_following(lines: Iterable[Line]) -> Iterator[tuple[Line, Line | None]]:
    waiting: Line | None = None
    for line in lines:
        if waiting is not None:
            yield waiting, line
        waiting = line
    if waiting is not None:
        yield waiting, None


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
