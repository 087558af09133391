"""Imports of adapters from sources, and exports to registries: long calls that tell how far they have come.

An import is an upload whose bytes the store fetches itself. One thread fetches; nothing is visible before the checks
that every upload passes. What a broken or cancelled import has fetched stays for a while, so that the same call goes on
where it ended; a store that stops or is killed has nothing of it left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.adapter_store.plans import StoreQuotas
from loraplex.adapter_store.receive import Receiver
from loraplex.adapter_store.records import NewRevision, Provenance, Revision
from loraplex.adapter_store.storage import BlobReader, CorruptBlob, DataDirectory, Upload
from loraplex.contracts.artifacts.checkpoint import ADAPTER_HEADER_BYTES
from loraplex.contracts.artifacts.names import AdapterName
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import TENSOR_PREFIX, WEIGHTS_FILE
from loraplex.runtime.json_object import parse_bounded
from loraplex.runtime.rpc.errors import Aborted, DataLoss, DeadlinePassed, InvalidField, Unavailable
from loraplex.runtime.rpc.principal import caller
from loraplex.runtime.rpc.shares import Shares
from loraplex.transfers.fetch import Cancelled, Fetched, Progress, fetch
from loraplex.transfers.policy import Rule, Sources, SourceUri, parse_uri
from loraplex.transfers.sources import Interrupted, down

log = logging.getLogger(__name__)

# Maximum number of imports and exports at once; a tenant alone gets half of them.
TRANSFERS = 8
# Interval in seconds between two tells of the progress.
_TELL_S = 0.5
# Time in seconds for which the bytes of an ended import stay, and the maximum number of such imports, of all tenants
# and of one.
RESUME_S, _KEPT, _KEPT_OF_TENANT = 600.0, 8, 2
Files = Mapping[str, BlobReader]


@dataclass(frozen=True, slots=True)
class _Key:
    adapter: AdapterName
    uri: str


class Transfers:
    """The imports and exports of one store, by its file of sources. Raises SourcesError.

    It lives on the event loop; the threads are its own.
    """

    def __init__(
        self,
        data: DataDirectory,
        receiver: Receiver,
        quotas: StoreQuotas,
        sources: Path | None,
        *,
        max_adapter_bytes: int,
        timeout_s: float,
    ) -> None:
        self._data = data
        self._receiver = receiver
        self._quotas = quotas
        self._sources = Sources(sources)
        self._max_adapter_bytes = max_adapter_bytes
        self._timeout_s = timeout_s
        self._shares = Shares(TRANSFERS)
        self._threads = ThreadPoolExecutor(TRANSFERS, thread_name_prefix="transfer")
        self._running: dict[_Key, Progress] = {}
        self._kept: dict[_Key, tuple[Fetched, asyncio.TimerHandle]] = {}
        self._closed = False

    async def close(self) -> None:
        """End the threads, and remove what was fetched of imports that did not end."""
        self._closed = True
        for progress in self._running.values():
            progress.cancel()
        await asyncio.to_thread(self._threads.shutdown)
        for key in list(self._kept):
            self._forget(key)

    async def imported(
        self, request: pb.ImportRevisionRequest, tenant: str
    ) -> AsyncGenerator[pb.TransferProgress | tuple[NewRevision, Upload], None]:
        """Yield the progress of an import, and last the revision with its files, which are then to be kept.

        Raises errors of the call.
        """
        uri = parse_uri(request.source)
        rule = await asyncio.to_thread(self._sources.rule, uri, tenant)
        with self._quotas.uploading(tenant, caller().key_id), self._share(tenant):
            header = await self._receiver.header(request, tenant)
            key, progress = _Key(header.name, str(uri)), Progress()
            into = self._begin(key, progress)
            working = asyncio.get_running_loop().run_in_executor(
                self._threads, fetch, uri, rule, into, self._max_adapter_bytes, progress
            )
            try:
                async for _ in self._told(working, progress):
                    yield progress.to_pb()
                provenance = working.result()
                new = await self._receiver.check(header, into.upload, tenant, provenance)
                yield replace(new, warnings=(*progress.warnings, *new.warnings)), into.upload
            finally:
                # The thread may still write: what it has is kept or removed after its end.
                progress.cancel()
                working.add_done_callback(partial(self._ended, key, into))

    async def exported(
        self, destination: str, tenant: str, opened: Callable[[], tuple[Revision, Files]]
    ) -> AsyncGenerator[pb.TransferProgress | tuple[Revision, str], None]:
        """Push a revision, whose files `opened` opens; yields the progress, and last the revision and its pin."""
        uri = parse_uri(destination, "destination")
        if uri.scheme != "oci":
            raise InvalidField("destination", "adapters are exported to registries alone: oci://REGISTRY/REPO:TAG")
        rule = await asyncio.to_thread(self._sources.rule, uri, tenant, export=True)
        with self._share(tenant):
            progress = Progress()
            working = asyncio.get_running_loop().run_in_executor(self._threads, _push, uri, rule, opened, progress)
            try:
                async for _ in self._told(working, progress):
                    yield progress.to_pb()
                revision, pin = working.result()
            finally:
                progress.cancel()
                working.add_done_callback(lambda done: done.cancelled() or done.exception())
            yield revision, pin

    async def _told(self, working: asyncio.Future[Any], progress: Progress) -> AsyncIterator[None]:
        """Yield now and then until the work has ended. Raises DeadlinePassed after the time of a transfer."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._timeout_s
        while not working.done():
            await asyncio.wait([working], timeout=_TELL_S)
            if loop.time() > ends:
                message = f"it has taken more than {self._timeout_s:g} s; an import goes on with the same call"
                raise DeadlinePassed(message, reason="TRANSFER_TOO_SLOW")
            yield
        if isinstance(working.exception(), Cancelled):  # the store stops
            raise Unavailable("the store stops; the same call works later", reason="STORE_STOPS")

    def _share(self, tenant: str) -> AbstractContextManager[None]:
        what = "imports and exports at once"
        return self._shares.held(tenant, subject=f"tenants/{tenant}/transfers", what=what, reason="TRANSFERS_FULL")

    def _begin(self, key: _Key, progress: Progress) -> Fetched:
        """Return what an earlier import of the same has left, or an empty upload. Raises Aborted while one runs."""
        if self._closed:
            raise Unavailable("the store stops; the same call works later", reason="STORE_STOPS")
        if key in self._running:
            raise Aborted(f"another import of {key.uri} as {key.adapter} runs; wait for it", reason="IMPORT_RUNNING")
        self._running[key] = progress
        if (kept := self._kept.pop(key, None)) is None:
            return Fetched(self._data.new_upload)
        kept[1].cancel()
        return kept[0]

    def _ended(self, key: _Key, into: Fetched, working: asyncio.Future[Provenance]) -> None:
        """Keep what a broken import has fetched, or remove it."""
        del self._running[key]
        error = None if working.cancelled() else working.exception()
        if self._closed or not isinstance(error, (Cancelled, Unavailable)) or not into.upload.sizes:
            self._discard(into)
            return
        of_tenant = [other for other in self._kept if other.adapter.tenant == key.adapter.tenant]
        if len(of_tenant) >= _KEPT_OF_TENANT:
            self._forget(of_tenant[0])
        if len(self._kept) >= _KEPT:
            self._forget(next(iter(self._kept)))
        timer = asyncio.get_running_loop().call_later(RESUME_S, self._forget, key)
        self._kept[key] = into, timer

    def _forget(self, key: _Key) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            kept[1].cancel()
            self._discard(kept[0])

    def _discard(self, into: Fetched) -> None:
        if self._closed:
            into.upload.discard()
        else:  # gigabytes take a while
            asyncio.get_running_loop().run_in_executor(None, into.upload.discard)


