"""Webhooks: changes of releases, and events of budgets and batches, sent to the addresses of a file.

They are signed as https://www.standardwebhooks.com says.

[ci]
url = "https://ci.example.com/hooks/loraplex"
secret_file = "ci.secret"              # whsec_ and base64 of 24 to 64 bytes; beside this file
tenants = ["acme"]                     # whose events; without it, all

A webhook gets the events of each kind in their order, each at least once: the catalog keeps the last ones that it has
taken. Stores that share a catalog each send them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import http.client
import json
import logging
import time
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from loraplex.adapter_store.database import Database
from loraplex.adapter_store.records import marks
from loraplex.releases.rollouts import ReleaseEvent
from loraplex.runtime.interpreter import StartError
from loraplex.runtime.rpc.errors import CallError
from loraplex.runtime.rpc.tasks import every
from loraplex.runtime.rpc.timed_http import timed_call

log = logging.getLogger(__name__)

# Interval in seconds between looks for events.
LOOK_S = 0.5
# Timeout in seconds of a whole call. Pauses in seconds after calls that failed: the first, and the longest.
_CALL_S, _PAUSE_S, _LONGEST_S = 5.0, 1.0, 60.0
# Number of tries after which an event is left out, so that those after it are sent: about ten minutes.
_TRIES = 15
_PREFIX = "whsec_"
_KEY_BYTES = range(24, 65)
_FIELDS = {"url", "secret_file", "tenants"}


class WebhooksError(StartError):
    """A file of webhooks that cannot be read; the message is one line that names the table and the field."""


@dataclass(slots=True)
class Webhook:
    """An address that gets events, and how calls to it go."""

    name: str
    url: str
    key: bytes = field(repr=False)
    tenants: frozenset[str] = frozenset()
    failures: int = 0
    # Time of the monotonic clock before which it is not called again.
    paused_until: float = 0.0


def read_webhooks(path: Path) -> list[Webhook]:
    """Read a file of webhooks. Raises WebhooksError."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WebhooksError(f"--webhooks {path}: {error}") from error
    return [_webhook(path, name, values) for name, values in tables.items()]


def _webhook(path: Path, name: str, values: Any) -> Webhook:
    where = f"--webhooks {path}: {name}"
    if not isinstance(values, dict):
        raise WebhooksError(f"{where} is not a table such as [{name}]")
    if unknown := values.keys() - _FIELDS:
        raise WebhooksError(f"{where}.{min(unknown)} is not one of {', '.join(sorted(_FIELDS))}")
    url, secret, tenants = values.get("url"), values.get("secret_file"), values.get("tenants", [])
    if not isinstance(url, str) or not url.startswith(("https://", "http://")) or not _has_host(url):
        raise WebhooksError(f"{where}.url: give an address such as https://ci.example.com/hook")
    if not isinstance(secret, str):
        raise WebhooksError(f"{where}.secret_file: give the name of a file")
    if not isinstance(tenants, list) or not all(isinstance(tenant, str) for tenant in tenants):
        raise WebhooksError(f"{where}.tenants: is not a list of names")
    try:
        text = (path.parent / secret).read_text(encoding="utf-8").strip()
        key = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except OSError as error:
        raise WebhooksError(f"{where}.secret_file: {path.parent / secret}: {error.strerror}") from error
    except (binascii.Error, ValueError):
        key = b""
    if len(key) not in _KEY_BYTES:
        raise WebhooksError(
            f"{where}.secret_file: {path.parent / secret} is not {_PREFIX} and base64 of 24 to 64 bytes"
        )
    return Webhook(name, url, key, frozenset(tenants))


def _has_host(url: str) -> bool:
    """Return whether a URL has a host, and a port that can be read."""
    try:
        return bool(urlsplit(url).port != 0 and urlsplit(url).hostname)
    except ValueError:
        return False


