"""Usage events: one for each charge of a tenant, posted to a collector, appended to a file as a line of JSON, or both.

    charge ──XADD, in the ledger's script──▶ stream ──XREADGROUP──▶ collector, line in a file, synced ──▶ XACK, XDEL

Each event is read by one router. What it has not acknowledged after CLAIM_MS, because it died, its disk was full or the
collector away, is claimed by another; one with a full disk reads no more. None is missing; one that is written or sent
twice has the same id.
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
from loraplex.contracts.plans import money
from loraplex.router.metrics import RouterMetrics
from loraplex.router.quotas.quotas import NO_FACTS, Facts
from loraplex.runtime.telemetry.logging import LogOnce
from loraplex.usage_events.sender import NotTakenError, UsageSender

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


class UsageLog:
    """Sends the events of charges to a collector, and writes them to one router's file; without a path to none."""

    def __init__(
        self, redis: Redis, path: Path | None, metrics: RouterMetrics, sender: UsageSender | None = None
    ) -> None:
        self._redis, self._path, self._metrics, self._sender = redis, path, metrics, sender
        self._writing = asyncio.Lock()
        self._claimed_at = -math.inf
        # Entries that the disk did not take; they are sent. No others are read meanwhile: other routers write those.
        self._unwritten: list[Entry] = []
        self._once = LogOnce(log, logging.ERROR)

    @classmethod
    def open(cls, redis: Redis, metrics: RouterMetrics, path: str, url: str) -> UsageLog:
        """Return the log of a router's settings, of which one may be empty."""
        return cls(redis, Path(path) if path else None, metrics, UsageSender(url, metrics) if url else None)

    async def follow(self) -> None:
        """Send and write what waits, again and again; never returns."""
        while True:
            went = await self.write()
            await asyncio.sleep(WRITE_S if went else max(CLAIM_S, self._sender.pause_s if self._sender else 0.0))

    async def close(self, timeout_s: float) -> None:
        """Send and write what waits within a timeout in seconds; the rest stays in Redis for other routers."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.write()

    async def write(self) -> bool:
        """Send and write what waits; what does not go, any router tries again. Returns whether all went."""
        async with self._writing:
            try:
                while await self._write_batch():
                    pass
            except NotTakenError as error:
                self._once(f"usage events wait: {error}")
            except REDIS_DOWN as error:  # what was read is claimed later, and written with the same ids
                self._once(f"usage events wait: Redis: {error}")
            else:
                if self._once.reset():
                    log.info("usage events go again")
                self._metrics.usage_waiting.set(0)
                return True
            with suppress(*REDIS_DOWN):
                self._metrics.usage_waiting.set(await self._redis.xlen(_STREAM))
            return False

    async def _write_batch(self) -> bool:
        """Send and write the next entries, and take them out of Redis. Returns whether there were any."""
        entries = self._unwritten or await self._read()
        if not entries:
            return False
        events = [event_of(fields) for _, fields in entries]
        ids = [entry_id for entry_id, _ in entries]
        if self._sender is not None and not self._unwritten:
            await self._send(self._sender, events, ids)
        if self._path is not None:
            self._unwritten = entries
            try:
                await asyncio.to_thread(_append, self._path, events)
            except OSError as error:
                raise NotTakenError(f"--usage-file {self._path}: {error.strerror}") from error
            self._unwritten = []
        self._metrics.usage_events.inc(len(events))
        await self._redis.xdel(_STREAM, *ids)  # first: nobody reads again what is acknowledged
        await self._redis.xack(_STREAM, _GROUP, *ids)
        return True

    async def _send(self, sender: UsageSender, events: list[dict[str, Any]], ids: list[Any]) -> None:
        """Send events; a collector that takes its time does not get them from another router meanwhile."""
        sending = asyncio.ensure_future(asyncio.to_thread(sender.send, events))
        try:
            while not (await asyncio.wait({sending}, timeout=CLAIM_S))[0]:
                await self._redis.xclaim(_STREAM, _GROUP, _CONSUMER, 0, ids, justid=True)
            sending.result()
        finally:
            sending.cancel()

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

    money_part = {"cost": money(number(b"cost"))} if facts.currency else {}
    facts_part = {name: value for name, value in msgspec.structs.asdict(facts).items() if name != "currency" or value}
    return {
        "specversion": "1.0",
        "id": fields.get(b"id", b"").decode(errors="replace"),
        "source": SOURCE,
        "type": TYPE,
        "subject": f"tenants/{facts.tenant}",
        "time": datetime.fromtimestamp(number(b"at_ms") / 1e3, UTC).isoformat(timespec="milliseconds"),
        "datacontenttype": "application/json",
        "data": {
            **facts_part,
            "input_tokens": number(b"input"),
            # A router of 0.1 adds events without this field.
            "cached_tokens": number(b"cached") if b"cached" in fields else min(facts.cached_tokens, number(b"input")),
            "output_tokens": number(b"output"),
            **money_part,
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
