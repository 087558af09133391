"""Pages of adapters and revisions, each read and converted in a thread, in turns of the tenants.

A page may have thousands of aliases and certificates, and the catalog is read by one thread at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

from google.protobuf.message import Message

from adapter_store.catalog import Catalog
from adapter_store.pages import fill_page
from adapter_store.records import Adapter, Revision
from artifacts.names import AdapterName
from rpc.shares import FairTurns

M = TypeVar("M", bound=Message)


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
    ) -> tuple[list[M], str]:
        """Return a page of adapters, and the next page's token; see Catalog.adapters."""

        def fill() -> tuple[list[M], str]:
            # Closed in this thread, which holds the catalog's lock.
            with closing(self._catalog.adapters(tenants, after, size + 1, granted_to)) as found:
                return fill_page(found, convert, lambda adapter: (adapter.name.tenant, adapter.name.adapter), size)

        return await self._in_turn(caller, fill)

    async def revisions(
        self, caller: str, name: AdapterName, before: int, size: int, convert: Callable[[Revision], M]
    ) -> tuple[list[M], str]:
        """Return a page of revisions, and the next page's token; see Catalog.revisions. Raises NotFound."""

        def fill() -> tuple[list[M], str]:
            with closing(self._catalog.revisions(name, before, size + 1)) as found:
                return fill_page(found, convert, lambda revision: (revision.order,), size)

        return await self._in_turn(caller, fill)

    async def _in_turn(self, caller: str, fill: Callable[[], tuple[list[M], str]]) -> tuple[list[M], str]:
        return await self._turns.run(caller, lambda: asyncio.ensure_future(asyncio.to_thread(fill)))
