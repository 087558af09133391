"""The weighted sets of adapters that jobs have used here, since neither the store nor the engine knows their parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from broker.messages import AdapterRef

# Maximum number of sets that are remembered: more than slots and host memory have.
SETS_LIMIT = 4_096


class WeightedSets:
    """The sets of the last jobs: their parts, and the tenant that used them last."""

    def __init__(self, limit: int = SETS_LIMIT) -> None:
        self._limit = limit
        self._used: OrderedDict[str, tuple[str, frozenset[str]]] = OrderedDict()

    def note(self, adapter: AdapterRef, tenant: str) -> None:
        """Note the use of an adapter, if it is a set."""
        if adapter.parts:
            self._used[adapter.digest] = tenant, frozenset(part.adapter.digest for part in adapter.parts)
            self._used.move_to_end(adapter.digest)
            if len(self._used) > self._limit:
                self._used.popitem(last=False)

    @property
    def parts(self) -> set[str]:
        """Return the digests of the revisions in the sets."""
        return {digest for _, digests in self._used.values() for digest in digests}

    def kept(self, tenant: str, gone: Container[str]) -> set[str]:
        """Return the sets that stay where a tenant and revisions go: others' whose parts are all there."""
        return {
            digest
            for digest, (user, parts) in self._used.items()
            if user != tenant and not any(part in gone for part in parts)
        }
