"""Adapter revisions from the store to this worker's disk, each fetched once however many jobs want it.

    job ──▶ DiskPin ──▶ on disk and verified ───────────────────────────────▶ directory
                        on disk since an earlier run ──▶ shared fetch: verify ─▶
                        not there: failed a moment ago ──▶ the same failure
                                   else ──▶ one shared fetch a digest: download ─▶

A shared fetch ends when nobody waits for it any more. A failure is remembered for a moment, so that a thousand jobs of
a broken adapter are not a thousand downloads.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Container, Iterable, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import adapters_pb2_grpc

from loraplex.contracts.artifacts.activation import read_invocation
from loraplex.contracts.artifacts.names import weighted_digest
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE, revision_digest
from loraplex.contracts.broker.messages import AdapterRef, AdapterRequest, AdapterTiers, WeightedParts
from loraplex.runtime.rpc.principal import TENANT_KEY, WORKER_GRANT_KEY
from loraplex.runtime.rpc.server import channel_options
from loraplex.runtime.rpc.tls import LiveChannel, TlsFiles
from loraplex.worker.engine_api import AdapterPart, AdapterSource, Failure, FailureCode, FailureReason
from loraplex.worker.io.adapters.disk import DiskTier, NotReservedError, Stored, TooLargeError
from loraplex.worker.io.metrics import WorkerMetrics

log = logging.getLogger(__name__)

# Maximum bytes of an adapter's configuration file, as the store has it.
CONFIG_BYTES = 1 << 20

_FAILURES: dict[grpc.StatusCode, tuple[FailureCode, FailureReason]] = {
    grpc.StatusCode.NOT_FOUND: ("NOT_FOUND", "ADAPTER_GONE"),
    grpc.StatusCode.DATA_LOSS: ("DATA_LOSS", "DATA_LOSS"),
    grpc.StatusCode.DEADLINE_EXCEEDED: ("UNAVAILABLE", "STORE_TIMEOUT"),
    grpc.StatusCode.PERMISSION_DENIED: ("UNAVAILABLE", "GRANT_REFUSED"),
}


class FetchFailedError(Exception):
    """A revision that can't be fetched; its jobs end with `failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class DownloadTimeouts:
    """Timeouts of a download in seconds: for all of it, the next piece (up to 1 MiB), and the store's acceptance of it.

    The store accepts a download before it reads anything, so that one which hangs is soon told from a slow one. It has
    as long to be reached: one that restarts fails no job in this time.
    """

    total_s: float
    silent_s: float
    accepted_s: float = 3.0


def _sizes(*refs: AdapterRef) -> dict[str, int]:
    """Return the most bytes that the files of revisions take, by digest."""
    return {ref.digest: ref.weight_bytes + CONFIG_BYTES for ref in refs}


# Maximum number of sets that are remembered: more than slots and host memory have.
SETS_LIMIT = 4_096


class WeightedSets:
    """The weighted sets of the last jobs, since neither the store nor the engine knows their parts.

    Of each: its parts with their weights, and the tenant that used it last.
    """

    def __init__(self, limit: int = SETS_LIMIT) -> None:
        self._limit = limit
        self._used: OrderedDict[str, tuple[str, WeightedParts]] = OrderedDict()

    def note(self, adapter: AdapterRef, tenant: str) -> None:
        """Note the use of an adapter, if it is a set."""
        if adapter.parts:
            self._used[adapter.digest] = tenant, tuple((part.adapter.digest, part.weight) for part in adapter.parts)
            self._used.move_to_end(adapter.digest)
            if len(self._used) > self._limit:
                self._used.popitem(last=False)

    @property
    def parts(self) -> set[str]:
        """Return the digests of the revisions in the sets."""
        return {digest for _, parts in self._used.values() for digest, _ in parts}

    def among(self, digests: Iterable[str]) -> dict[str, WeightedParts]:
        """Return the parts of the sets among these digests."""
        return {digest: self._used[digest][1] for digest in digests if digest in self._used}

    def staying(self, tenant: str, gone: Container[str]) -> set[str]:
        """Return the sets that stay where a tenant and revisions go: others' whose parts are all there."""
        return {
            digest
            for digest, (user, parts) in self._used.items()
            if user != tenant and not any(part in gone for part, _ in parts)
        }


