"""One download of a revision from the store: written as it comes, hashed as it is written, never waited for in vain."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import grpc
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import adapters_pb2_grpc

from artifacts.revision import CONFIG_FILE, WEIGHTS_FILE, revision_digest
from broker.messages import AdapterRef
from rpc.auth import TENANT_KEY
from worker.engine_api import Failure, FailureCode, FailureReason

# What the store takes as a configuration at most.
CONFIG_BYTES = 1 << 20

_FAILURES: dict[grpc.StatusCode, tuple[FailureCode, FailureReason]] = {
    grpc.StatusCode.NOT_FOUND: ("NOT_FOUND", "ADAPTER_GONE"),
    grpc.StatusCode.DATA_LOSS: ("DATA_LOSS", "DATA_LOSS"),
    grpc.StatusCode.DEADLINE_EXCEEDED: ("UNAVAILABLE", "STORE_TIMEOUT"),
}


class FetchFailedError(Exception):
    """A revision that can't be had; `failure` is what its jobs end with."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a whole download may take, and that the store may send nothing; it sends pieces of up to 1 MiB."""

    whole_s: float
    silent_s: float


async def download(
    store: adapters_pb2_grpc.AdapterServiceAsyncStub, ref: AdapterRef, tenant: str, into: Path, patience: Patience
) -> int:
    """Write a revision's two files; their bytes together, which are its digest's. Raises FetchFailedError, OSError."""
    config, weights = _File(into / CONFIG_FILE, CONFIG_BYTES), _File(into / WEIGHTS_FILE, ref.weight_bytes)
    files = {CONFIG_FILE: config, WEIGHTS_FILE: weights}
    try:
        async with aclosing(_parts(store, ref, tenant, patience)) as parts:
            async for part in parts:
                if part.HasField("chunk") and part.chunk.name in files:
                    await asyncio.to_thread(files[part.chunk.name].write, part.chunk.data)
    except grpc.aio.AioRpcError as error:
        code, reason = _FAILURES.get(error.code(), ("UNAVAILABLE", "STORE_DOWN"))
        message = ref.revision if code in {"NOT_FOUND", "DATA_LOSS"} else f"{ref.revision}: {error.details()}"
        raise FetchFailedError(Failure(code, reason, message, "adapter")) from error
    finally:
        for file in files.values():
            file.close()
    if config.too_large or weights.too_large or await asyncio.to_thread(_digest_of, into, weights) != ref.digest:
        raise FetchFailedError(Failure("DATA_LOSS", "DATA_LOSS", ref.revision, "adapter"))
    return config.size + weights.size


async def _parts(
    store: adapters_pb2_grpc.AdapterServiceAsyncStub, ref: AdapterRef, tenant: str, patience: Patience
) -> AsyncGenerator[pb.DownloadRevisionResponse, None]:
    request = pb.DownloadRevisionRequest(name=ref.revision)
    call = store.DownloadRevision(request, timeout=patience.whole_s, metadata=((TENANT_KEY, tenant),))
    try:
        while True:
            async with asyncio.timeout(patience.silent_s):
                part = await call.read()
            if not isinstance(part, pb.DownloadRevisionResponse):  # the end
                return
            yield part
    except TimeoutError as error:
        message = f"{ref.revision}: the store sent nothing for {patience.silent_s:g} s"
        raise FetchFailedError(Failure("UNAVAILABLE", "STORE_TIMEOUT", message, "adapter")) from error
    finally:
        call.cancel()


class _File:
    """A file that is hashed as it is written; what goes beyond `limit` bytes is not."""

    def __init__(self, path: Path, limit: int) -> None:
        self._file = path.open("wb")
        self._limit = limit
        self._sha256 = hashlib.sha256()
        self.size = 0
        self.too_large = False

    @property
    def sha256(self) -> str:
        """The digest of what was written."""
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
    """The digest of the files as they are; blocks. Raises OSError."""
    with (directory / WEIGHTS_FILE).open("rb") as weights:
        sha256 = "sha256:" + hashlib.file_digest(weights, "sha256").hexdigest()
    return revision_digest((directory / CONFIG_FILE).read_bytes(), sha256)
