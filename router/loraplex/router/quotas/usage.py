"""Usage events: a line of JSON for each charge of a tenant, appended to a file.

    charge ──XADD, in the ledger's script──▶ stream ──XREADGROUP──▶ line in a file, synced ──▶ XACK, XDEL

Each event is read by one router. What it has not acknowledged after CLAIM_MS, because it died or its disk was full, is
claimed by another; one with a full disk reads no more. None is missing, and one that is written twice has the same id.
(CloudEvents 1.0, JSON format: https://cloudevents.io)
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.keys import LEDGER
from loraplex.contracts.broker.messages import Job
from loraplex.router.metrics import RouterMetrics
from loraplex.router.quotas.usage_sender import UsageSender

log = logging.getLogger(__name__)

# Interval in seconds between writes, each of which ends with an fsync; and between looks for events that another router
# has read and not written, which takes so many ms.
WRITE_S = 0.2
CLAIM_S, CLAIM_MS = 1.0, 2_000
# Maximum events of a write.
EVENTS_AT_ONCE = 500
SOURCE, TYPE = "/loraplex/ledger", "loraplex.usage.v1"
# The stream; the consumer group of all routers, and the name that they share in it.
_STREAM, _GROUP, _CONSUMER = LEDGER + "usage", "files", "routers"

# An entry of the stream: its id there, and its fields by name.
Entry = tuple[bytes, dict[bytes, bytes]]


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts about a call, kept with its reservation, so that any router can write its event."""

    tenant: str = ""
    key: str = ""
    # Of the call: parts of a call of Score have ids of their own.
    request_id: str = ""
    model: str = ""
    # The revision's full name, or a weighted set's digest; empty for the base model.
    adapter_revision: str = ""
    cached_tokens: int = 0
    # Time in seconds from the reservation to the end, at the router that ended it.
    seconds: float = 0.0

    def of_job(self, job: Job) -> Facts:
        """Return the facts with those of one of the call's jobs."""
        revision = job.adapter.revision if job.adapter else ""
        request_id = self.request_id or job.request_id
        return msgspec.structs.replace(self, request_id=request_id, model=job.model, adapter_revision=revision)


NO_FACTS = Facts()


class UsageLog:
    """Writes the events of charges to one router's file. With a `url` they are sent to a collector as well."""

    def __init__(self, redis: Redis, path: Path, metrics: RouterMetrics, url: str = "") -> None:
        self._sender = UsageSender(path, url, metrics) if url else None
        self._redis = redis
        self._path = path
        self._metrics = metrics
        self._writing = asyncio.Lock()
        self._claimed_at = -math.inf
        # Entries that were read and not written yet. No others are read meanwhile: other routers write those.
        self._unwritten: list[Entry] = []

    async def follow(self) -> None:
        """Write what waits, again and again; never returns."""
        while True:
            went = await self.write()
            await asyncio.sleep(WRITE_S if went else CLAIM_S)

    async def close(self, timeout_s: float) -> None:
        """Write what waits, and send what the collector takes within a timeout."""
        await self.write()
        if self._sender is not None:
            await asyncio.to_thread(self._sender.close, timeout_s)

    async def write(self) -> bool:
        """Write what waits; what the disk does not take, others write. Returns whether all went."""
        async with self._writing:
            try:
                while entries := self._unwritten or await self._read():
                    self._unwritten = entries
                    events = [event_of(fields) for _, fields in entries]
                    try:
                        await asyncio.to_thread(_append, self._path, events)
                    except OSError as error:
                        log.error("usage events wait: --usage-file %s: %s", self._path, error.strerror)
                        return False
                    self._unwritten = []
                    self._metrics.usage_events.inc(len(events))
                    ids = [entry_id for entry_id, _ in entries]
                    await self._redis.xdel(_STREAM, *ids)  # first: nobody reads again what is acknowledged
                    await self._redis.xack(_STREAM, _GROUP, *ids)
            except REDIS_DOWN as error:  # what was read is claimed later, and written with the same ids
                log.warning("usage events wait: Redis: %s", error)
                return False
        return True

    async def _read(self, *, again: bool = True) -> list[Entry]:
        """Return new events, and from time to time those that a router has read and not written."""
        try:
            if time.monotonic() - self._claimed_at > CLAIM_S:
                claimed: Any = await self._redis.xautoclaim(_STREAM, _GROUP, _CONSUMER, CLAIM_MS, count=EVENTS_AT_ONCE)
                if claimed[1]:
                    return list(claimed[1])
                self._claimed_at = time.monotonic()
            answer: Any = await self._redis.xreadgroup(_GROUP, _CONSUMER, {_STREAM: ">"}, count=EVENTS_AT_ONCE)
        except ResponseError as error:
            if "NOGROUP" not in str(error) or not again:
                raise
            with suppress(ResponseError):  # another router has made it, or a full Redis refuses it
                await self._redis.xgroup_create(_STREAM, _GROUP, "0", mkstream=True)
            return await self._read(again=False)
        streams = answer.items() if isinstance(answer, dict) else answer or ()
        return [entry for _, entries in streams for entry in entries]


def event_of(fields: dict[bytes, bytes]) -> dict[str, Any]:
    """Return the event of a charge, with what can be read of one that something else than the ledger has added."""
    try:
        facts = msgspec.json.decode(fields.get(b"facts", b"{}"), type=Facts)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        log.warning("cannot read the facts of a charge: %d bytes", len(fields[b"facts"]))
        facts = NO_FACTS

    def number(name: bytes) -> int:
        value = fields.get(name, b"")
        return int(value) if value.isdigit() and len(value) < 16 else 0

    return {
        "specversion": "1.0",
        "id": fields.get(b"id", b"").decode(errors="replace"),
        "source": SOURCE,
        "type": TYPE,
        "subject": f"tenants/{facts.tenant}",
        "time": datetime.fromtimestamp(number(b"at_ms") / 1e3, UTC).isoformat(timespec="milliseconds"),
        "datacontenttype": "application/json",
        "data": {
            **msgspec.structs.asdict(facts),
            "input_tokens": number(b"input"),
            "cached_tokens": min(facts.cached_tokens, number(b"input")),
            "output_tokens": number(b"output"),
        },
    }


def _append(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Append lines and wait until the disk has them. The file is opened each time, so that it may be moved away."""
    lines = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events).encode()
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # a line that another router is writing seems torn
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":  # its last writer died within a line
            lines = b"\n" + lines
        if os.write(file, lines) < len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)
    finally:
        os.close(file)
