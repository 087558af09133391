"""Reads the changes of a list of the store, page by page; the store numbers them within an epoch."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from rpc.errors import CallError

log = logging.getLogger(__name__)


class Page(Protocol):
    """A page of changes: the next one is those after `latest`, if there are more."""

    epoch: str
    latest: int
    more: bool


PageT = TypeVar("PageT", bound=Page)


class StoreChanges(Generic[PageT]):
    """Reads what has changed since the last look. `ask` gets an epoch and a number, and raises CallError."""

    def __init__(self, name: str, ask: Callable[[str, int], Awaitable[PageT]]) -> None:
        self._name = name
        self._ask = ask
        self._epoch, self._latest = "", 0
        self._last_logged = ""

    async def look(self) -> tuple[list[PageT], bool] | None:
        """Return the pages of changes, and whether the list begins anew with them; None: the store does not answer.

        Nothing is returned of changes that were read in part, so that the next look begins where this one did.
        """
        pages, epoch, latest = list[PageT](), self._epoch, self._latest
        try:
            while not pages or pages[-1].more:
                page = await self._ask(epoch, latest)
                pages = [*pages, page] if page.epoch == epoch else [page]
                epoch, latest = page.epoch, page.latest
        except CallError as error:
            if error.message != self._last_logged:
                log.warning("%s: %s", self._name, error.message)
            self._last_logged = error.message
            return None
        anew = epoch != self._epoch
        self._epoch, self._latest, self._last_logged = epoch, latest, ""
        return pages, anew
