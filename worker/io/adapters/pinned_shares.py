"""The bytes on the disk that each tenant's jobs have pinned: a running answer keeps its adapter there to its end.

A tenant with pinned revisions pins more only while it then has no more than what was left of the budget, so that the
answers of one tenant alone keep half of it (see rpc.shares).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class PinnedShares:
    """The pins of one disk, of `limit` bytes. Pins of no tenant count for nobody."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Numbers of each tenant's pins by digest, and bytes by digest.
        self._of_tenant: dict[str, Counter[str]] = {}
        self._sizes: dict[str, int] = {}

    def allow(self, tenant: str, sizes: Mapping[str, int]) -> bool:
        """Tell whether a tenant may pin revisions, given as bytes by digest; the first ones it always may."""
        own = self._of_tenant.get(tenant)
        if not own or (more := sum(size for digest, size in sizes.items() if digest not in own)) == 0:
            return True
        had, taken = sum(map(self._sizes.__getitem__, own)), sum(self._sizes.values())
        return had + more <= self._limit - taken

    def take(self, tenant: str, sizes: Mapping[str, int]) -> None:
        """Count pins of a tenant until as many `give`."""
        if tenant:
            self._of_tenant.setdefault(tenant, Counter()).update(sizes.keys())
            self._sizes.update(sizes)

    def give(self, tenant: str, digest: str) -> bool:
        """Undo a pin; return whether the tenant has none of the revision any more."""
        if not tenant:
            return False
        own = self._of_tenant[tenant]
        own[digest] -= 1
        if own[digest]:
            return False
        del own[digest]
        if not own:
            del self._of_tenant[tenant]
        if not any(digest in pins for pins in self._of_tenant.values()):
            del self._sizes[digest]
        return True
