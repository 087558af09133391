"""Bounds what tenants have open at a store at once: uploads, downloads and other calls, in shares of the tenants.

An upload holds a file and some memory until its client has sent the last byte, so that clients which send one byte
each and wait would take all of either: one that does not move ends, as does a download whose client reads nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from loraplex.runtime.rpc.errors import DeadlinePassed
from loraplex.runtime.rpc.interceptors import Handler, Interceptor, end_call, within, wrapped
from loraplex.runtime.rpc.principal import NAMING_ROLES, Principal, caller
from loraplex.runtime.rpc.shares import Shares

M = TypeVar("M", bound=Message)

# Maximum number of uploads at once; a tenant alone gets half of them.
UPLOADS = 64
# Time in seconds for which a client may send nothing, or read no message of a stream; minimum bytes a second of an
# upload over a longer time.
SILENT_S = 30.0
SLOWEST_BYTES_S = 64 * 1024
# Maximum number of tenants' calls at once, and of downloads; a tenant alone gets half of them. gRPC takes the next call
# only when each of these has had its turn on the loop: so downloads are few, and send short pieces, of so many bytes.
CALLS, DOWNLOADS = 64, 8
TENANT_PIECE_BYTES = 64 * 1024
# Methods with a bound of their own: an import may take an hour, and downloads are few.
_TRANSFERS = ("/ImportRevision", "/ExportRevision")


class OpenUploads:
    """The uploads of one store."""

    def __init__(self, uploads: int = UPLOADS, silent_s: float = SILENT_S) -> None:
        self._shares = Shares(uploads)
        self._silent_s = silent_s

    @asynccontextmanager
    async def one(self, parts: AsyncIterator[M], tenant: str) -> AsyncIterator[AsyncIterator[M]]:
        """Count an upload until the end; yields its messages, which end with DeadlinePassed if its client is too slow.

        Raises Exhausted.
        """
        what = "uploads that this store receives at once"
        with self._shares.held(tenant, subject=f"tenants/{tenant}/uploads", what=what, reason="UPLOADS_FULL"):
            yield _Paced(parts, self._silent_s)


class _Paced(Generic[M]):
    """The messages of an upload. Waiting uses up a time, which bytes give back."""

    def __init__(self, parts: AsyncIterator[M], silent_s: float) -> None:
        self._parts = parts
        self._silent_s = self._left_s = silent_s

    def __aiter__(self) -> AsyncIterator[M]:
        return self

    async def __anext__(self) -> M:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._left_s):
                part = await anext(self._parts)
        except TimeoutError:
            message = f"the upload has stopped, or brings less than {SLOWEST_BYTES_S} bytes a second; send it again"
            raise DeadlinePassed(message, reason="UPLOAD_TOO_SLOW") from None
        gained_s = part.ByteSize() / SLOWEST_BYTES_S
        self._left_s = min(self._silent_s, self._left_s - (loop.time() - began) + gained_s)
        return part


# Streams whose messages are far apart, which take the place of a call instead of a download.
_WATCHES = frozenset({"/loraplex.adapters.v1.ReleaseService/WatchReleases"})


class TenantCalls(Interceptor):
    """Refuses calls beyond a tenant's share. Operators and parts of the cluster, which name the tenant, have none."""

    def __init__(self, calls: int = CALLS, downloads: int = DOWNLOADS, silent_s: float = SILENT_S) -> None:
        self._calls, self._downloads = Shares(calls), Shares(downloads)
        self._silent_s = silent_s

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Wrap the handler; without those of the health service and those with a bound of their own."""
        if handler.request_streaming or method.startswith("/grpc.") or method.endswith(_TRANSFERS):
            return handler
        if not handler.response_streaming:
            return within(handler, lambda request, context: _counted(self._calls, "calls", caller()))
        shares = (self._calls, "calls") if method in _WATCHES else (self._downloads, "downloads")
        return wrapped(handler, partial(self._many, *shares))

    def _many(self, shares: Shares, what: str, method: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
        async def bounded(request: Any, context: Any) -> AsyncIterator[Any]:
            with _counted(shares, what, caller()):
                async with aclosing(method(request, context)) as messages:
                    async for message in messages:
                        ending = self._end_later() if _counts(caller()) else None
                        try:
                            yield message
                        finally:
                            if ending is not None:
                                ending.cancel()

        return bounded

    def _end_later(self) -> asyncio.TimerHandle:
        """End the current call, unless the timer is cancelled: its client has not read a message in time."""
        task = asyncio.current_task()
        assert task is not None
        error = DeadlinePassed(f"the client has read nothing for {self._silent_s:g} s", reason="DOWNLOAD_TOO_SLOW")
        return asyncio.get_running_loop().call_later(self._silent_s, end_call, task, error)


def _counts(principal: Principal) -> bool:
    return bool(principal.tenant) and not principal.roles & NAMING_ROLES


@contextmanager
def _counted(shares: Shares, what: str, principal: Principal) -> Iterator[None]:
    """Count a tenant's call while the context is open. Raises Exhausted."""
    tenant = principal.tenant
    if not _counts(principal):
        yield
        return
    subject, served = f"tenants/{tenant}/store-{what}", f"{what} that this store serves at once"
    with shares.held(tenant, subject=subject, what=served, reason="STORE_FULL"):
        yield
