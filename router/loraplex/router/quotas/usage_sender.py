"""Sends usage events from their file to an HTTP collector (CloudEvents 1.0, HTTP binding, batched mode).

    usage file ──batch from the cursor on──▶ POST ──2xx──▶ cursor FILE.sent, synced
                                               └─▶ again and again, each time later

The file is what is durable: a collector that fails, hangs or is away costs neither events nor memory, and no request
waits for it. After a crash the last batch is sent again; its events have the same ids.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from loraplex.contracts.broker.connection import shown_url
from loraplex.router.metrics import RouterMetrics
from loraplex.runtime.rpc.timed_http import timed_call
from loraplex.runtime.telemetry.logging import LogOnce

log = logging.getLogger(__name__)

# Maximum events of a batch.
BATCH_EVENTS = 500
# Interval in seconds between looks at a file that is sent to its end.
LOOK_S = 0.5
# Timeout in seconds of a call, from its connection to the status of its answer.
CALL_S = 10.0
# First and longest time in seconds before a batch is sent again.
RETRY_S, LONGEST_RETRY_S = 0.5, 30.0
CONTENT_TYPE = "application/cloudevents-batch+json; charset=utf-8"
_TOO_LARGE = 413
# Maximum bytes of a batch of events.
BATCH_BYTES = 512 * 1024
# Time in seconds after the last change of a renamed file after which nobody writes to it any more.
SETTLE_S = 5.0
_NOTHING = hashlib.sha256().hexdigest()


def check_url(url: str) -> SplitResult:
    """Return the parts of a collector's URL. Raises ValueError."""
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.port == 0
    except ValueError:
        wrong = True
    if wrong:
        raise ValueError(f"--usage-url {shown_url(url)}: write http://HOST:PORT/PATH or https://HOST/PATH")
    return parts


