"""Usage events: a line of JSON for each part of a request that its tenant was charged for, appended to a file.

    settled or expired ──▶ charge, kept in Redis ──▶ line in the file, synced ──▶ acknowledged: Redis forgets it

A charge that its router has not acknowledged, because it died or its disk was full, is written by another router. So
none is missing, and one that is there twice has the same id. (CloudEvents 1.0, JSON format: https://cloudevents.io)
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from broker.connection import REDIS_DOWN
from broker.ledger_records import Charge
from broker.messages import Job
from router.metrics import RouterMetrics
from router.quotas.usage_sender import UsageSender
from rpc.errors import Unauthenticated
from rpc.identity.principal import caller

log = logging.getLogger(__name__)

# Interval in seconds between writes; each ends with an fsync.
WRITE_S = 0.2
# Maximum charges that wait for the disk: further ones stay in Redis, for a later look.
WAITING_LIMIT = 10_000
# Number of the last charges written, which are not written again while Redis still has them.
_WRITTEN_LIMIT = 20_000
# Timeout in seconds for another router that writes to the same file, and interval in seconds between looks at it: one
# that stands still just then must hold up nobody.
_LOCK_S, _LOCK_RETRY_S = 1.0, 0.005
SOURCE, TYPE = "/loraplex/ledger", "loraplex.usage.v1"


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts about a call, kept with its reservation, so that any router can write its event."""

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

    def with_key(self, key: str) -> Facts:
        """Return the facts of a call with an API key, by its id."""
        return msgspec.structs.replace(self, key=key)

    def encode(self) -> str:
        """Return the facts as a reservation's subject."""
        return msgspec.json.encode(self).decode()


NO_FACTS = Facts()


class UsageLog:
    """Writes the events of the charges of one router. `acknowledge` tells the ledger of a tenant's written charges.

    With a `url` they are sent to a collector as well.
    """

    def __init__(
        self,
        path: Path,
        acknowledge: Callable[[str, Sequence[str]], Awaitable[None]],
        metrics: RouterMetrics,
        url: str = "",
    ) -> None:
        self._sender = UsageSender(path, url, metrics) if url else None
        self._path = path
        self._acknowledge = acknowledge
        self._metrics = metrics
        self._waiting: dict[str, tuple[str, Charge]] = {}
        self._written: OrderedDict[str, None] = OrderedDict()
        self._writing = asyncio.Lock()

    def add(self, tenant: str, charge: Charge) -> None:
        """Write the event of a charge soon. A charge that is written already is only acknowledged again."""
        if len(self._waiting) < WAITING_LIMIT:
            self._waiting[charge.id] = (tenant, charge)

    async def follow(self) -> None:
        """Write what waits, again and again; never returns."""
        while True:
            await asyncio.sleep(WRITE_S)
            await self.write()

    async def close(self, timeout_s: float) -> None:
        """Write what waits, and send what the collector takes within a timeout."""
        await self.write()
        if self._sender is not None:
            await asyncio.to_thread(self._sender.close, timeout_s)

    async def write(self) -> None:
        """Write what waits; what the disk does not take stays in Redis, and comes again with a later look."""
        async with self._writing:
            batch, self._waiting = self._waiting, {}
            new = {name: one for name, one in batch.items() if name not in self._written}
            try:
                await asyncio.to_thread(_append, self._path, [event_of(*one) for one in new.values()])
            except OSError as error:
                log.error("usage events wait: --usage-file %s: %s", self._path, error.strerror)
                return
            self._metrics.usage_events.inc(len(new))
            self._written.update(dict.fromkeys(new))
            while len(self._written) > _WRITTEN_LIMIT:
                self._written.popitem(last=False)
        by_tenant: dict[str, list[str]] = {}
        for name, (tenant, _) in batch.items():
            by_tenant.setdefault(tenant, []).append(name)
        for tenant, names in by_tenant.items():
            try:
                await self._acknowledge(tenant, names)
            except REDIS_DOWN:
                return  # they come again with a later look


def calling_key() -> str:
    """Return the id of the API key that the current RPC was called with, or nothing."""
    try:
        return caller().key_id
    except Unauthenticated:
        return ""


def _facts_of(charge: Charge) -> Facts:
    """Return what stands in a charge's subject; nothing for one that something else than a router has written."""
    try:
        return msgspec.json.decode(charge.subject or "{}", type=Facts)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        log.warning("cannot read the facts of a charge: %d characters", len(charge.subject))
        return NO_FACTS


def event_of(tenant: str, charge: Charge) -> dict[str, Any]:
    """Return the event of a charge."""
    facts = _facts_of(charge)
    return {
        "specversion": "1.0",
        "id": charge.id,
        "source": SOURCE,
        "type": TYPE,
        "subject": f"tenants/{tenant}",
        "time": datetime.fromtimestamp(charge.at_ms / 1e3, UTC).isoformat(timespec="milliseconds"),
        "datacontenttype": "application/json",
        "data": {
            "tenant": tenant,
            "key": facts.key,
            "request_id": facts.request_id,
            "model": facts.model,
            "adapter_revision": facts.adapter_revision,
            "input_tokens": charge.input,
            "cached_tokens": min(facts.cached_tokens, charge.input),
            "output_tokens": charge.output,
            "seconds": facts.seconds,
        },
    }


def _lock(file: int) -> None:
    """Wait until no other router appends, for a limited time: a line that is being written seems torn."""
    until = time.monotonic() + _LOCK_S
    while time.monotonic() < until:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(_LOCK_RETRY_S)


def _append(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Append lines and wait until the disk has them. The file is opened each time, so that it may be moved away."""
    if not events:
        return
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        _lock(file)
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"  # its last writer died within a line
        lines = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events)
        data = (b"\n" if torn else b"") + lines.encode()
        while data:
            data = data[os.write(file, data) :]
        os.fsync(file)
    finally:
        os.close(file)
