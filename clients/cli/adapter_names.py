"""Names of the revisions on the workers' devices, which workers know by digest only."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from clients.cli.service import cluster_service
from clients.cli.terminal import CommandError

# Timeout in seconds of the call to the store, which holds up a live view.
_ASK_S = 2.0
# Intervals in seconds at which the store is asked again for unknown digests: after an answer, and after none.
_AGAIN_S, _AGAIN_AFTER_FAILURE_S = 5.0, 60.0


class AdapterNames:
    """Names digests as `tenant/adapter`, as far as the store lists them; others by their beginning.

    The store is asked as the tenant, and for digests that it then lacks as each tenant with traffic at the router: it
    lists them where nobody has credentials.
    """

    def __init__(self, store: str, tenant: str, router: str = "") -> None:
        self._store = store
        self._tenant = tenant
        self._router = router
        self._names: dict[str, str] = {}
        self._ask_at_s = 0.0

    def of(self, digests: Sequence[str]) -> list[str]:
        """Return the names of revisions, sorted."""
        if any(digest not in self._names for digest in digests) and time.monotonic() >= self._ask_at_s:
            self._ask(digests)
        return sorted(self._names.get(digest, digest[:19]) for digest in digests)

    def _ask(self, digests: Sequence[str]) -> None:
        from loraplex_client import LoraplexError

        self._ask_at_s = time.monotonic() + _AGAIN_S
        try:
            self._list(self._tenant)
        except LoraplexError:
            self._ask_at_s = time.monotonic() + _AGAIN_AFTER_FAILURE_S
            return
        for tenant in self._others():
            if all(digest in self._names for digest in digests):
                break
            with suppress(LoraplexError):
                self._list(tenant)

    def _list(self, as_tenant: str) -> None:
        """Add the names of all adapters that a tenant may use. Raises LoraplexError."""
        from loraplex_client import StoreClient

        with StoreClient(self._store, as_tenant, timeout_s=_ASK_S) as client:
            for adapter in client.list():
                _, tenant, _, name = adapter.name.split("/")
                for alias, digest in sorted(adapter.aliases.items(), key=lambda item: item[0] == "live"):
                    self._names[digest] = f"{tenant}/{name}" + ("" if alias == "live" else f"@{alias}")

    def _others(self) -> Iterator[str]:
        """Yield the tenants whose adapters the router has answered with."""
        from loraplex.cluster.v1 import cluster_pb2

        if self._router:
            with suppress(CommandError):
                service = cluster_service(self._router, self._tenant, _ASK_S)
                traffic = service.ask("GetTraffic", cluster_pb2.GetTrafficRequest())
                yield from sorted({row.tenant for row in traffic.adapters} - {self._tenant})
