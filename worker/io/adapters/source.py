"""A job's adapter, or the weighted set of adapters, on this worker's disk: what the engine loads."""

from __future__ import annotations

from artifacts.digests import weighted_digest
from broker.messages import AdapterRef
from worker.engine_api import AdapterPart, AdapterSource, Failure
from worker.io.adapters.disk_pin import DiskPin
from worker.io.adapters.download import FetchFailedError


async def fetch_source(pin: DiskPin, ref: AdapterRef, tenant: str) -> AdapterSource:
    """Fetch what is not on the disk yet, all parts of a set at once. Raises FetchFailedError."""
    if not ref.parts:
        (directory,) = await pin.fetch([ref], tenant)
        return AdapterSource(ref.digest, str(directory))
    # A set's digest is the key of KV blocks and of the slot, as a revision's is: it is checked like a revision's bytes.
    if ref.digest != weighted_digest((part.adapter.digest, part.weight) for part in ref.parts):
        raise FetchFailedError(
            Failure("INTERNAL", "WRONG_DIGEST", f"{ref.digest} is not its parts' digest", "adapters")
        )
    directories = await pin.fetch([part.adapter for part in ref.parts], tenant)
    parts = [
        AdapterPart(part.adapter.digest, str(directory), part.weight)
        for part, directory in zip(ref.parts, directories, strict=True)
    ]
    # Always in the same order: a sum of floats depends on the order, the digest does not.
    return AdapterSource(ref.digest, parts=tuple(sorted(parts, key=lambda part: part.digest)))
