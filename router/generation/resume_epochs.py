"""Ends of resume tokens before their time: with the adapter's deletion, and with the end of the stream's API key.

An adapter's epoch is the time of its making: one that is made again under the name has another.
"""

from __future__ import annotations

import asyncio
import logging

from broker.messages import AdapterRef
from router.catalog.store_client import StoreClient
from rpc.errors import CallError, InvalidField, NotFound, Unavailable
from rpc.identity.api_keys import KeyDirectory

log = logging.getLogger(__name__)

# Timeout in seconds for asking the store whether an adapter is still there. Without an answer the request goes on: the
# store's outage must not end answers that have begun.
CHECK_S = 0.5


class ResumeEpochs:
    """Checks that what a token stands for has not ended. `keys` are those that the router admits callers with."""

    def __init__(self, store: StoreClient, keys: KeyDirectory, check_s: float = CHECK_S) -> None:
        self._store = store
        self._keys = keys
        self._check_s = check_s

    def of(self, adapter: AdapterRef | None) -> tuple[int, ...]:
        """Return the epochs of an adapter that this router has resolved, or of those of a set."""
        return () if adapter is None else tuple(self._store.epoch_of(part.revision) for part in adapter.summands)

    async def check(self, api_key: str, adapter: AdapterRef | None, epochs: tuple[int, ...], tenant: str) -> None:
        """Raise InvalidField where the API key or an adapter has ended, Unavailable where keys are not known."""
        if api_key and not self._keys.is_valid(api_key):
            raise _ended("the API key that it was given with")
        if adapter is None:
            return
        parts = adapter.summands
        known = epochs if len(epochs) == len(parts) else (0,) * len(parts)
        try:
            async with asyncio.timeout(self._check_s):
                found = await asyncio.gather(*(self._epoch_now(part.revision, tenant) for part in parts))
        except NotFound:
            raise _ended("the adapter") from None
        except (TimeoutError, Unavailable):
            log.warning("a request is resumed unchecked: the adapter store does not answer")
            return
        if any(epoch not in {0, now} for epoch, now in zip(known, found, strict=True)):
            raise _ended("the adapter")

    async def _epoch_now(self, revision: str, tenant: str) -> int:
        """Return the epoch of a revision's adapter. Raises NotFound or Unavailable."""
        name, _, digest = revision.rpartition("/revisions/")
        try:
            return (await self._store.resolve(tenant, f"{name}@{digest}")).epoch
        except (NotFound, Unavailable):
            raise
        except CallError as error:
            raise Unavailable(error.message) from error


def _ended(what: str) -> InvalidField:
    return InvalidField("resume_token", f"has ended with {what}; call Generate again", reason="RESUME_TOKEN_ENDED")
