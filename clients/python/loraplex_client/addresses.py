"""Several addresses of a service, called in turn; addresses that have failed lately come last."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence

from loraplex_client.errors import InvalidRequestError

# Seconds after a failure during which an address is called only if the others have failed too.
SHUN_S = 2.0


def read_addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses in `a:1,b:2`, or in a sequence. Raises InvalidRequestError."""
    listed = given.split(",") if isinstance(given, str) else given
    addresses = tuple(dict.fromkeys(address.strip() for address in listed))
    if not addresses or not all(addresses):
        raise InvalidRequestError(
            f"address: {given!r} is not HOST:PORT, or several with commas between them", field="address"
        )
    return addresses


class Rotation:
    """The order in which addresses are called. Threads may share it."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)
        self._lock = threading.Lock()
        self._turn = 0
        self._shunned_until: dict[str, float] = {}

    def pick(self, tried: Collection[str] = ()) -> str:
        """Return the next address, preferably one that has not been tried and has not failed lately."""
        with self._lock:
            now = time.monotonic()
            turns = self.addresses[self._turn :] + self.addresses[: self._turn]
            chosen = min(turns, key=lambda address: (address in tried, self._shunned_until.get(address, 0.0) > now))
            self._turn = (self.addresses.index(chosen) + 1) % len(self.addresses)
            return chosen

    def failed(self, address: str) -> None:
        """Record that a call failed at the address."""
        with self._lock:
            self._shunned_until[address] = time.monotonic() + SHUN_S

    def answered(self, address: str) -> None:
        """Record that the service answered at the address."""
        if address in self._shunned_until:
            with self._lock:
                self._shunned_until.pop(address, None)
