"""The revisions of one job on the disk: fetched together, kept until the job ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from broker.messages import AdapterRef
from worker.engine_api import Failure
from worker.io.adapters.disk import DiskTier, NotReservedError
from worker.io.adapters.disk_budget import TooLargeError
from worker.io.adapters.download import FetchFailedError, bytes_of


class Fetcher(Protocol):
    """Gets revisions that are pinned."""

    async def get(self, ref: AdapterRef, tenant: str) -> Path:
        """Return the directory of a verified revision. Raises FetchFailedError or NotReservedError."""

    def count(self, failure: Failure) -> None:
        """Count a fetch that failed before the store was asked."""


class DiskPin:
    """The revisions of one job: none of them leaves the disk before `release`."""

    def __init__(self, fetcher: Fetcher, disk: DiskTier, wait_s: float) -> None:
        self._fetcher = fetcher
        self._disk = disk
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

    def release(self) -> None:
        """Unpin every revision."""
        while self._digests:
            self._disk.unpin(self._digests.pop(), self._tenant)

    async def _pin(self, refs: Sequence[AdapterRef], tenant: str) -> None:
        sizes = {ref.digest: bytes_of(ref) for ref in refs}
        names = ", ".join(ref.revision for ref in refs)
        try:
            async with asyncio.timeout(self._wait_s):
                await self._disk.pin(sizes, tenant)
        except TooLargeError as error:
            message = f"{names}: {error} on a worker's disk"
            raise self._failed(Failure("FAILED_PRECONDITION", "ADAPTER_TOO_LARGE", message, "adapter")) from error
        except TimeoutError as error:
            message = f"{names}: the adapters of running answers fill the worker's disk budget"
            raise self._failed(Failure("UNAVAILABLE", "DISK_FULL", message, "adapter")) from error
        self._digests += sizes
        self._tenant = tenant

    def _failed(self, failure: Failure) -> FetchFailedError:
        self._fetcher.count(failure)
        return FetchFailedError(failure)

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
