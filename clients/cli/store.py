"""The client of the adapter store that commands use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loraplex_client import StoreClient


@contextmanager
def store_client(address: str, tenant: str) -> Iterator[StoreClient]:
    """Open a client of the store whose failures are one-line CommandErrors."""
    from loraplex_client import StoreClient

    from clients.cli.failures import explained

    with explained("store", address), StoreClient(address, tenant) as client:
        yield client
