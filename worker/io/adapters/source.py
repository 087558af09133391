"""A job's adapter, or the weighted set of them, on this worker's disk: what the engine is told to load."""

from __future__ import annotations

import asyncio
import time

from artifacts.digests import weighted_digest
from broker.messages import AdapterRef
from worker.engine_api import AdapterPart, AdapterSource, Failure
from worker.io.adapters.fetch import DiskPin, FetchFailedError

# So often what may pass is tried again.
FETCH_AGAIN_S = 0.25
_MAY_PASS = frozenset({"UNAVAILABLE", "DATA_LOSS"})


async def fetch_source(hold: DiskPin, ref: AdapterRef, tenant: str, *, again_s: float = 0.0) -> AdapterSource:
    """Fetch what is not there yet, all parts of a set at once. Raises FetchFailedError.

    For `again_s` seconds not at a failure that may pass.
    """
    until = time.monotonic() + again_s
    while True:
        try:
            return await _fetch_source(hold, ref, tenant)
        except FetchFailedError as error:
            if error.failure.code not in _MAY_PASS or time.monotonic() >= until:
                raise
        await asyncio.sleep(FETCH_AGAIN_S)


async def _fetch_source(hold: DiskPin, ref: AdapterRef, tenant: str) -> AdapterSource:
    if not ref.parts:
        return AdapterSource(ref.digest, str(await hold.fetch(ref, tenant)))
    # A set's digest keys KV blocks and the slot, as a revision's does: it is checked as the bytes of one are.
    if ref.digest != weighted_digest((part.adapter.digest, part.weight) for part in ref.parts):
        raise FetchFailedError(
            Failure("INTERNAL", "WRONG_DIGEST", f"{ref.digest} is not its parts' digest", "adapters")
        )
    directories = await asyncio.gather(*(hold.fetch(part.adapter, tenant) for part in ref.parts))
    parts = [
        AdapterPart(part.adapter.digest, str(directory), part.weight)
        for part, directory in zip(ref.parts, directories, strict=True)
    ]
    # Always in the same order: sums of floats depend on it, and the digest does not.
    return AdapterSource(ref.digest, parts=tuple(sorted(parts, key=lambda part: part.digest)))
