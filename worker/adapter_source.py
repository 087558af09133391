"""A job's adapter, or the weighted set of them, on this worker's disk: what the engine is told to load."""

from __future__ import annotations

import asyncio

from artifacts.digests import weighted_digest
from broker.messages import AdapterRef
from worker.adapter_fetch import FetchFailedError, Hold
from worker.scheduling.contract import AdapterPart, AdapterSource, Failure


async def fetch_source(hold: Hold, ref: AdapterRef, tenant: str) -> AdapterSource:
    """Fetch what is not there yet, all parts of a set at once. Raises FetchFailedError."""
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