class UsageSender:
    """Sends the events of one router's file, in a thread of its own."""

    def __init__(
        self, path: Path, url: str, metrics: RouterMetrics, *, pause_s: float = RETRY_S, call_s: float = CALL_S
    ) -> None:
        self._url, self._metrics = check_url(url), metrics
        self._pause_s, self._call_s = pause_s, call_s
        self._cursor = Cursor(path)
        self._stop = threading.Event()
        self._batch_events = BATCH_EVENTS
        metrics.usage_unsent.set_function(self._cursor.unsent_bytes)
        self._thread = threading.Thread(target=self._send_on, name="usage", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Send what the collector takes within a timeout; the rest is sent after the next start."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _send_on(self) -> None:
        """Send what is in the file, until the sender is closed and the rest is sent or does not go."""
        failures, once = 0, LogOnce(log, logging.ERROR)
        while True:
            stopping = self._stop.is_set()
            why, sent = "", 0
            try:
                sent = self._send_batch()
            except (OSError, http.client.HTTPException, CollectorError) as error:
                why = str(error) or type(error).__name__
            if why:
                once(f"usage events wait: --usage-url: {self._url.hostname}: {why}")  # the rest may be secret
                self._metrics.usage_send_failures.inc()
            elif once.reset():
                log.info("usage events are sent again")
            failures = failures + 1 if why else 0
            if stopping and not sent:
                return
            if why:
                longest = min(LONGEST_RETRY_S, self._pause_s * 2 ** min(failures, 16))
                self._stop.wait(longest * random.uniform(0.5, 1.0))
            elif not sent:
                self._stop.wait(LOOK_S)

    def _send_batch(self) -> int:
        """Send the next events and move the cursor; returns how many. Raises OSError, HTTPException, CollectorError."""
        events, past = self._cursor.read(self._batch_events)
        if events:
            body = b"[" + b",".join(events) + b"]"
            status, _ = timed_call(self._call_s, "POST", self._url, body, {"Content-Type": CONTENT_TYPE})
            if status == _TOO_LARGE and self._batch_events > 1:
                self._batch_events = max(1, min(self._batch_events, len(events)) // 2)
                return self._send_batch()
            if not 200 <= status < 300:
                raise CollectorError(f"the collector answers {status}")
            self._metrics.usage_sent.inc(len(events))
        self._cursor.move(past)
        return len(events)


class Cursor:
    """The place in a usage file up to which it is sent; kept in FILE.sent.

    The file may be renamed at any time inside its folder, to a name that begins with its own: what is left of it is
    sent before what is newer.
    """

    def __init__(self, path: Path, settle_s: float = SETTLE_S) -> None:
        self._path, self._position_file = path, path.with_name(path.name + ".sent")
        self._settle_s = settle_s
        self._file, self._offset = -1, 0
        # The beginning of what is sent of the file.
        self._sent = _NOTHING
        # Time of the last change of the file before this one.
        self._former_ns = 0

    def read(self, limit: int) -> tuple[list[bytes], int]:
        """Return the next events, at most `limit`, and the place behind them. Raises OSError."""
        if self._file == -1 and not self._open():
            return [], 0
        if _beginning(self._file, self._offset) != self._sent:
            self._find_again()
            return self.read(limit)
        data = os.pread(self._file, BATCH_BYTES, self._offset)
        if b"\n" not in data:
            if len(data) == BATCH_BYTES:  # no event is as long
                return [], self._offset + BATCH_BYTES
            if self._is_former():  # all of it is sent, but for a line that nobody will end
                self._leave()
                return self.read(limit)
            return [], self._offset
        events, past = list[bytes](), self._offset
        for line in data[: data.rindex(b"\n") + 1].splitlines(keepends=True):
            if len(events) == limit:
                break
            past += len(line)
            if _is_event(line):
                events.append(line.rstrip(b"\n"))
        return events, past

    def move(self, past: int) -> None:
        """Keep a place up to which everything is sent, durably. Raises OSError."""
        if self._file == -1 or past == self._offset:
            return
        self._offset, self._sent = past, _beginning(self._file, past)
        new = self._position_file.with_name(self._position_file.name + ".new")
        with open(new, "w", encoding="utf-8") as file:
            json.dump({"offset": past, "beginning": self._sent}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._position_file)

    def unsent_bytes(self) -> float:
        """Return the size of what is not sent, in the file and those before it."""
        total = 0
        for _, status in self._files():
            with suppress(OSError):
                here = self._file != -1 and status.st_ino == os.fstat(self._file).st_ino
                total += status.st_size - (self._offset if here else 0)
        return float(max(0, total))

    def _open(self) -> bool:
        """Open the kept file under whatever name it has now, or the first after the former; False for none."""
        if not self._former_ns and self._position_file.exists():
            try:
                position = json.loads(self._position_file.read_bytes())
                offset, beginning = int(position["offset"]), str(position["beginning"])
            except (ValueError, KeyError, TypeError):
                log.error("--usage-file: %s cannot be read: all events are sent again", self._position_file)
                offset, beginning = 0, ""
            for path, _ in self._files():
                file = os.open(path, os.O_RDONLY)
                if offset and _beginning(file, offset) == beginning:
                    self._file, self._offset, self._sent = file, offset, beginning
                    return True
                os.close(file)
            if offset:
                log.error("--usage-file: the file that was being sent is gone; what was left of it is not sent")
        for path, _ in self._files():
            self._file, self._offset, self._sent = os.open(path, os.O_RDONLY), 0, _NOTHING
            return True
        return False

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """Return the files with events that are not older than the former one, in order of their last changes."""
        files = [(path, path.stat()) for path in self._path.parent.glob(self._path.name + "*") if path.is_file()]
        files = [(path, status) for path, status in files if status.st_mtime_ns > self._former_ns]
        return sorted((one for one in files if _has_events(one[0])), key=lambda one: one[1].st_mtime_ns)

    def _is_former(self) -> bool:
        """Tell whether the usage file is another one by now, to which all writers have gone."""
        status = os.fstat(self._file)
        with suppress(FileNotFoundError):
            return self._path.stat().st_ino != status.st_ino and time.time() - status.st_mtime > self._settle_s
        return False

    def _find_again(self) -> None:
        """Go on in the copy of a file that was emptied behind it, as log rotations do that copy and truncate."""
        os.close(self._file)
        self._file, self._former_ns = -1, 0

    def _leave(self) -> None:
        self._former_ns = os.fstat(self._file).st_mtime_ns
        os.close(self._file)
        self._file = -1


def _beginning(file: int, offset: int) -> str:
    """Return the SHA-256 of a file's first bytes, by which it is known again; of none beyond the offset."""
    return hashlib.sha256(os.pread(file, min(offset, 256), 0)).hexdigest()


def _has_events(path: Path) -> bool:
    with open(path, "rb") as file:
        return _is_event(file.readline(BATCH_BYTES)) or _is_event(file.readline(BATCH_BYTES))


def _is_event(line: bytes) -> bool:
    """Tell whether a line is an event, and not one that a crash has cut."""
    if not line.endswith(b"\n"):
        return False
    try:
        values = json.loads(line)
    except ValueError:
        return False
    return isinstance(values, dict) and "specversion" in values


class CollectorError(Exception):
    """A collector that does not take a batch; the message is one line."""
