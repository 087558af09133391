"""Copies of the store's lists: what has changed since the last look, and a router's copy of the API keys."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from loraplex.admin.v1 import keys_pb2 as pb

from router.catalog.store_client import StoreClient
from rpc.errors import CallError
from rpc.principal import Role
from tenancy.api_keys import HashedKey, HashedSecret, KeyDirectory

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


# Interval in seconds between looks at the store: with the time of an answer, how late a revoked key is refused at most.
LOOK_S = 0.5


class KeyCopy:
    """Keeps a directory of keys like the store's."""

    def __init__(self, store: StoreClient, directory: KeyDirectory) -> None:
        self._directory = directory
        self._changes = StoreChanges("API keys", store.key_changes)
        directory.follow()

    async def follow(self) -> None:
        """Look at the store again and again; never returns."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Take what has changed; where the store does not answer, leave it for the next time."""
        found = await self._changes.look()
        if found is None:
            return
        pages, anew = found
        # At once: half of the keys of another epoch would refuse the other half.
        self._directory.put([_key(key) for page in pages for key in page.keys], clear=anew)
        self._directory.look_done()


def _key(message: pb.HashedKey) -> HashedKey:
    key = message.key
    return HashedKey(
        key_id=key.key_id,
        tenant=key.tenant,
        role=Role(key.role),
        scopes=frozenset(key.scopes),
        expires_at=key.expire_time.ToNanoseconds() / 1e9 if key.HasField("expire_time") else None,
        revoked=key.HasField("revoke_time"),
        secrets=tuple(
            HashedSecret(one.sha256, one.expire_time.ToNanoseconds() / 1e9 if one.HasField("expire_time") else None)
            for one in message.secrets
        ),
    )
