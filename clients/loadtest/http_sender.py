"""Sends requests to an HTTP server as streams of OpenAI's completions.

A chunk with text counts as one token until the last one tells their number (`stream_options`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial

import httpx2
import msgspec

from clients.loadtest.http_target import HttpTarget, error_text, headers_of, tls_of
from clients.loadtest.plan import LoadPlan
from clients.loadtest.samples import LEFT, Outcome
from clients.loadtest.sender import Call, RequestFailure, Sender
from clients.loadtest.workload import LoadRequest, Workload

# Statuses after which a later request may succeed.
_REFUSALS = (429, 503)
# Timeout in seconds of a connection.
_CONNECT_S = 5.0
_DONE = b"[DONE]"


class _Choice(msgspec.Struct):
    text: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Chunk).decode


class _FailedError(Exception):
    """An answer that is an error."""

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class HttpSender(Sender):
    """Sends a workload's requests to one HTTP server."""

    def __init__(self, target: HttpTarget, workload: Workload, pool: Sequence[int], plan: LoadPlan) -> None:
        super().__init__(workload, pool, plan)
        self._target = target
        self._headers = [{"content-type": "application/json", **headers_of(tenant.name)} for tenant in workload.tenants]
        self._http = httpx2.AsyncClient(
            base_url=target.url,
            verify=tls_of(target.url),
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def connect(self) -> None:
        """See Sender."""
        with contextlib.suppress(httpx2.HTTPError):
            await self._http.get("/v1/models", headers=self._headers[0])

    async def close(self) -> None:
        """See Sender."""
        await self._http.aclose()

    def prepare(self, request: LoadRequest) -> Call:
        """See Sender."""
        prompt: str | list[int] | None = request.prompt
        if prompt is None:
            prompt = self._workload.prompt_ids(request, self._pool)
            if self._target.words:
                prompt = " ".join(self._target.words[number] for number in prompt)
        adapter = None if request.adapter is None else self._workload.adapters[request.adapter][1]
        body = self._target.body(prompt, request.answer_tokens, adapter)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return partial(self._complete, request, msgspec.json.encode(body))

    def failure_of(self, error: Exception) -> RequestFailure | None:
        """See Sender."""
        match error:
            case _FailedError():
                return error.failure
            case TimeoutError():
                return RequestFailure("TIMEOUT", "no whole answer within the request's time")
            case httpx2.ConnectError() | httpx2.ConnectTimeout():
                return RequestFailure("UNREACHABLE", str(error) or "no connection", refused=True, unreachable=True)
            case httpx2.HTTPError() | msgspec.MsgspecError():
                return RequestFailure("BROKEN_ANSWER", f"{type(error).__name__}: {error}")
        return None

    async def _complete(self, request: LoadRequest, body: bytes, outcome: Outcome) -> None:
        async with (
            asyncio.timeout(request.deadline_s or self._timeout_s),
            self._http.stream("POST", "/v1/completions", content=body, headers=self._headers[request.tenant]) as answer,
        ):
            if answer.status_code != 200:
                raise await _refusal(answer)
            async for event in _events(answer):
                if event == _DONE:
                    return
                self._read(_decode(event), outcome)
                if request.cancel_after is not None and outcome.tokens >= request.cancel_after:
                    outcome.status = LEFT
                    return
        raise _FailedError(RequestFailure("BROKEN_ANSWER", "the stream ended without [DONE]"))

    def _read(self, chunk: _Chunk, outcome: Outcome) -> None:
        if bytes(chunk.error) not in (b"", b"null"):
            code, message = error_text(bytes(chunk.error))
            raise _FailedError(RequestFailure(f"ERROR_IN_STREAM: {code}".rstrip(": "), message))
        if any(choice.text for choice in chunk.choices):
            self._note(outcome, 1)
        if chunk.usage is not None:
            outcome.tokens = chunk.usage.completion_tokens
            outcome.prompt_tokens = chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            outcome.cached_tokens = (details.cached_tokens or 0) if details else 0


async def _refusal(answer: httpx2.Response) -> _FailedError:
    code, message = error_text(await answer.aread())
    after = answer.headers.get("retry-after", "")
    return _FailedError(
        RequestFailure(
            f"HTTP {answer.status_code}: {code}".rstrip(": "),
            message,
            refused=answer.status_code in _REFUSALS,
            retry_after_s=float(after) if after.isdecimal() else None,
        )
    )


async def _events(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield the data of each event. Every server of this protocol sends it in one line."""
    rest = b""
    async for data in answer.aiter_raw():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
