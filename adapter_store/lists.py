"""Pages of adapters and revisions, each read and converted in a thread, in turns of the tenants.

A page may have thousands of aliases and certificates, and the catalog is read by one thread at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeVar

from google.protobuf.message import Message

from adapter_store.catalog import Catalog
from adapter_store.pages import fill_page
from adapter_store.records import Adapter, Revision
from artifacts.names import AdapterName
from rpc.shares import FairTurns

M = TypeVar("M", bound=Message)
R = TypeVar("R")


class Lists:
    """The lists of one store's catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._turns = FairTurns(1)

    async def adapters(
        self,
        caller: str,
        tenants: list[str],
        after: tuple[str, str],
        size: int,
        granted_to: str,
        convert: Callable[[Adapter], M],
    ) -> tuple[list[M], Adapter | None]:
        """Return a page of adapters, and the last one where more follow; see Catalog.adapters."""
        return await self._page(
            caller, lambda: self._catalog.adapters(tenants, after, size + 1, granted_to), convert, size
        )

    async def revisions(
        self, caller: str, name: AdapterName, before: int, size: int, convert: Callable[[Revision], M]
    ) -> tuple[list[M], Revision | None]:
        """Return a page of revisions, and the last one where more follow. Raises NotFound; see Catalog.revisions."""
        return await self._page(caller, lambda: self._catalog.revisions(name, before, size + 1), convert, size)

    async def _page(
        self, caller: str, read: Callable[[], Generator[R, None, None]], convert: Callable[[R], M], size: int
    ) -> tuple[list[M], R | None]:
        def fill() -> tuple[list[M], R | None]:
            with closing(read()) as records:  # it holds the catalog's lock
                return fill_page(records, convert, size)

        return await self._turns.run(caller, lambda: asyncio.ensure_future(asyncio.to_thread(fill)))
