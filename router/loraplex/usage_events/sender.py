"""Posts usage events to an HTTP collector (CloudEvents 1.0, HTTP binding, batched mode).

Redis keeps an event until the collector has answered 2xx: one that fails, hangs or is away costs no event, nor does the
end of a router, and no request waits for it. What was taken and not acknowledged is sent again, with the same ids.
"""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from loraplex.contracts.broker.connection import shown_url
from loraplex.router.metrics import RouterMetrics
from loraplex.runtime.rpc.timed_http import timed_call

# Timeout in seconds of a call, from its connection to the status of its answer.
CALL_S = 5.0
# First and longest time in seconds before events are sent again.
RETRY_S, LONGEST_RETRY_S = 0.5, 30.0
CONTENT_TYPE = "application/cloudevents-batch+json; charset=utf-8"
_TOO_LARGE = 413


class NotTakenError(Exception):
    """Events that a collector or a disk does not take; the message is one line."""


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
    """Posts batches of events, and says after how long to try again."""

    def __init__(self, url: str, metrics: RouterMetrics, *, call_s: float = CALL_S) -> None:
        self._url, self._metrics, self._call_s = check_url(url), metrics, call_s
        self._failures = 0

    @property
    def pause_s(self) -> float:
        """Return the time in seconds before events are sent again."""
        longest = min(LONGEST_RETRY_S, RETRY_S * 2.0 ** min(self._failures, 16))
        return longest * random.uniform(0.5, 1.0)

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Post events, in smaller batches where they are too large. Raises NotTakenError."""
        try:
            self._post(events)
        except (OSError, http.client.HTTPException, NotTakenError) as error:
            self._failures += 1
            self._metrics.usage_send_failures.inc()
            why = str(error) or type(error).__name__  # the rest of the URL may be secret
            raise NotTakenError(f"--usage-url: {self._url.hostname}: {why}") from error
        self._failures = 0

    def _post(self, events: Sequence[Mapping[str, Any]]) -> None:
        body = json.dumps(events, separators=(",", ":")).encode()
        status, _ = timed_call(self._call_s, "POST", self._url, body, {"Content-Type": CONTENT_TYPE})
        if status == _TOO_LARGE and (half := len(events) // 2):
            self._post(events[:half])
            self._post(events[half:])
            return
        if not 200 <= status < 300:
            raise NotTakenError(f"the collector answers {status}")
        self._metrics.usage_sent.inc(len(events))