def signed_headers(key: bytes, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the headers of a call, with the signature of its id, time in seconds since 1970 and body."""
    signature = hmac.digest(key, f"{message_id}.{timestamp}.".encode() + body, "sha256")
    return {
        "content-type": "application/json",
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{base64.b64encode(signature).decode()}",
    }


# Tables of events, and the last part of the name under which the catalog keeps what a webhook has taken of each.
_TABLES = {
    "release": ("release_events", ""),
    "budget": ("budget_events", "#budgets"),
    "batch": ("batch_events", "#batches"),
}


@dataclass(frozen=True, slots=True)
class _Message:
    event: int
    tenant: str
    body: bytes


class Webhooks:
    """Sends the events of the catalog to webhooks, each in its own thread, so that a slow one delays no other."""

    def __init__(self, database: Database, webhooks: list[Webhook]) -> None:
        self._database = database
        self._webhooks = webhooks
        self._threads = ThreadPoolExecutor(max(1, len(webhooks)), thread_name_prefix="webhook")
        self._begin()

    def _begin(self) -> None:
        """Let new webhooks begin with the next event, and forget those that are not in the file any more."""
        names = [webhook.name + suffix for webhook in self._webhooks for _, suffix in _TABLES.values()]
        with self._database.transaction() as rows:
            for table, suffix in _TABLES.values():
                rows.executemany(
                    f"INSERT INTO webhooks SELECT ?, coalesce(max(event), 0) FROM {table} WHERE true "
                    "ON CONFLICT DO NOTHING",
                    [(webhook.name + suffix,) for webhook in self._webhooks],
                )
            rows.execute(f"DELETE FROM webhooks WHERE name NOT IN ({marks(names or [''])})", names or [""])

    async def follow(self) -> None:
        """Send what happens, with a look of each webhook every LOOK_S; returns where there are none."""
        await asyncio.gather(*(every(LOOK_S, partial(self._look, webhook)) for webhook in self._webhooks))

    async def _look(self, webhook: Webhook) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._send, webhook)
        except CallError as error:  # the disk is full, or the bucket does not answer: the event is sent again
            log.warning("webhook %s: what it has taken is not kept: %s", webhook.name, error)

    def _send(self, webhook: Webhook) -> None:
        """Send a webhook its next events, until there are none, or a call fails, unless it pauses."""
        if time.monotonic() < webhook.paused_until:
            return
        for kind, (_, suffix) in _TABLES.items():
            if not self._send_all(webhook, kind, webhook.name + suffix):
                return

    def _send_all(self, webhook: Webhook, kind: str, taken: str) -> bool:
        """Send the next events of a kind; returns whether no call failed."""
        read = {"release": self._next_release, "budget": self._next_budget, "batch": self._next_batch}[kind]
        while (message := read(taken)) is not None:
            if not webhook.tenants or message.tenant in webhook.tenants:
                # All tries of an event have the same id, by which a receiver recognizes repeats.
                headers = signed_headers(webhook.key, f"{kind}-event-{message.event}", int(time.time()), message.body)
                if failure := call(webhook.url, message.body, headers):
                    webhook.failures += 1
                    if webhook.failures < _TRIES:
                        pause_s = min(_LONGEST_S, _PAUSE_S * 2 ** (webhook.failures - 1))
                        webhook.paused_until = time.monotonic() + pause_s
                        log.warning("webhook %s: %s; the next try is in %g s", webhook.name, failure, pause_s)
                        return False
                    log.error("webhook %s: event %d is left out: %s", webhook.name, message.event, failure)
            webhook.failures = 0
            self._took(taken, message.event)
        return True

    def _took(self, name: str, event: int) -> None:
        with self._database.transaction() as rows:
            rows.execute("UPDATE webhooks SET event = max(event, ?) WHERE name = ?", (event, name))

    def _next_budget(self, name: str) -> _Message | None:
        with self._database.reading() as rows:
            row = rows.execute(
                "SELECT event, kind, record FROM budget_events "
                "WHERE event > (SELECT event FROM webhooks WHERE name = ?) ORDER BY event LIMIT 1",
                (name,),
            ).fetchone()
        if row is None:
            return None
        record = json.loads(row["record"])
        body = {"type": f"budget.{row['kind']}", "timestamp": record["time"], "data": record["data"]}
        return _Message(row["event"], record["data"]["tenant"], json.dumps(body).encode())

    def _next_batch(self, name: str) -> _Message | None:
        with self._database.reading() as rows:
            row = rows.execute(
                "SELECT event, tenant, record FROM batch_events "
                "WHERE event > (SELECT event FROM webhooks WHERE name = ?) ORDER BY event LIMIT 1",
                (name,),
            ).fetchone()
        return None if row is None else _Message(row["event"], row["tenant"], row["record"].encode())

    def _next_release(self, name: str) -> _Message | None:
        with self._database.reading() as rows:
            row = rows.execute(
                "SELECT release_events.event, release_events.number, release_events.record, digest, tenant, adapter "
                "FROM release_events JOIN releases USING (adapter_id, number) "
                "JOIN adapters ON adapters.id = release_events.adapter_id "
                "WHERE release_events.event > (SELECT event FROM webhooks WHERE name = ?) "
                "ORDER BY release_events.event LIMIT 1",
                (name,),
            ).fetchone()
        if row is None:
            return None
        event = msgspec.json.decode(row["record"], type=ReleaseEvent)
        body = {
            "type": f"release.{event.after.value.replace(' ', '_')}",
            "timestamp": datetime.fromtimestamp(event.time_ns / 1e9, UTC).isoformat(),
            "data": {
                "release": f"tenants/{row['tenant']}/adapters/{row['adapter']}/releases/{row['number']}",
                "digest": row["digest"],
                "before": event.before.value if event.before else None,
                "after": event.after.value,
                "actor": event.actor,
                "cause": event.cause,
                "figures": event.figures,
            },
        }
        return _Message(row["event"], row["tenant"], json.dumps(body).encode())


def call(url: str, body: bytes, headers: Mapping[str, str]) -> str:
    """Send a message; returns why that failed, or nothing. A redirect is not followed: it is a failure."""
    try:
        status, _ = timed_call(_CALL_S, "POST", urlsplit(url), body, dict(headers))
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    return "" if 200 <= status < 300 else f"status {status}"
