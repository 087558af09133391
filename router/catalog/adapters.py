"""Resolution of a request's adapter, or its weighted set of adapters, to the revision that the job carries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from artifacts.digests import weighted_digest
from broker.messages import AdapterRef, WeightedRef
from router.catalog.fitness import check_fitness
from router.catalog.manifest import Manifest
from router.catalog.store_client import ResolvedAdapter, StoreClient
from router.encode_request import EncodeRequest
from router.request import Request, WeightedAdapter
from rpc.errors import InvalidField, Mismatch


async def resolve_adapters(request: Request | EncodeRequest, model: Manifest, store: StoreClient) -> AdapterRef | None:
    """Return the job's adapter; None for the base model. Raises NotFound, InvalidField, Mismatch or Unavailable."""
    if request.adapters:
        return await _weighted_set(request.tenant, request.adapters, model, store)
    if request.adapter:
        return _checked(await store.resolve(request.tenant, request.adapter), model)
    return None


def check_rank(ref: AdapterRef | None, max_rank: int | None) -> None:
    """Raise Mismatch where no worker takes the adapter. `max_rank` is the largest rank of any worker; None: unknown."""
    if ref is not None and max_rank is not None and ref.rank > max_rank:
        rank = f"rank {ref.rank}"
        if ref.parts:
            rank = f"ranks {' + '.join(str(part.adapter.rank) for part in ref.parts)} = {ref.rank}"
        raise Mismatch(
            "adapters" if ref.parts else ref.revision,
            f"{rank}; the workers take at most {max_rank}",
            reason="RANK_TOO_BIG",
        )


async def _weighted_set(
    tenant: str, wanted: Sequence[WeightedAdapter], model: Manifest, store: StoreClient
) -> AdapterRef:
    # Wait for all answers, so that the error names the first adapter of the request that has one.
    found = await asyncio.gather(*(store.resolve(tenant, part.adapter) for part in wanted), return_exceptions=True)
    parts: dict[str, WeightedRef] = {}
    for index, (part, resolved) in enumerate(zip(wanted, found, strict=True)):
        if isinstance(resolved, InvalidField):
            raise InvalidField(f"adapters[{index}]", resolved.message) from resolved
        if isinstance(resolved, BaseException):
            raise resolved
        ref = _checked(resolved, model)
        if ref.digest in parts:
            raise InvalidField(
                f"adapters[{index}]", f"{part.adapter} is the same as one before it; give it once, with both weights"
            )
        parts[ref.digest] = WeightedRef(ref, part.weight)
    refs = tuple(parts.values())
    if len(refs) == 1 and refs[0].weight == 1:
        return refs[0].adapter
    digest = weighted_digest((part.adapter.digest, part.weight) for part in refs)
    rank = sum(part.adapter.rank for part in refs)
    return AdapterRef(digest, digest, rank, sum(part.adapter.weight_bytes for part in refs), refs)


def _checked(resolved: ResolvedAdapter, model: Manifest) -> AdapterRef:
    if resolved.base_digest != model.adapted_digest:
        raise Mismatch(resolved.ref.revision, f"made for another base model than {model.name}", reason="WRONG_BASE")
    check_fitness(resolved, model)
    return resolved.ref