class DiskPin:
    """The revisions of one job, which stay on the disk until `release`."""

    def __init__(self, fetcher: AdapterFetcher, wait_s: float) -> None:
        self._fetcher = fetcher
        self._wait_s = wait_s
        self._digests: list[str] = []
        self._tenant = ""

    async def fetch(self, refs: Sequence[AdapterRef], tenant: str) -> list[Path]:
        """Pin revisions, all or none, and return their verified directories.

        Raises FetchFailedError; then nothing is pinned.
        """
        while True:
            await self._pin(refs, tenant)
            try:
                return await self._get(refs, tenant)
            except NotReservedError:  # its files were damaged and are removed
                self.release()
            except BaseException:
                self.release()
                raise

    async def invocation_of(self, digest: str) -> tuple[int, ...]:
        """Return the ids from which a pinned revision counts; empty: from a prompt's first id."""
        stored = self._fetcher.disk.find(digest)
        assert stored is not None, "it is pinned"
        if stored.invocation is None:
            config = await asyncio.to_thread((stored.path / CONFIG_FILE).read_bytes)
            stored.invocation = read_invocation(config)
        return stored.invocation

    def release(self) -> None:
        """Unpin every revision."""
        while self._digests:
            self._fetcher.disk.unpin(self._digests.pop(), self._tenant)

    async def _pin(self, refs: Sequence[AdapterRef], tenant: str) -> None:
        sizes = _sizes(*refs)
        names = ", ".join(ref.revision for ref in refs)
        try:
            async with asyncio.timeout(self._wait_s):
                await self._fetcher.disk.pin(sizes, tenant)
        except TooLargeError as error:
            message = f"{names}: {error} on a worker's disk"
            raise self._fetcher.failed(
                Failure("FAILED_PRECONDITION", "ADAPTER_TOO_LARGE", message, "adapter")
            ) from error
        except TimeoutError as error:
            message = f"{names}: the adapters of running answers fill the worker's disk budget"
            raise self._fetcher.failed(Failure("UNAVAILABLE", "DISK_FULL", message, "adapter")) from error
        self._digests += sizes
        self._tenant = tenant

    async def _get(self, refs: Sequence[AdapterRef], tenant: str) -> list[Path]:
        if len(refs) == 1:
            return [await self._fetcher.get(refs[0], tenant)]
        fetches = [asyncio.ensure_future(self._fetcher.get(ref, tenant)) for ref in refs]
        try:
            return await asyncio.gather(*fetches)
        finally:
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)


