"""A router's copy of the API keys, which the store tells it of within a second."""

from __future__ import annotations

import asyncio

from loraplex.admin.v1 import keys_pb2 as pb

from router.catalog.store_changes import StoreChanges
from router.catalog.store_client import StoreClient
from rpc.identity.api_keys import HashedKey, HashedSecret, KeyDirectory
from rpc.identity.principal import Role

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
