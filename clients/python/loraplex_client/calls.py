"""Calls without a transport: generators that yield calls and are sent the answers, shared by sync and async clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

R = TypeVar("R")


class UploadRequests(Iterator[Any]):
    """The requests of a client stream, made while they are sent. Keeps their error, which gRPC does not report."""

    def __init__(self, requests: Iterator[Any]) -> None:
        self._requests = requests
        self.failure: Exception | None = None

    def __next__(self) -> Any:
        """Return the next request."""
        try:
            return next(self._requests)
        except StopIteration:
            raise
        except Exception as error:
            self.failure = error
            raise


class AsyncUploadRequests(AsyncIterator[Any]):
    """The requests of a client stream that are awaited; as UploadRequests."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests
        self.failure: Exception | None = None

    async def __anext__(self) -> Any:
        """Return the next request."""
        try:
            return await anext(self._requests)
        except StopAsyncIteration:
            raise
        except Exception as error:
            self.failure = error
            raise


_UPLOADS = (UploadRequests, AsyncUploadRequests)


@dataclass(frozen=True)
class Call:
    """An RPC. `request` is a message or UploadRequests; `take` is called with each message of a streamed answer.

    `hear` is called with the trailing metadata of the answer of a method without a stream.

    Without `timeout_s` the connection's own timeout counts. A call `once` is not repeated. The answer to Generate is
    the whole generation.
    """

    method: str
    request: Any
    take: Callable[[Any], None] | None = None
    timeout_s: float | None = None
    once: bool = False
    hear: Callable[[Any], None] | None = None

    @property
    def failure(self) -> Exception | None:
        """Return the error that our side raised while sending the request, if any."""
        return self.request.failure if isinstance(self.request, _UPLOADS) else None

    @property
    def may_repeat(self) -> bool:
        """Return whether the call can be repeated: not after an upload was sent or a stream's message delivered.

        A deletion is not repeated either: if the first was carried out, the second would end with NotFoundError. Nor is
        a method that makes a secret, unless the caller has drawn it and the server knows the request again.
        """
        once = self.once or self.method.startswith(("Delete", "Create", "Rotate"))
        once &= not getattr(self.request, "secret_sha256", b"")
        return not isinstance(self.request, _UPLOADS) and self.take is None and not once


Script: TypeAlias = Generator[Call, Any, R]


def pages(method: str, request: Any, items: Callable[[Any], Iterable[Any]]) -> Script[list[Any]]:
    """Return the items of all pages of a list; `items` takes those of one page."""
    listed: list[Any] = []
    while True:
        page = yield Call(method, request)
        listed += items(page)
        if not page.next_page_token:
            return listed
        request.page_token = page.next_page_token