# Interval and timeout in seconds of the question to a store from which fetches fail.
PROBE_S = 5.0
# Seconds for which a failure is remembered.
FAILURE_S = 1.0
# Maximum downloads at a time: more than the rows of most workers, so that slow downloads delay no others.
DOWNLOADS_LIMIT = 64
# Maximum downloads at a time for jobs that still wait in the queue, which another worker may claim.
PREFETCHES_LIMIT = 2
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
# Back-off of gRPC's connection attempts, in milliseconds: a store that is back is found again soon.
_OPTIONS = [
    *channel_options(),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


@dataclass(slots=True, eq=False)
class _SharedFetch:
    """A fetch that several jobs wait for; `revision` is the name that it asks the store for."""

    revision: str
    task: asyncio.Task[Path]
    waiters: int = 0


class AdapterFetcher:
    """Gets revisions from the store to the disk tier."""

    def __init__(
        self,
        store_address: str,
        disk: DiskTier,
        timeouts: DownloadTimeouts,
        metrics: WorkerMetrics | None = None,
        *,
        tls: TlsFiles | None = None,
        failure_s: float = FAILURE_S,
    ) -> None:
        self._metrics = metrics or WorkerMetrics()
        self.disk = disk
        self.sets = WeightedSets()
        self._timeouts = timeouts
        self._failure_s = failure_s
        self.channel = LiveChannel(store_address, tls, _OPTIONS)
        self._shared: dict[str, _SharedFetch] = {}
        self._downloads = asyncio.Semaphore(DOWNLOADS_LIMIT)
        # By revision, with the time until which the failure counts.
        self._failed: dict[str, tuple[float, FetchFailedError]] = {}
        self._prefetches: set[asyncio.Task[None]] = set()
        self._hits = self._misses = 0
        # True from a failure that other workers need not have, until a fetch succeeds or the store answers again.
        self.fails = False

    async def probe(self) -> None:
        """Ask a store from which the last fetch failed whether it answers, since no job may come here that fetches."""
        if self.fails:
            with suppress(grpc.aio.AioRpcError):
                await self.store.ListBaseModels(pb.ListBaseModelsRequest(page_size=1), timeout=PROBE_S)
                self.fails = False

    @property
    def store(self) -> adapters_pb2_grpc.AdapterServiceAsyncStub:
        """Return a stub of the store."""
        return self.channel.stub(adapters_pb2_grpc.AdapterServiceStub)

    def disk_pin(self) -> DiskPin:
        """Return the pin of one job, which has no revisions yet."""
        return DiskPin(self, self._timeouts.total_s)

    @property
    def stats(self) -> AdapterTiers:
        """Return what is on the disk and on its way, and hits and misses."""
        return AdapterTiers(
            fetching=len(self._shared),
            disk_bytes=self.disk.bytes,
            disk_bytes_limit=self.disk.budget,
            disk_adapters=len(self.disk.digests),
            disk_hits=self._hits,
            disk_misses=self._misses,
        )

    async def get(self, ref: AdapterRef, tenant: str) -> Path:
        """Return the directory of a verified revision, which the caller has pinned.

        Raises FetchFailedError, or NotReservedError where the revision must be pinned again.
        """
        stored = self.disk.find(ref.digest)
        if stored is not None and stored.verified:
            self._hits += 1
            return stored.path
        self._misses += stored is None
        return await self._fetch_shared(ref, tenant)

    def failed(self, failure: Failure) -> FetchFailedError:
        """Count and log a fetch that failed; return its error."""
        self._metrics.fetches.labels(failure.reason.lower()).inc()
        if failure.code == "UNAVAILABLE" and failure.reason != "GRANT_REFUSED":  # another job's grant may hold
            self.fails = True
        log.warning("%s", failure.message)
        return FetchFailedError(failure)

    def prefetch(self, requests: Iterable[AdapterRequest]) -> None:
        """Begin to fetch adapters of waiting jobs, where no job's own fetch runs and the disk has the bytes at once."""
        for request in requests:
            for ref in request.adapter.summands:
                if self.disk.find(ref.digest) is not None or ref.digest in self._shared or self._failure(ref):
                    continue
                claimed = len(self._shared) > len(self._prefetches)
                if claimed or len(self._prefetches) >= PREFETCHES_LIMIT:
                    return
                if not self.disk.fits_now(_sizes(ref), request.tenant):
                    continue
                task = asyncio.get_running_loop().create_task(self._prefetch(ref, request.tenant))
                self._prefetches.add(task)
                task.add_done_callback(self._prefetches.discard)

    async def _prefetch(self, ref: AdapterRef, tenant: str) -> None:
        if not self.disk.fits_now(_sizes(ref), tenant):  # a job came first
            return
        await self.disk.pin(_sizes(ref), tenant)
        try:
            await self._fetch_shared(ref, tenant)
        except (FetchFailedError, NotReservedError) as error:
            log.info("prefetch of %s: %s", ref.revision, error)
        finally:
            self.disk.unpin(ref.digest, tenant)

    async def _fetch_shared(self, ref: AdapterRef, tenant: str) -> Path:
        while True:
            if failed := self._failure(ref):
                raise failed
            shared = self._shared.get(ref.digest)
            if shared is None:
                shared = _SharedFetch(ref.revision, asyncio.get_running_loop().create_task(self._obtain(ref, tenant)))
                self._shared[ref.digest] = shared
                # At once, before a waiter wakes: a waiter that tries again must not join a fetch that has ended.
                shared.task.add_done_callback(partial(self._forget, ref.digest, shared))
            try:
                return await self._join(shared, ref.digest)
            except FetchFailedError:
                # Where it asked for the same bytes under another name, whose owner may have deleted it: ask for ours.
                if shared.revision == ref.revision:
                    raise

    async def _join(self, shared: _SharedFetch, digest: str) -> Path:
        shared.waiters += 1
        try:
            # Shielded: the cancellation of one waiter must not end the fetch for the others.
            return await asyncio.shield(shared.task)
        finally:
            shared.waiters -= 1
            if not shared.waiters:
                shared.task.cancel()
                self._forget(digest, shared)

    def _forget(self, digest: str, shared: _SharedFetch, _: asyncio.Task[Path] | None = None) -> None:
        if self._shared.get(digest) is shared:
            del self._shared[digest]

    def _failure(self, ref: AdapterRef) -> FetchFailedError | None:
        until, failed = self._failed.get(ref.revision, (0.0, None))
        return failed if time.monotonic() < until else None

    async def _obtain(self, ref: AdapterRef, tenant: str) -> Path:
        try:
            stored = self.disk.find(ref.digest)
            if stored is not None and await self._verify(ref, stored):
                return stored.path
            return (await self._store(ref, tenant)).path
        except FetchFailedError as error:
            self.failed(error.failure)
            now = time.monotonic()
            self._failed = {revision: failed for revision, failed in self._failed.items() if failed[0] > now}
            if error.failure.reason != "GRANT_REFUSED":  # another job's grant may hold
                self._failed[ref.revision] = now + self._failure_s, error
            raise

    async def _verify(self, ref: AdapterRef, stored: Stored) -> bool:
        """Return whether the file matches its digest; discard it if not."""
        try:
            stored.verified = await asyncio.to_thread(_digest_on_disk, stored.path) == ref.digest
        except OSError as error:
            log.warning("%s: %s", stored.path, error)
        if not stored.verified:
            log.warning("%s has other bytes than its digest; it is fetched again", stored.path)
            self.disk.discard(ref.digest)
        return stored.verified

    async def _store(self, ref: AdapterRef, tenant: str) -> Stored:
        try:
            async with asyncio.timeout(self._timeouts.total_s):
                try:
                    return await self._write(ref, tenant)
                except OSError as error:
                    # Another program fills the disk: give up what no job needs.
                    if error.errno not in _NO_SPACE or not await self.disk.evict(ref.weight_bytes + CONFIG_BYTES):
                        raise
                    return await self._write(ref, tenant)
        except TimeoutError as error:
            message = f"{ref.revision}: not here after {self._timeouts.total_s:g} s"
            raise FetchFailedError(Failure("UNAVAILABLE", "STORE_TIMEOUT", message, "adapter")) from error
        except OSError as error:
            reason: FailureReason = "DISK_FULL" if error.errno in _NO_SPACE else "FETCH_FAILED"
            message = f"{ref.revision}: on the worker's disk: {error.strerror or error}"
            raise FetchFailedError(Failure("UNAVAILABLE", reason, message, "adapter")) from error

    async def _write(self, ref: AdapterRef, tenant: str) -> Stored:
        async with self.disk.write(ref.digest) as path, self._downloads:
            with self._metrics.fetch_time.time():
                size = await _download(self.store, ref, tenant, path, self._timeouts)
            self.fails = False
            self._metrics.fetches.labels("ok").inc()
            self._metrics.fetch_bytes.inc(size)
            return self.disk.keep(path, ref.digest, size)

    async def close(self) -> None:
        """End what is under way."""
        ending = [*self._prefetches, *(shared.task for shared in self._shared.values())]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self.channel.close()


async def fetch_source(pin: DiskPin, ref: AdapterRef, tenant: str) -> AdapterSource:
    """Fetch what is not on the disk yet, all parts of a set at once. Raises FetchFailedError."""
    if not ref.parts:
        (directory,) = await pin.fetch([ref], tenant)
        invocation = await pin.invocation_of(ref.digest)
        return AdapterSource(ref.digest, str(directory), name=ref.revision, invocation=invocation)
    # A set's digest is the key of KV blocks and of the slot, as a revision's is: it is checked like a revision's bytes.
    if ref.digest != weighted_digest((part.adapter.digest, part.weight) for part in ref.parts):
        raise FetchFailedError(
            Failure("INTERNAL", "WRONG_DIGEST", f"{ref.digest} is not its parts' digest", "adapters")
        )
    directories = await pin.fetch([part.adapter for part in ref.parts], tenant)
    for part in ref.parts:
        if await pin.invocation_of(part.adapter.digest):
            pin.release()
            message = f"{part.adapter.revision} is an activated adapter, which no weighted set can have"
            raise FetchFailedError(Failure("FAILED_PRECONDITION", "ADAPTER_UNLOADABLE", message, "adapters"))
    parts = [
        AdapterPart(part.adapter.digest, str(directory), part.weight)
        for part, directory in zip(ref.parts, directories, strict=True)
    ]
    # Always in the same order: a sum of floats depends on the order, the digest does not.
    return AdapterSource(ref.digest, parts=tuple(sorted(parts, key=lambda part: part.digest)))


async def _download(
    store: adapters_pb2_grpc.AdapterServiceAsyncStub,
    ref: AdapterRef,
    tenant: str,
    into: Path,
    timeouts: DownloadTimeouts,
) -> int:
    """Write a revision's two files, and check their digest; returns their bytes. Raises FetchFailedError, OSError."""
    try:
        with (
            closing(_File(into / CONFIG_FILE, CONFIG_BYTES)) as config,
            closing(_File(into / WEIGHTS_FILE, ref.weight_bytes)) as weights,
        ):
            files = {CONFIG_FILE: config, WEIGHTS_FILE: weights}
            async with aclosing(_parts(store, ref, tenant, timeouts)) as parts:
                async for part in parts:
                    if part.HasField("chunk") and part.chunk.name in files:
                        await asyncio.to_thread(files[part.chunk.name].write, part.chunk.data)
    except grpc.aio.AioRpcError as error:
        code, reason = _FAILURES.get(error.code(), ("UNAVAILABLE", "STORE_DOWN"))
        message = ref.revision if code in {"NOT_FOUND", "DATA_LOSS"} else f"{ref.revision}: {error.details()}"
        raise FetchFailedError(Failure(code, reason, message, "adapter")) from error
    if config.too_large or weights.too_large or await asyncio.to_thread(_digest_of, into, weights) != ref.digest:
        raise FetchFailedError(Failure("DATA_LOSS", "DATA_LOSS", ref.revision, "adapter"))
    return config.size + weights.size


async def _parts(
    store: adapters_pb2_grpc.AdapterServiceAsyncStub, ref: AdapterRef, tenant: str, timeouts: DownloadTimeouts
) -> AsyncGenerator[pb.DownloadRevisionResponse, None]:
    request = pb.DownloadRevisionRequest(name=ref.revision)
    metadata: list[tuple[str, str | bytes]] = [(TENANT_KEY, tenant)]
    if ref.grant:
        metadata.append((WORKER_GRANT_KEY, ref.grant))
    call = store.DownloadRevision(request, timeout=timeouts.total_s, metadata=metadata, wait_for_ready=True)
    silent_s = timeouts.accepted_s
    try:
        async with asyncio.timeout(silent_s):
            await call.initial_metadata()
        while True:
            async with asyncio.timeout(silent_s := timeouts.silent_s):
                part = await call.read()
            if not isinstance(part, pb.DownloadRevisionResponse):  # the end
                return
            yield part
    except TimeoutError as error:
        message = f"{ref.revision}: the store sent nothing for {silent_s:g} s"
        raise FetchFailedError(Failure("UNAVAILABLE", "STORE_TIMEOUT", message, "adapter")) from error
    finally:
        call.cancel()


class _File:
    """A file that is hashed as it is written; bytes beyond `limit` are not written."""

    def __init__(self, path: Path, limit: int) -> None:
        self._file = path.open("wb")
        self._limit = limit
        self._sha256 = hashlib.sha256()
        self.size = 0
        self.too_large = False

    @property
    def sha256(self) -> str:
        """Return the digest of what was written."""
        return "sha256:" + self._sha256.hexdigest()

    def write(self, data: bytes) -> None:
        """Append; blocks."""
        self.too_large |= self.size + len(data) > self._limit
        if not self.too_large:
            self._file.write(data)
            self._sha256.update(data)
            self.size += len(data)

    def close(self) -> None:
        """Close it. Raises OSError."""
        self._file.close()


def _digest_of(directory: Path, weights: _File) -> str:
    return revision_digest((directory / CONFIG_FILE).read_bytes(), weights.sha256)


def _digest_on_disk(directory: Path) -> str:
    """Compute the digest of a revision's files; blocks. Raises OSError."""
    with (directory / WEIGHTS_FILE).open("rb") as weights:
        sha256 = "sha256:" + hashlib.file_digest(weights, "sha256").hexdigest()
    return revision_digest((directory / CONFIG_FILE).read_bytes(), sha256)
