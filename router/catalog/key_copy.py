"""A router's copy of the API keys, which the store tells it of within a second."""

from __future__ import annotations

import asyncio
import logging

from loraplex.admin.v1 import keys_pb2 as pb

from router.catalog.store_client import StoreClient
from rpc.errors import CallError
from rpc.identity.api_keys import HashedKey, HashedSecret, KeyDirectory
from rpc.identity.principal import Role

log = logging.getLogger(__name__)

# Interval in seconds between looks at the store: with the time of an answer, how late a revoked key is refused at most.
LOOK_S = 0.5


class KeyCopy:
    """Keeps a directory of keys like the store's."""

    def __init__(self, store: StoreClient, directory: KeyDirectory) -> None:
        self._store = store
        self._directory = directory
        self._epoch, self._latest = "", 0
        self._last_logged = ""
        directory.follow()

    async def follow(self) -> None:
        """Look at the store again and again; never returns."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Take what has changed; where the store does not answer, leave it for the next time."""
        keys: list[HashedKey] = []
        epoch, latest = self._epoch, self._latest
        try:
            while True:
                answer = await self._store.key_changes(epoch, latest)
                if answer.epoch != epoch:
                    keys = []
                keys += map(_key, answer.keys)
                epoch, latest = answer.epoch, answer.latest
                if not answer.more:
                    break
        except CallError as error:
            if error.message != self._last_logged:
                log.warning("API keys: %s", error.message)
            self._last_logged = error.message
            return
        # At once: half of the keys of another epoch would refuse the other half.
        self._directory.put(keys, clear=epoch != self._epoch)
        self._epoch, self._latest = epoch, latest
        self._last_logged = ""
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
