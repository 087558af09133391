"""A drop-in for LoRAX's Python client: change the import and the address, and programs run.

    from loraplex_client.lorax import Client          # was: from lorax import Client

    client = Client("http://127.0.0.1:50051", headers={"x-loraplex-tenant": "acme"})
    print(client.generate("Dear customer,", adapter_id="support", max_new_tokens=64).generated_text)
    for response in client.generate_stream("Dear customer,", adapter_id="support"):
        if not response.token.special:
            print(response.token.text, end="")

The tenant is the header's, or `default` without one; other headers and cookies are ignored. `adapter_id` is a name in
the adapter store, whatever `adapter_source` says. A `response_format` constrains the answer, and `merged_adapters` add
up, which is the strategy `linear`. Parameters that are not served (`watermark`, `truncate`, `decoder_input_details`,
other strategies) are refused by name.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Unpack

from loraplex_client import AsyncClient as _AsyncClient
from loraplex_client import Client as _Client
from loraplex_client.errors import InvalidRequestError, NotImplementedByServerError
from loraplex_client.lorax.ask import Ask, sdk_arguments
from loraplex_client.lorax.types import (
    Details,
    FinishReason,
    MergedAdapters,
    MergeStrategy,
    Parameters,
    Response,
    ResponseFormat,
    ResponseFormatType,
    StreamDetails,
    StreamResponse,
    Token,
)

__all__ = [
    "AsyncClient",
    "Client",
    "Details",
    "FinishReason",
    "MergeStrategy",
    "MergedAdapters",
    "Response",
    "ResponseFormat",
    "ResponseFormatType",
    "StreamDetails",
    "StreamResponse",
    "Token",
]

# By the path in GenerateSpec. Other fields of its messages have their own names without the message's.
_NAMES = {
    "adapter": "adapter_id",
    "adapters": "merged_adapters",
    "json_schema": "response_format.schema",
    "output.logprobs": "return_k_alternatives",
    "prompt_options.truncate_to": "truncate",
    "stopping.ignore_eos": "ignore_eos_token",
    "stopping.max_tokens": "max_new_tokens",
    "stopping.stop": "stop_sequences",
}
_PATH = re.compile(rf"^(?:{'|'.join(map(re.escape, _NAMES))})(?![^.[])|^(?:sampling|stopping|output|prompt_options)\.")
TIMEOUT_S = 60


@contextmanager
def lorax_field_names() -> Iterator[None]:
    """Raise an error of a field of Loraplex's own messages as one of LoRAX's parameter."""
    try:
        yield
    except (InvalidRequestError, NotImplementedByServerError) as error:
        field = _PATH.sub(lambda path: _NAMES.get(path[0], ""), error.field)
        message = error.message
        if field != error.field and message.startswith(error.field):
            message = field + message[len(error.field) :]
        raise type(error)(message, reason=error.reason, field=field) from error


class Client:
    """LoRAX's Client: `base_url` is http://HOST:PORT of a router, or several with commas; `timeout` in seconds."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        self._client = _Client(**sdk_arguments(base_url, headers, timeout))

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
        self._arguments = sdk_arguments(base_url, headers, timeout)
        self._client: tuple[asyncio.AbstractEventLoop, _AsyncClient] | None = None

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

    def _of_this_loop(self) -> _AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            self._client = (loop, _AsyncClient(**self._arguments))
        return self._client[1]
