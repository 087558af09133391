"""Sends usage events from their file to an HTTP collector (CloudEvents 1.0, HTTP binding, batched mode).

    usage file ──batch from the cursor on──▶ POST ──2xx──▶ cursor FILE.sent, synced
                                               └─▶ again and again, each time later

The file is what is durable: a collector that fails, hangs or is away costs neither events nor memory, and no request
waits for it. After a crash the last batch is sent again; its events have the same ids.
"""

from __future__ import annotations

import http.client
import logging
import random
import threading
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from broker.connection import shown_url
from router.metrics import RouterMetrics
from router.quotas.usage_cursor import Cursor
from rpc.timed_http import timed_connections

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
        self, path: Path, url: str, metrics: RouterMetrics, *, retry_s: float = RETRY_S, call_s: float = CALL_S
    ) -> None:
        self._url, self._metrics = check_url(url), metrics
        self._retry_s, self._call_s = retry_s, call_s
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
        failures, last_logged = 0, ""
        while True:
            stopping = self._stop.is_set()
            why, sent = "", 0
            try:
                sent = self._send_batch()
            except (OSError, http.client.HTTPException, CollectorError) as error:
                why = str(error) or type(error).__name__
            if why and why != last_logged:
                log.error("usage events wait: --usage-url: %s: %s", self._url.hostname, why)  # the rest may be secret
            elif last_logged and not why:
                log.info("usage events are sent again")
            last_logged, failures = why, failures + 1 if why else 0
            if why:
                self._metrics.usage_send_failures.inc()
            if stopping and not sent:
                return
            if why:
                longest = min(LONGEST_RETRY_S, self._retry_s * 2 ** min(failures, 16))
                self._stop.wait(longest * random.uniform(0.5, 1.0))
            elif not sent:
                self._stop.wait(LOOK_S)

    def _send_batch(self) -> int:
        """Send the next events and move the cursor; returns how many. Raises OSError, HTTPException, CollectorError."""
        events, past = self._cursor.read(self._batch_events)
        if events:
            status = self._post(b"[" + b",".join(events) + b"]")
            if status == _TOO_LARGE and self._batch_events > 1:
                self._batch_events = max(1, min(self._batch_events, len(events)) // 2)
                return self._send_batch()
            if not 200 <= status < 300:
                raise CollectorError(f"the collector answers {status}")
            self._metrics.usage_sent.inc(len(events))
        self._cursor.move(past)
        return len(events)

    def _post(self, body: bytes) -> int:
        """Return the status of the collector's answer; redirects are not followed."""
        target = (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")
        with timed_connections(self._call_s) as connections:
            make = connections.tls if self._url.scheme == "https" else connections.plain
            connection = make(self._url.hostname or "", self._url.port, timeout=self._call_s)
            try:
                connection.request("POST", target, body, {"Content-Type": CONTENT_TYPE})
                return connection.getresponse().status
            finally:
                connection.close()


class CollectorError(Exception):
    """A collector that does not take a batch; the message is one line."""