def _push(
    uri: SourceUri, rule: Rule, opened: Callable[[], tuple[Revision, Files]], progress: Progress
) -> tuple[Revision, str]:
    """Push a revision to a registry; returns the revision and a URI with the digest of the manifest. Blocks."""
    from loraplex.transfers.oci import annotations_of, push_files

    modules = _modules(opened)
    revision, readers = opened()
    try:
        progress.total = revision.config.size + revision.weights.size
        files = {
            name: (blob.digest, blob.size, partial(_told_pieces, readers[name], progress))
            for name, blob in ((CONFIG_FILE, revision.config), (WEIGHTS_FILE, revision.weights))
        }
        return revision, push_files(uri, rule, files, annotations_of(revision, modules), progress.sockets)
    except CorruptBlob as error:
        raise DataLoss("revision", str(revision.name), str(error)) from error
    except Interrupted as error:
        raise down(f"the registry does not answer or breaks off: {error}") from error
    finally:
        progress.sockets.close()
        for reader in readers.values():
            reader.close()


def _told_pieces(reader: BlobReader, progress: Progress) -> Iterator[bytes]:
    while reader.remaining:
        progress.check()
        piece = reader.read()
        progress.received += len(piece)
        yield piece


def _modules(opened: Callable[[], tuple[Revision, Files]]) -> list[str]:
    """Return the last names of the adapted modules, such as q_proj; empty for an adapter of a hash model."""
    _, readers = opened()
    try:
        weights = readers[WEIGHTS_FILE]
        length = int.from_bytes(weights.read(8), "little")
        if length > ADAPTER_HEADER_BYTES:
            return []
        with suppress(ValueError, RecursionError, AttributeError):
            names = [
                name.removeprefix(TENSOR_PREFIX).partition(".lora_")[0] for name in parse_bounded(weights.read(length))
            ]
            return sorted({name.rpartition(".")[2] for name in names} - {"__metadata__"})
        return []
    finally:
        for reader in readers.values():
            reader.close()
