"""The download of a revision from the store: written as it arrives, hashed as it is written, within timeouts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from dataclasses import dataclass
from pathlib import Path

import grpc
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import adapters_pb2_grpc

from artifacts.peft_config import CONFIG_FILE
from artifacts.revision import WEIGHTS_FILE, revision_digest
from broker.messages import AdapterRef
from rpc.principal import TENANT_KEY, WORKER_GRANT_KEY
from worker.engine_api import Failure, FailureCode, FailureReason

# Maximum bytes of an adapter's configuration file, as the store has it.
CONFIG_BYTES = 1 << 20

# Reason of a download that the store refuses because the job's grant does not hold.
GRANT_REFUSED: FailureReason = "GRANT_REFUSED"

_FAILURES: dict[grpc.StatusCode, tuple[FailureCode, FailureReason]] = {
    grpc.StatusCode.NOT_FOUND: ("NOT_FOUND", "ADAPTER_GONE"),
    grpc.StatusCode.DATA_LOSS: ("DATA_LOSS", "DATA_LOSS"),
    grpc.StatusCode.DEADLINE_EXCEEDED: ("UNAVAILABLE", "STORE_TIMEOUT"),
    grpc.StatusCode.PERMISSION_DENIED: ("UNAVAILABLE", GRANT_REFUSED),
}


class FetchFailedError(Exception):
    """A revision that can't be fetched; its jobs end with `failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class DownloadTimeouts:
    """Timeouts of a download in seconds: for all of it, and for the next piece (up to 1 MiB) from the store."""

    total_s: float
    silent_s: float


def bytes_of(ref: AdapterRef) -> int:
    """Return the most bytes that a revision's files take."""
    return ref.weight_bytes + CONFIG_BYTES


async def download(
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
    call = store.DownloadRevision(request, timeout=timeouts.total_s, metadata=metadata)
    try:
        while True:
            async with asyncio.timeout(timeouts.silent_s):
                part = await call.read()
            if not isinstance(part, pb.DownloadRevisionResponse):  # the end
                return
            yield part
    except TimeoutError as error:
        message = f"{ref.revision}: the store sent nothing for {timeouts.silent_s:g} s"
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


def digest_on_disk(directory: Path) -> str:
    """Compute the digest of a revision's files; blocks. Raises OSError."""
    with (directory / WEIGHTS_FILE).open("rb") as weights:
        sha256 = "sha256:" + hashlib.file_digest(weights, "sha256").hexdigest()
    return revision_digest((directory / CONFIG_FILE).read_bytes(), sha256)
