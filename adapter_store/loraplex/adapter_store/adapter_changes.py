"""The names of adapters that have changed, for routers: what they know of all others is still right.

Triggers note them, whoever changes a table: a call, a revision's expiry, or another store on the same database. A
name counts for the adapters of all tenants that have it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable

# Maximum number of names that are kept; with one more, readers begin anew.
NAMES_KEPT = 10_000
# The name of the adapter that a row of a table is about. A grant, certificate or calibration changes it too.
_BY_ID = "(SELECT adapter FROM adapters WHERE id = {row}.adapter_id)"
NAME_IN = {
    **dict.fromkeys(("adapters", "grants"), "{row}.adapter"),
    **dict.fromkeys(("aliases", "calibrations", "certificates", "releases", "revisions"), _BY_ID),
}
ROWS_OF = {"INSERT": "NEW", "UPDATE": "NEW", "DELETE": "OLD"}


class AdapterChanges:
    """The changes of one store. They are numbered within an epoch: with another one, readers begin anew."""

    def __init__(self, limit: int = NAMES_KEPT) -> None:
        self._limit = limit
        self._lock = threading.RLock()
        self._noted = set[str | None]()
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Begin anew: everything may have changed."""
        with self._lock:
            self.epoch, self._latest = secrets.token_hex(8), 0
            # By name, the last one last.
            self._numbers = dict[str, int]()

    def note(self, name: str | None) -> None:
        """Note an adapter that a transaction changes; None: it is gone."""
        self._noted.add(name)

    def end_transaction(self, *, committed: bool) -> None:
        """Tell what a transaction has changed once readers can see it."""
        if committed:
            self.publish(name for name in self._noted if name is not None)
        self._noted.clear()

    def publish(self, names: Iterable[str]) -> None:
        """Tell that the adapters of these names may have changed."""
        with self._lock:
            for name in names:
                self._latest += 1
                self._numbers.pop(name, None)
                self._numbers[name] = self._latest
            if len(self._numbers) > self._limit:
                self.begin_epoch()

    def since(self, epoch: str, after: int) -> tuple[str, int, list[str]]:
        """Return the epoch, the number of the last change, and the names that were changed after one of that epoch."""
        names = list[str]()
        with self._lock:
            if epoch == self.epoch:
                for name, number in reversed(self._numbers.items()):
                    if number <= after:
                        break
                    names.append(name)
            return self.epoch, self._latest, names
