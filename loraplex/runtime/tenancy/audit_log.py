"""A process's audit log, and the chain of its records: a thread appends them in batches that end with an fsync.

    {"previous":"0000...","number":1,"time":"2026-11-22T15:00:28.120Z","process":"store","event":"started",...}
    {"previous":"<SHA-256 of the line above>","number":2,...}

Each record is a line of JSON that has the SHA-256 of the line before it. So a record that is altered, removed, added or
moved is found by the record after it, unless all later ones were written anew as well. That needs a record of before
(`ChainHead`) which was kept elsewhere.

    FILE               the newest records
    FILE.000000000001  a full file before it, named by its first record; the chain goes on from file to file

A line that a crash has cut is taken out at the next start, and the chain goes on with a record of that. On the standard
output, `-`, and at a collector, `otlp`, each start of the process begins another chain.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from prometheus_client import Counter

from loraplex.runtime.interpreter import StartError
from loraplex.runtime.telemetry.logging import LogOnce
from loraplex.runtime.telemetry.metrics import Meters

log = logging.getLogger(__name__)

# Hash that the first record has of the line before it.
NOTHING = "0" * 64


@dataclass(frozen=True, slots=True)
class ChainHead:
    """A record by its number and the SHA-256 of its line."""

    number: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.number}:{self.sha256}"

    @classmethod
    def parse(cls, text: str) -> ChainHead:
        """Read what `str` has written. Raises ValueError."""
        number, _, sha256 = text.partition(":")
        if not number.isdecimal() or len(sha256) != len(NOTHING) or set(sha256) - set("0123456789abcdef"):
            raise ValueError(f"{text!r} is not NUMBER:SHA256, as `loraplex audit verify` prints it")
        return cls(int(number), sha256)


BEGINNING = ChainHead(0, NOTHING)


def record_line(after: ChainHead, record: Mapping[str, Any]) -> tuple[bytes, ChainHead]:
    """Return the line of the record that follows `after`, and itself as the head. ASCII without control characters."""
    numbered = {"previous": after.sha256, "number": after.number + 1, **record}
    line = json.dumps(numbered, separators=(",", ":"), default=str).replace("\x7f", "\\u007f").encode()
    return line + b"\n", ChainHead(after.number + 1, hashlib.sha256(line).hexdigest())


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


# Time in seconds in which records gather before a write.
BATCH_S = 0.05
# Time in seconds before a write that failed is tried again.
RETRY_S = 1.0
# Maximum records that wait for the disk; later ones are lost, and counted.
WAITING_LIMIT = 10_000
# Size in bytes from which a file is full.
FILE_BYTES = 64 * 1024 * 1024
# Maximum characters of a text of a record.
TEXT_CHARACTERS = 500
# Maximum bytes of a record that is cut off.
_LINE_BYTES = 64 * 1024
# Maximum bytes of a file's end in which its last record is looked for; a record has fewer.
_TAIL_BYTES = 1024 * 1024
STDOUT, OTLP = "-", "otlp"
FILE_HELP = (
    "file that the audit log is appended to; -: the standard output; otlp: a collector (docs/guides/security.md)"
)
# The module that sends records to a collector, at the edge.
EXPORT = "loraplex.audit_export.otlp"


class AuditFileError(StartError):
    """An audit log that cannot be gone on with; the message is one line."""


class AuditCounts:
    """The metrics of an audit log."""

    def __init__(self, meters: Meters) -> None:
        self.records: Counter = meters.counter("audit_records", "Records that were written to the audit log.")
        self.lost: Counter = meters.counter("audit_records_lost", "Records that the audit log had no room for.")
        self.failed: Counter = meters.counter("audit_writes_failed", "Writes of the audit log that are tried again.")


class AuditLog:
    """The audit log of one process. Without a path nothing is kept. Raises AuditFileError.

    Opened it has an event `started`, closed `stopped`. `record` may be called from any thread.
    """

    def __init__(self, path: str, process: str, counts: AuditCounts, *, file_bytes: int = FILE_BYTES) -> None:
        self._path, self._is_file = Path(path), path not in {STDOUT, OTLP}
        self._exporter = import_module(EXPORT).Exporter(process, counts) if path == OTLP else None
        self._process, self._counts, self._file_bytes = process, counts, file_bytes
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._lost = 0
        self._came = threading.Condition()
        self._closing = threading.Event()
        self._on, self._torn, self._file = bool(path), False, -1
        if not self._on:
            return
        try:
            torn = self._open()
        except BaseException:
            self._close_file()
            raise
        if torn:
            self.record("repaired", bytes=len(torn), torn=torn[:TEXT_CHARACTERS].decode(errors="backslashreplace"))
        self.record("started", pid=os.getpid())
        log.info("the audit log goes on after %s", self.head)
        self._thread = threading.Thread(target=self._write_on, name="audit", daemon=True)
        self._thread.start()

    def record(self, event: str, **values: Any) -> None:
        """Record an event soon. Texts are cut; control characters are escaped. Never give it a secret or a prompt."""
        if not self._on:
            return
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        record = {"time": at, "process": self._process, "event": event, **_cut(values)}
        with self._came:
            if len(self._waiting) >= WAITING_LIMIT:
                self._lost += 1
                self._counts.lost.inc()
                return
            self._waiting.append(record)
            self._came.notify()

    def close(self) -> None:
        """Write what waits, and end."""
        if not self._on:
            return
        self.record("stopped")
        self._on = False
        with self._came:
            self._closing.set()
            self._came.notify()
        self._thread.join()
        log.info("the audit log ends with %s", self.head)
        self._close_file()

    def _close_file(self) -> None:
        if self._exporter is not None:
            self._exporter.close()
        if self._file != -1:
            os.close(self._file)

    def _open(self) -> bytes:
        """Open the file and find the record that the next one follows; return the bytes of a line without its end."""
        if not self._is_file:
            self._file, self._size, self.head = -1 if self._exporter else os.dup(1), 0, BEGINNING
            return b""
        try:
            self._file = _opened(self._path)
            self._size = os.fstat(self._file).st_size
            tail = os.pread(self._file, _TAIL_BYTES, max(0, self._size - _TAIL_BYTES))
            whole, _, torn = tail.rpartition(b"\n")
            if torn:
                _check_torn(self._path, torn)
                self._size -= len(torn)
                os.ftruncate(self._file, self._size)
                os.fsync(self._file)
            if not self._size and (former := sorted(self._path.parent.glob(self._path.name + ".[0-9]*"))):
                whole = former[-1].read_bytes().rstrip(b"\n")  # the process died between two files
        except OSError as error:
            raise AuditFileError(f"--audit {self._path}: {error.strerror}") from error
        self.head = _head_of(self._path, whole)
        return torn

    def _write_on(self) -> None:
        """Write what waits again and again, until the log is closed."""
        once = LogOnce(log, logging.ERROR)
        while True:
            with self._came:
                while not self._waiting and not self._closing.is_set():
                    self._came.wait()
                if not self._waiting:
                    return
            self._closing.wait(BATCH_S)
            batch = self._take()
            try:
                self._append(batch)
                once.reset()
            except OSError as error:
                self._counts.failed.inc()
                once(f"audit records wait: --audit {self._path}: {error.strerror}")
                if self._closing.is_set():
                    log.error("%d audit records are lost", len(batch))
                    return
                with self._came:
                    self._waiting.extendleft(reversed(batch))
                self._closing.wait(RETRY_S)

    def _take(self) -> list[Mapping[str, Any]]:
        with self._came:
            batch, self._waiting = list(self._waiting), deque()
            if self._lost:
                at = batch[-1]["time"]
                batch.append({"time": at, "process": self._process, "event": "records lost", "count": self._lost})
                self._lost = 0
        return batch

    def _append(self, batch: list[Mapping[str, Any]]) -> None:
        """Append records and wait for the disk: all or, if OSError is raised, none."""
        if self._is_file:
            if self._torn:
                os.ftruncate(self._file, self._size)
            if self._size >= self._file_bytes or not self._is_in_place():
                self._rotate()
        head, lines = self.head, bytearray()
        for record in batch:
            line, head = record_line(head, record)
            lines += line
        if self._exporter is not None:
            self._exporter.send(bytes(lines))
        else:
            self._write(lines)
        self.head, self._size = head, self._size + len(lines)
        self._counts.records.inc(len(batch))

    def _write(self, lines: bytearray) -> None:
        self._torn = True
        unwritten = memoryview(lines)
        while unwritten:
            unwritten = unwritten[os.write(self._file, unwritten) :]
        if self._is_file:
            os.fsync(self._file)
        self._torn = False

    def _is_in_place(self) -> bool:
        """Tell whether the open file is the one of the path: who moves it away may remove it soon."""
        try:
            return os.path.samestat(os.fstat(self._file), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        """Give the full file its own name, and open a new one."""
        if self._is_in_place():  # else it was moved, or an earlier try came so far
            with open(self._path, "rb") as file:
                first = parse(file.readline().removesuffix(b"\n"))
            number = first["number"] if first is not None else self.head.number
            os.rename(self._path, self._path.with_name(f"{self._path.name}.{number:012d}"))
        log.info("the audit log begins another file after %s", self.head)
        file_before, self._file = self._file, _opened(self._path)
        os.close(file_before)
        self._size, self._torn = os.fstat(self._file).st_size, False
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _opened(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise OSError(error.errno, "is in use by another process") from error
    return file


def _head_of(path: Path, lines: bytes) -> ChainHead:
    """Return the last of these lines as the head. Raises AuditFileError where it is no record."""
    last = lines.rpartition(b"\n")[2]
    if not last:
        return BEGINNING
    values = parse(last)
    if values is None:
        raise AuditFileError(f"--audit {path}: its last line is not an audit record; move the file away")
    return ChainHead(values["number"], hashlib.sha256(last).hexdigest())


def _check_torn(path: Path, torn: bytes) -> None:
    """Raise AuditFileError where an unfinished line is not the beginning of a record: the file is something else."""
    begins = record_line(BEGINNING, {})[0][:13]
    if torn[:13] != begins[: len(torn)] or len(torn) > _LINE_BYTES:
        raise AuditFileError(f"--audit {path}: its last line is not an audit record; move the file away")


def _cut(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[:TEXT_CHARACTERS] if isinstance(value, str) else value for name, value in values.items()}
