"""Names of the revisions on the workers' devices, which workers know by digest only."""

from __future__ import annotations

import time
from collections.abc import Sequence

# Timeout in seconds of the call to the store, which holds up a live view.
_ASK_S = 2.0
# Intervals in seconds at which the store is asked again for unknown digests: after an answer, and after none.
_AGAIN_S, _AGAIN_AFTER_FAILURE_S = 5.0, 60.0


class AdapterNames:
    """Names digests as `tenant/adapter`, as far as the store lists them to the tenant; others by their beginning."""

    def __init__(self, store: str, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._names: dict[str, str] = {}
        self._ask_at_s = 0.0

    def of(self, digests: Sequence[str]) -> list[str]:
        """Return the names of revisions, sorted."""
        if any(digest not in self._names for digest in digests) and time.monotonic() >= self._ask_at_s:
            self._ask()
        return sorted(self._names.get(digest, digest[:19]) for digest in digests)

    def _ask(self) -> None:
        from loraplex_client import LoraplexError, StoreClient

        self._ask_at_s = time.monotonic() + _AGAIN_S
        try:
            with StoreClient(self._store, self._tenant, timeout_s=_ASK_S) as client:
                for adapter in client.list():
                    _, tenant, _, name = adapter.name.split("/")
                    for alias, digest in sorted(adapter.aliases.items(), key=lambda item: item[0] == "live"):
                        self._names[digest] = f"{tenant}/{name}" + ("" if alias == "live" else f"@{alias}")
        except LoraplexError:
            self._ask_at_s = time.monotonic() + _AGAIN_AFTER_FAILURE_S
