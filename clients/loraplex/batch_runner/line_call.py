"""The call of a line: what the gateway does with such a request, in this process, and what a line's end is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message

from loraplex.batch_runner.pace import LinePace
from loraplex.gateway.cluster import Cluster
from loraplex.gateway.endpoint import Answered, Gateway, GatewayMetrics, Handler, HttpCall
from loraplex.gateway.errors import HttpError, http_error, renamed
from loraplex.gateway.exchange import Exchange, encode
from loraplex.gateway.openai_api import error_of
from loraplex.gateway.openai_completions import chat_completions, completions
from loraplex.gateway.request_span import RequestSpan
from loraplex.runtime.telemetry.tracing import Spans
from loraplex_client import (
    AbortedError,
    AsyncClient,
    CancelledError,
    Generation,
    LoraplexError,
    ResourceExhaustedError,
    Tls,
    UnauthenticatedError,
    UnavailableError,
)
from loraplex_client.errors import is_broken

HANDLERS: Mapping[str, Handler] = {"/v1/chat/completions": chat_completions, "/v1/completions": completions}
# The lowest priority of a request.
LOWEST = -100
# Pause in seconds before a line is tried again where the error does not say how long to wait.
_PAUSE_S = 0.5
# Characters that JSON leaves as they are, and at which str.splitlines would cut a line.
_BREAKS = "\x85\u2028\u2029"
# Maximum bytes of a line of a file: a report to the store is a message of 4 MiB.
_RESULT_BYTES = 3 * 1024 * 1024


class BatchCluster(Cluster):
    """The cluster behind the handlers: they call for a batch's tenant, by the key that made the batch.

    A call whose router is lost raises its error at once: made again it is charged once, a resumed one twice.
    """

    def __init__(self, client: AsyncClient, tenant: str, key_id: str) -> None:
        super().__init__(client.address, "", "")
        self._caller = client.for_caller(tenant, batch_key=key_id)

    def caller(self, headers: Headers) -> AsyncClient:
        """Return a client that calls as the batch's tenant."""
        return self._caller


def make_client(routers: str, store: str, tls: Tls | None) -> AsyncClient:
    """Return the client of all batches of a runner."""
    return AsyncClient(routers, store=store, api_key="", tls=tls, resume_attempts=0)


class _LineCall(HttpCall):
    """A line's call, whose pace learns how long its answer took."""

    pace: LinePace

    def finished(self, whole: Answered) -> Answered:
        """Take a finished answer; returns it."""
        if isinstance(whole, Generation):
            self.pace.took(whole.timings.decode_s, whole.usage.completion_tokens)
        return super().finished(whole)


class LineCalls:
    """Makes the calls of a batch's lines."""

    def __init__(self, cluster: Cluster, batch: str, endpoint: str, models: Mapping[str, str], pace: LinePace) -> None:
        self._gateway, self._pace = Gateway(cluster, GatewayMetrics()), pace
        self._batch, self._endpoint, self._models = batch, endpoint, models
        self._spans = Spans()

    async def answer(self, number: int, fields: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of a line's answer. Raises HttpError, LoraplexError."""
        body = dict(fields["body"])
        model = body["model"]
        body |= {"model": self._models[model], "priority": LOWEST}
        if body.get("seed") in (None, -1):  # a line that runs again, after a kill, has the same answer
            body["seed"] = seed_of(self._batch, number)
        sent = list[Message]()

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": self._endpoint, "headers": [], "query_string": b""}
        exchange = Exchange(scope, _nothing_comes, send)
        exchange.request_id = f"{self._batch}-{number}"
        span = RequestSpan(self._spans, exchange, self._endpoint, "")
        call = _LineCall(exchange, self._gateway, encode(body), {}, self._batch, span)
        call.pace = self._pace
        try:
            await HANDLERS[self._endpoint](call)
        except HttpError as error:
            raise renamed(error, exchange.names) from None
        answered = msgspec.json.decode(b"".join(message.get("body", b"") for message in sent))
        return exchange.status, {**answered, "model": model}

    def result(self, number: int, custom_id: str, status: int, body: Mapping[str, Any]) -> str:
        """Return the line of a file for an answer; the error that stands for one that is too large."""
        response = {"status_code": status, "request_id": f"{self._batch}-{number}", "body": body}
        text = _line(self._batch, number, custom_id, response, None)
        if len(text) <= _RESULT_BYTES:
            return text.decode()
        why = f"the answer has {len(text)} bytes; at most {_RESULT_BYTES}: ask for fewer tokens or log probabilities"
        return self.error(number, custom_id, "answer_too_large", why)

    def failure(self, number: int, custom_id: str, error: HttpError | LoraplexError | TimeoutError) -> str:
        """Return the line of a file for a request that failed."""
        if isinstance(error, LoraplexError):
            error = http_error(error)
        failed = error if isinstance(error, HttpError) else HttpError(504, "deadline_exceeded", str(error))
        return self.result(number, custom_id, failed.status, error_of(failed))

    def error(self, number: int, custom_id: str, code: str, message: str) -> str:
        """Return the line of a file for a request without an answer."""
        return _line(self._batch, number, custom_id, None, {"code": code, "message": message}).decode()


def retry_after_s(error: Exception) -> float | None:
    """Return the seconds after which a failed line is tried again; None: it failed by itself."""
    if isinstance(error, ResourceExhaustedError):
        return error.retry_after_s
    if isinstance(error, UnavailableError):
        return error.retry_after_s or _PAUSE_S
    if isinstance(error, (AbortedError, CancelledError, UnauthenticatedError, TimeoutError)):
        return _PAUSE_S
    return _PAUSE_S if isinstance(error, LoraplexError) and is_broken(error) else None


def seed_of(batch: str, number: int) -> int:
    """Return the seed of a line that has none."""
    return int.from_bytes(hashlib.sha256(f"{batch}-{number}".encode()).digest()[:7], "big")


def _line(batch: str, number: int, custom_id: str, response: object, error: object) -> bytes:
    line = {"id": f"batch_req_{batch}-{number}", "custom_id": custom_id, "response": response, "error": error}
    text = encode(line)
    for character in _BREAKS:
        text = text.replace(character.encode(), f"\\u{ord(character):04x}".encode())
    return text


async def _nothing_comes() -> Message:
    raise AssertionError("the body was read before")
