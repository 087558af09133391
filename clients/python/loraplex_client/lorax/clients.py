"""LoRAX's two clients, implemented with Loraplex's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Unpack

from loraplex_client import aio, client
from loraplex_client.lorax.ask import Ask
from loraplex_client.lorax.field_names import lorax_field_names
from loraplex_client.lorax.parameters import addresses_of, key_of, tenant_of
from loraplex_client.lorax.types import Parameters, Response, StreamResponse

TIMEOUT_S = 60


class Client:
    """LoRAX's Client: `base_url` is http://HOST:PORT of a router, or several with commas; `timeout` in seconds."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        self._client = client.Client(
            addresses_of(base_url), tenant_of(headers), timeout_s=timeout, api_key=key_of(headers)
        )

    def generate(
        self,
        prompt: str,
        adapter_id: str | None = None,
        adapter_source: str | None = None,
        **parameters: Unpack[Parameters],
    ) -> Response:
        """Return the whole answer. Raises LoraplexError."""
        ask = Ask(prompt, adapter_id, adapter_source, parameters)
        with (
            lorax_field_names(),
            self._client.generate_stream(prompt, response_format=ask.format, **ask.options) as stream,
        ):
            return ask.whole([response for piece in stream for response in ask.take(piece)])

    def generate_stream(
        self,
        prompt: str,
        adapter_id: str | None = None,
        adapter_source: str | None = None,
        **parameters: Unpack[Parameters],
    ) -> Iterator[StreamResponse]:
        """Yield the answer token by token. Raises LoraplexError."""
        ask = Ask(prompt, adapter_id, adapter_source, parameters)
        with (
            lorax_field_names(),
            self._client.generate_stream(prompt, response_format=ask.format, **ask.options) as stream,
        ):
            for piece in stream:
                yield from ask.take(piece)


class AsyncClient:
    """LoRAX's AsyncClient. As in LoRAX, nothing has to be closed, and every event loop may use it."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "address": addresses_of(base_url),
            "tenant": tenant_of(headers),
            "timeout_s": timeout,
            "api_key": key_of(headers),
        }
        self._client: tuple[asyncio.AbstractEventLoop, aio.AsyncClient] | None = None

    async def generate(
        self,
        prompt: str,
        adapter_id: str | None = None,
        adapter_source: str | None = None,
        **parameters: Unpack[Parameters],
    ) -> Response:
        """Return the whole answer. Raises LoraplexError."""
        ask = Ask(prompt, adapter_id, adapter_source, parameters)
        client = self._of_this_loop()
        with lorax_field_names():
            async with client.generate_stream(prompt, response_format=ask.format, **ask.options) as stream:
                return ask.whole([response async for piece in stream for response in ask.take(piece)])

    async def generate_stream(
        self,
        prompt: str,
        adapter_id: str | None = None,
        adapter_source: str | None = None,
        **parameters: Unpack[Parameters],
    ) -> AsyncIterator[StreamResponse]:
        """Yield the answer token by token. Raises LoraplexError."""
        ask = Ask(prompt, adapter_id, adapter_source, parameters)
        client = self._of_this_loop()
        with lorax_field_names():
            async with client.generate_stream(prompt, response_format=ask.format, **ask.options) as stream:
                async for piece in stream:
                    for response in ask.take(piece):
                        yield response

    def _of_this_loop(self) -> aio.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            self._client = (loop, aio.AsyncClient(**self._arguments))
        return self._client[1]
