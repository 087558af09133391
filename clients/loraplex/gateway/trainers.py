"""Hold the state that trainers set at this gateway: paused callers, and names that were just loaded.

A pause belongs to the holder of credentials, an API key's or a subject, and without credentials to a tenant: nobody
holds up another's calls. A name is the tenant's. A second gateway does not know them: calls there do not wait, and a
name that was loaded again means its former revision for a second.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loraplex.gateway.errors import HttpError, full
from loraplex.runtime.rpc.shares import Shares

# Time in seconds after which a pause ends by itself: its trainer may have died.
PAUSE_S = 600.0
# Maximum number of callers that have paused; a tenant gets a share of them.
_PAUSED = 1_024
# Time in seconds for which a loaded name is sent with its digest: routers learn within one what it means, and what
# another gateway has loaded is not seen before.
_LOADED_S = 1.5
# Maximum number of loaded names that are remembered.
_LOADED = 10_000


class Trainers:
    """Pauses and loaded names, by the callers' hashes."""

    def __init__(self) -> None:
        self._paused: dict[bytes, tuple[asyncio.Event, asyncio.TimerHandle, str]] = {}
        self._shares = Shares(_PAUSED)
        self._running: Counter[bytes] = Counter()
        self._idle: dict[bytes, asyncio.Event] = {}
        # The digest that a tenant's name means, and until when it is certain.
        self._loaded: dict[tuple[str, str], tuple[str, float]] = {}

    def pause(self, caller: bytes, tenant: str) -> None:
        """Let the caller's new sampling calls wait until it resumes, or PAUSE_S have passed. Raises HttpError."""
        resumed = asyncio.Event()
        if (paused := self._paused.get(caller)) is not None:
            resumed, timer, tenant = paused  # the share is that of the name at its beginning
            timer.cancel()
        elif not self._shares.take(tenant):
            raise full("has as many paused callers as it may")
        timer = asyncio.get_running_loop().call_later(PAUSE_S, self.resume, caller)
        self._paused[caller] = resumed, timer, tenant

    def resume(self, caller: bytes) -> None:
        """Let the caller's calls go on; one that has not paused may resume, too."""
        if (paused := self._paused.pop(caller, None)) is not None:
            resumed, timer, tenant = paused
            timer.cancel()
            self._shares.give(tenant)
            resumed.set()

    def is_paused(self, caller: bytes) -> bool:
        """Return whether the caller's new sampling calls wait."""
        return caller in self._paused

    @asynccontextmanager
    async def sampling(self, caller: bytes, timeout_s: float | None) -> AsyncIterator[None]:
        """Begin a sampling call, once its caller has not paused; it runs while the context is open.

        Raises HttpError where the caller has paused for longer than the call's time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (paused := self._paused.get(caller)) is not None:
                    await paused[0].wait()
        except TimeoutError:
            raise HttpError(504, "deadline_exceeded", "the key's calls are paused; call /resume") from None
        self._running[caller] += 1
        try:
            yield
        finally:
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]
                if (idle := self._idle.pop(caller, None)) is not None:
                    idle.set()

    async def wait_idle(self, caller: bytes) -> None:
        """Wait until no sampling call of the caller runs."""
        while self._running[caller]:
            await self._idle.setdefault(caller, asyncio.Event()).wait()

    def remember(self, tenant: str, name: str, digest: str) -> None:
        """Remember what a name means that was loaded now; an empty digest forgets it, and nobody's is not known."""
        self._loaded.pop((tenant, name), None)
        if digest and tenant:
            self._loaded[tenant, name] = digest, time.monotonic() + _LOADED_S
        while len(self._loaded) > _LOADED or (self._loaded and next(iter(self._loaded.values()))[1] < time.monotonic()):
            del self._loaded[next(iter(self._loaded))]

    def exact(self, tenant: str, name: str) -> str:
        """Return a name with the digest of the revision that was just loaded, or as it is."""
        digest, until = self._loaded.get((tenant, name), ("", 0.0))
        return f"{name}@{digest}" if time.monotonic() < until else name
