"""The keys of resume tokens: the first signs, all are accepted.

    given   --resume-key signs; it and --accepted-resume-keys are accepted, whatever Redis has
    shared  kept in Redis, made by the first router. Each router looks every LOOK_S, and puts its keys back where Redis
            has lost them. A key that an operator puts in front signs from the next look on; the older ones stay
    derived  with credentials, and no key given: from the job keys, since who reads Redis must not forge tokens

A token of an unknown key makes a router look at once, because another router may sign with a newer key already.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

from broker.connection import REDIS_DOWN
from broker.resume_keys import StoredResumeKeys

log = logging.getLogger(__name__)

# Minimum length of a key in characters.
KEY_CHARACTERS = 16
# Interval in seconds between looks at the keys in Redis, and the shortest between looks for unknown tokens.
LOOK_S = 1.0
UNKNOWN_LOOK_S = 0.02
# Time in seconds for which other routers may still store their keys, after a new key was seen or Redis was away.
SETTLE_S = 3.0
# Maximum number of keys that a router accepts beside the given ones.
_KEYS_LIMIT = 16


@lru_cache(maxsize=64)
def key_name(key: str) -> str:
    """Return what tokens call the key that has signed them; it says nothing of the key."""
    return hmac.digest(key.encode(), b"name of a resume key", "sha256").hex()[:16]


class GivenKeys:
    """Keys from the settings; without any, a random one of this process's own."""

    def __init__(self, key: str = "", accepted: Sequence[str] = ()) -> None:
        self._given = [key or secrets.token_hex(32), *accepted]

    @property
    def keys(self) -> Sequence[str]:
        """Return the keys whose tokens are accepted; the first one signs."""
        return self._given

    @property
    def settled(self) -> bool:
        """Return whether a token of another key is forged for certain."""
        return True

    async def look(self) -> None:
        """Do nothing: there are no other keys."""

    async def follow(self) -> None:
        """Do nothing: the keys do not change."""


class DerivedKeys(GivenKeys):
    """Keys that routers derive from what they share with workers, and not with Redis."""

    def __init__(self, derived: Callable[[], Sequence[str]], accepted: Sequence[str] = ()) -> None:
        super().__init__()
        self._derived, self._accepted = derived, accepted

    @property
    def keys(self) -> Sequence[str]:
        """Return the derived keys and the given ones; the first one signs."""
        return [*self._derived(), *self._accepted]


class SharedKeys(GivenKeys):
    """Keys that all routers of a Redis share. Call `look` once before the first token is signed."""

    def __init__(
        self,
        stored: StoredResumeKeys,
        accepted: Sequence[str] = (),
        *,
        look_s: float = LOOK_S,
        settle_s: float = SETTLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("", accepted)
        self._stored = stored
        self._look_s = look_s
        self._settle_s = settle_s
        self._clock = clock
        # All shared keys that tokens were accepted of, newest first.
        self._used: list[str] = []
        self._looked_at = self._settled_at = clock()
        self._looking: asyncio.Task[None] | None = None
        # True after a failed look.
        self._away = False

    @property
    def keys(self) -> Sequence[str]:
        """Return the shared keys, then the accepted ones."""
        return [*self._used, *self._given[1:]]

    @property
    def settled(self) -> bool:
        """Return whether all routers have had the time to store their keys."""
        return self._clock() >= self._settled_at

    async def follow(self) -> None:
        """Look every LOOK_S; never returns."""
        while True:
            await asyncio.sleep(self._look_s)
            await self.look()

    async def look(self) -> None:
        """Take over the keys in Redis; calls at the same time share a look."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
            self._looking.add_done_callback(self._looked)
        await asyncio.shield(self._looking)

    def _looked(self, _: asyncio.Task[None]) -> None:
        self._looking = None

    async def _look(self) -> None:
        await asyncio.sleep(self._looked_at + UNKNOWN_LOOK_S - self._clock() if self._used else 0.0)
        self._looked_at = self._clock()
        made = self._given[0]
        try:
            stored = [key for key in await self._stored.merge(made, self._used) if len(key) >= KEY_CHARACTERS]
            self._away = False
        except REDIS_DOWN as error:
            if not self._away:
                log.warning("the resume keys cannot be read: %s", type(error).__name__)
            stored, self._away = [], True
        if not stored or stored[0] not in self._used:  # new, or new since Redis lost the others
            self._settled_at = self._clock() + self._settle_s
        # Without Redis the router's own key signs; it is stored behind the others later.
        known = stored or self._used or [made]
        self._used = [*known, *(key for key in self._used if key not in known)][:_KEYS_LIMIT]
