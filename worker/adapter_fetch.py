"""Adapter revisions from the store to this worker's disk, verified, by digest; one flight per digest.

A directory appears under its digest only after its bytes were verified: what the engine loads is what was checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import shutil
import tempfile
import time
from pathlib import Path

import grpc
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import adapters_pb2_grpc

from artifacts.errors import ArtifactError
from artifacts.revision import CONFIG_FILE, WEIGHTS_FILE, revision_digest
from broker.messages import AdapterRef
from rpc.auth import TENANT_KEY
from rpc.server import CHANNEL_OPTIONS
from worker.scheduling.contract import Failure

log = logging.getLogger(__name__)

# A whole download; the chunks of a store that trickles must not hold a job for ever.
FETCH_S = 60.0
PARTIAL = "partial-"

_FAILURES = {
    grpc.StatusCode.NOT_FOUND: ("NOT_FOUND", "ADAPTER_GONE"),
    grpc.StatusCode.DATA_LOSS: ("DATA_LOSS", "DATA_LOSS"),
}


class FetchFailedError(Exception):
    """A revision that can't be had; `failure` is what its jobs end with."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class AdapterFetcher:
    """Fetches revisions into `cache_dir`, or a temporary directory that goes with `close`."""

    def __init__(self, store_address: str, cache_dir: str) -> None:
        self._temporary = None if cache_dir else tempfile.TemporaryDirectory(prefix="loraplex-adapters-")
        self._directory = Path(self._temporary.name if self._temporary else cache_dir)
        self._directory.mkdir(parents=True, exist_ok=True)
        for partial in self._directory.glob(f"{PARTIAL}*"):
            if time.time() - partial.stat().st_mtime > 2 * FETCH_S:  # of a worker that was killed
                shutil.rmtree(partial, ignore_errors=True)
        self._channel = grpc.aio.insecure_channel(store_address, options=CHANNEL_OPTIONS)
        self.store = adapters_pb2_grpc.AdapterServiceStub(self._channel)
        self._flights: dict[str, asyncio.Task[Path]] = {}

    async def fetch(self, ref: AdapterRef, tenant: str) -> Path:
        """The directory of a verified revision. Raises FetchFailedError."""
        target = self._directory / ref.digest.replace(":", "-")
        if _is_whole(target):
            return target
        # By its name, not its digest alone: who may read it is decided by the name.
        flight = self._flights.get(ref.revision)
        if flight is None:
            flight = self._flights[ref.revision] = asyncio.create_task(self._download(ref, tenant, target))
            flight.add_done_callback(lambda done: self._landed(ref.revision, done))
        # Several jobs share the flight; one that is cancelled must not end it for the others.
        return await asyncio.shield(flight)

    def _landed(self, revision: str, flight: asyncio.Task[Path]) -> None:
        del self._flights[revision]
        if not flight.cancelled() and (error := flight.exception()):
            log.warning("%s: %s", revision, error)

    async def _download(self, ref: AdapterRef, tenant: str, target: Path) -> Path:
        partial = self._directory / f"{PARTIAL}{secrets.token_hex(8)}"
        try:
            await asyncio.to_thread(partial.mkdir)
            await self._receive(ref, tenant, partial)
            digest = await asyncio.to_thread(_digest_of, partial)
            if digest != ref.digest:
                raise FetchFailedError(
                    Failure("DATA_LOSS", "DATA_LOSS", f"the store's bytes of {ref.revision} are not its digest")
                )
            await asyncio.to_thread(_move, partial, target)
        except grpc.aio.AioRpcError as error:
            code, reason = _FAILURES.get(error.code(), ("UNAVAILABLE", "STORE_DOWN"))
            message = ref.revision if code == "NOT_FOUND" else f"{ref.revision}: {error.details()}"
            raise FetchFailedError(Failure(code, reason, message, "adapter")) from error
        except (OSError, ArtifactError) as error:
            raise FetchFailedError(Failure("UNAVAILABLE", "FETCH_FAILED", f"{ref.revision}: {error}")) from error
        finally:
            await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
        return target

    async def _receive(self, ref: AdapterRef, tenant: str, into: Path) -> None:
        request = pb.DownloadRevisionRequest(name=ref.revision)
        parts = self.store.DownloadRevision(request, timeout=FETCH_S, metadata=((TENANT_KEY, tenant),))
        with (into / CONFIG_FILE).open("wb") as config, (into / WEIGHTS_FILE).open("wb") as weights:
            files = {CONFIG_FILE: config, WEIGHTS_FILE: weights}
            async for part in parts:
                if part.HasField("chunk") and part.chunk.name in files:
                    await asyncio.to_thread(files[part.chunk.name].write, part.chunk.data)

    async def close(self) -> None:
        """End what is under way, and remove what is temporary."""
        for flight in tuple(self._flights.values()):
            flight.cancel()
        await asyncio.gather(*self._flights.values(), return_exceptions=True)
        await self._channel.close()
        if self._temporary is not None:
            self._temporary.cleanup()


def _is_whole(directory: Path) -> bool:
    return all((directory / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE))


def _move(partial: Path, target: Path) -> None:
    if target.is_dir() and not _is_whole(target):  # somebody tidied up
        shutil.rmtree(target)
    try:
        partial.rename(target)
    except OSError:
        if not _is_whole(target):  # else another flight of the same bytes was faster
            raise


def _digest_of(directory: Path) -> str:
    with (directory / WEIGHTS_FILE).open("rb") as weights:
        sha256 = "sha256:" + hashlib.file_digest(weights, "sha256").hexdigest()
    return revision_digest((directory / CONFIG_FILE).read_bytes(), sha256)
