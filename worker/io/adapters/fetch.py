"""Adapter revisions on this worker's disk: what is there, what is on its way, and what can't be had just now.

    job ──▶ hold ──▶ on disk and verified ────────────────────────────────────────▶ directory
              │      on disk since an earlier life ──▶ verified in a flight ─────▶
              └─pins not there ──▶ failed a moment ago ──▶ the same failure
                                   else one flight a digest, shared ──▶ download ─▶

A flight ends when nobody waits for it any more; a failure is remembered for FAILED_S, so that a thousand jobs of a
broken adapter are not a thousand downloads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
from loraplex.adapters.v1 import adapters_pb2_grpc

from broker.messages import AdapterRef, AdapterRequest
from rpc.server import channel_options
from worker.engine_api import Failure
from worker.io.adapters.disk import DiskTier, Stored, TooLargeError
from worker.io.adapters.download import CONFIG_BYTES, FetchFailedError, Patience, digest_on_disk, download
from worker.io.metrics import FetchStats, WorkerMetrics

__all__ = ["AdapterFetcher", "DiskPin", "FetchFailedError"]

log = logging.getLogger(__name__)

FAILED_S = 1.0
# Downloads side by side; more than the rows of most workers, so that slow ones keep nobody waiting.
DOWNLOADS = 64
# Downloads for jobs that still wait in the queue, which others may claim.
PREFETCHES = 2
# A store that is back must be found again soon.
_OPTIONS = [
    *channel_options(),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


@dataclass(slots=True, eq=False)
class _Flight:
    revision: str
    task: asyncio.Task[Path]
    waiters: int = 0


class AdapterFetcher:
    """Gets revisions from the store to the disk tier."""

    def __init__(
        self, store_address: str, disk: DiskTier, patience: Patience, metrics: WorkerMetrics | None = None
    ) -> None:
        self._metrics = metrics or WorkerMetrics()
        self._disk = disk
        self._patience = patience
        self._channel = grpc.aio.insecure_channel(store_address, options=_OPTIONS)
        self.store = adapters_pb2_grpc.AdapterServiceStub(self._channel)
        self._flights: dict[str, _Flight] = {}
        self._downloads = asyncio.Semaphore(DOWNLOADS)
        # By revision, with the time until which it counts.
        self._failed: dict[str, tuple[float, FetchFailedError]] = {}
        self._prefetches: set[asyncio.Task[None]] = set()
        self._hits = self._misses = 0

    def hold(self) -> DiskPin:
        """What one job needs of the disk."""
        return DiskPin(self, self._disk)

    @property
    def stats(self) -> FetchStats:
        """What it holds, and has done."""
        disk = self._disk
        return FetchStats(disk.bytes, disk.budget, disk.count, len(self._flights), self._hits, self._misses)

    async def get(self, ref: AdapterRef, tenant: str) -> Path:
        """The directory of a verified revision that the caller has pinned. Raises FetchFailedError."""
        stored = self._disk.find(ref.digest)
        if stored is not None and stored.verified:
            self._hits += 1
            return stored.path
        self._misses += stored is None
        return await self._fly(ref, tenant)

    def prefetch(self, requests: Iterable[AdapterRequest]) -> None:
        """Begin to fetch what waiting jobs want, where nothing else is being fetched and room is there at once."""
        for request in requests:
            for ref in request.adapter.summands:
                if self._disk.find(ref.digest) is not None or ref.digest in self._flights or self._failure(ref):
                    continue
                claimed = len(self._flights) > len(self._prefetches)
                if claimed or len(self._prefetches) >= PREFETCHES or not self._disk.has_room(_room_of(ref)):
                    return
                task = asyncio.get_running_loop().create_task(self._prefetch(ref, request.tenant))
                self._prefetches.add(task)
                task.add_done_callback(self._prefetches.discard)

    async def _prefetch(self, ref: AdapterRef, tenant: str) -> None:
        try:
            await self._fly(ref, tenant)
        except FetchFailedError as error:
            log.info("prefetch of %s: %s", ref.revision, error)

    async def _fly(self, ref: AdapterRef, tenant: str) -> Path:
        while True:
            if failed := self._failure(ref):
                raise failed
            flight = self._flights.get(ref.digest)
            if flight is None:
                flight = _Flight(ref.revision, asyncio.get_running_loop().create_task(self._land(ref, tenant)))
                self._flights[ref.digest] = flight
                # At once, before a waiter wakes: one that tries again must not join a flight that has ended.
                flight.task.add_done_callback(partial(self._ended, ref.digest, flight))
            try:
                return await self._join(flight, ref.digest)
            except FetchFailedError:
                # The same bytes under another name, which its owner may have deleted: ours decides for us.
                if flight.revision == ref.revision:
                    raise

    async def _join(self, flight: _Flight, digest: str) -> Path:
        flight.waiters += 1
        try:
            # One waiter that is cancelled must not end it for the others.
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if not flight.waiters:
                flight.task.cancel()
                self._landed(digest, flight)

    def _ended(self, digest: str, flight: _Flight, _: asyncio.Task[Path]) -> None:
        self._landed(digest, flight)

    def _landed(self, digest: str, flight: _Flight) -> None:
        if self._flights.get(digest) is flight:
            del self._flights[digest]

    def _failure(self, ref: AdapterRef) -> FetchFailedError | None:
        until, failed = self._failed.get(ref.revision, (0.0, None))
        return failed if time.monotonic() < until else None

    async def _land(self, ref: AdapterRef, tenant: str) -> Path:
        try:
            found = self._disk.find(ref.digest)
            if found is not None and await self._verify(ref, found):
                return found.path
            return (await self._download(ref, tenant)).path
        except FetchFailedError as error:
            self._metrics.fetches.labels(error.failure.reason.lower()).inc()
            log.warning("%s", error)
            now = time.monotonic()
            self._failed = {revision: failed for revision, failed in self._failed.items() if failed[0] > now}
            self._failed[ref.revision] = now + FAILED_S, error
            raise

    async def _verify(self, ref: AdapterRef, found: Stored) -> bool:
        """Whether what an earlier life left is still what its name says."""
        try:
            found.verified = await asyncio.to_thread(digest_on_disk, found.path) == ref.digest
        except OSError as error:
            log.warning("%s: %s", found.path, error)
        if not found.verified:
            log.warning("%s is not what it was; it is fetched again", found.path)
            self._disk.discard(ref.digest)
        return found.verified

    async def _download(self, ref: AdapterRef, tenant: str) -> Stored:
        try:
            # The reservation may have to wait until jobs end, and counts as part of the whole.
            async with asyncio.timeout(self._patience.whole_s), self._disk.room(_room_of(ref)) as room, self._downloads:
                with self._metrics.fetch_time.time():
                    size = await download(self.store, ref, tenant, room.path, self._patience)
                self._metrics.fetches.labels("ok").inc()
                self._metrics.fetch_bytes.inc(size)
                return self._disk.keep(room, ref.digest, size)
        except TooLargeError as error:
            message = f"{ref.revision}: {error} on a worker's disk"
            raise FetchFailedError(Failure("FAILED_PRECONDITION", "ADAPTER_TOO_LARGE", message, "adapter")) from error
        except TimeoutError as error:
            message = f"{ref.revision}: not here after {self._patience.whole_s:g} s"
            raise FetchFailedError(Failure("UNAVAILABLE", "STORE_TIMEOUT", message, "adapter")) from error
        except OSError as error:
            message = f"{ref.revision}: {error.strerror or error}"
            raise FetchFailedError(Failure("UNAVAILABLE", "FETCH_FAILED", message, "adapter")) from error

    async def close(self) -> None:
        """End what is under way."""
        ending = [*self._prefetches, *(flight.task for flight in self._flights.values())]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._channel.close()


class DiskPin:
    """The revisions that one job needs: none of them leaves the disk before `release`."""

    def __init__(self, fetcher: AdapterFetcher, disk: DiskTier) -> None:
        self._fetcher = fetcher
        self._disk = disk
        self._digests: list[str] = []

    async def fetch(self, ref: AdapterRef, tenant: str) -> Path:
        """The directory of a verified revision. Raises FetchFailedError."""
        self._disk.pin(ref.digest)
        self._digests.append(ref.digest)
        return await self._fetcher.get(ref, tenant)

    def release(self) -> None:
        """The job is over."""
        while self._digests:
            self._disk.unpin(self._digests.pop())


def _room_of(ref: AdapterRef) -> int:
    return ref.weight_bytes + CONFIG_BYTES
