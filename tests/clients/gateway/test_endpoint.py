"""Endpoints without a server: limits, errors before and in a stream, clients that leave, traces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.datastructures import Headers

from loraplex.gateway.endpoint import Gateway, GatewayMetrics, HttpCall, HttpEndpoint, OpenRequests
from loraplex.gateway.errors import HttpError
from loraplex.gateway.exchange import TIMEOUT_HEADER
from loraplex.gateway.openai_api import CHAT, PROTOCOL
from loraplex.gateway.trainer_api import is_paused, resume
from loraplex.gateway.trainers import Trainers
from loraplex.runtime.rpc.shares import Shares
from loraplex.runtime.telemetry.tracing import Spans
from loraplex_client import UnavailableError
from loraplex_client.endpoint import trace_metadata

SCOPE = {"type": "http", "method": "POST", "path": "/x", "headers": []}


class Caller:
    """Stands for a cluster whose callers are what the header Authorization says, of the tenant that X-Tenant says."""

    async def counted_as(self, headers: Headers) -> str:
        return headers.get("x-tenant", headers.get("authorization", ""))

    async def identity(self, headers: Headers, *, fresh: bool = False) -> bytes:
        return headers.get("authorization", "").encode()


class Client:
    """Sends a body; leaves where a test says so."""

    def __init__(
        self,
        handler: Callable[[HttpCall], Awaitable[None]],
        running: int = 0,
        limit: int = 8,
        spans: Spans | None = None,
        body: bytes = b"{}",
    ) -> None:
        self.leaves = asyncio.Event()
        self.sent: list[Any] = []
        self.metrics = GatewayMetrics()
        cluster: Any = Caller()
        requests = OpenRequests(limit)
        self.open = ExitStack()
        for _ in range(running):
            self.open.enter_context(requests.running("Bearer loud"))
        gateway = Gateway(cluster, self.metrics, spans=spans or Spans())
        self.trainers = gateway.trainers
        operation = "" if handler in (resume, is_paused) else "chat"
        self._endpoint = HttpEndpoint("/x", PROTOCOL, {"POST": handler}, gateway, requests, operation)
        self._asked, self._body = False, body

    async def ask(self, headers: tuple[tuple[bytes, bytes], ...] = ()) -> tuple[int, str]:
        """Return the status of the answer and its body."""
        await self._endpoint({**SCOPE, "headers": headers}, self._receive, self._send)
        body = b"".join(message.get("body", b"") for message in self.sent).decode()
        return self.sent[0]["status"], body

    async def _receive(self) -> Any:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    def counted(self, status: str) -> float:
        return float(self.metrics.requests.labels("/x", status)._value.get())


async def test_errors_before_an_answer_and_in_a_stream() -> None:
    async def fails(call: HttpCall) -> None:
        if call.exchange.headers.get("x-stream"):
            await call.exchange.begin_events()
        raise UnavailableError("no worker", reason="NO_WORKER", retry_after_s=2.4)

    status, body = await (client := Client(fails)).ask()
    assert (status, json.loads(body)["error"]["code"]) == (503, "no_worker")
    assert (b"retry-after", b"2") in client.sent[0]["headers"]
    status, body = await (client := Client(fails)).ask(((b"x-stream", b"1"),))
    assert status == 200
    assert json.loads(body.removeprefix("data: "))["error"]["message"] == "no worker"
    assert client.counted("503") == 1


async def test_a_fault_of_our_own_is_not_shown() -> None:
    async def fails(call: HttpCall) -> None:
        raise KeyError("secret")

    status, body = await Client(fails).ask()
    assert status == 500
    assert "secret" not in body


async def test_a_full_gateway_refuses() -> None:
    async def answers(call: HttpCall) -> None:
        await call.exchange.answer({})

    loud = ((b"authorization", b"Bearer loud"),)
    assert (await Client(answers, running=3).ask(loud))[0] == 200
    client = Client(answers, running=4)
    status, body = await client.ask(loud)
    assert (status, json.loads(body)["error"]["code"]) == (503, "gateway_full")
    client = Client(answers, running=4)
    assert (await client.ask(((b"authorization", b"Bearer quiet"),)))[0] == 200
    client.open.close()
    assert not client._endpoint._open._running._of_tenant


async def test_a_caller_whose_requests_all_wait_may_resume() -> None:
    """A trainer's rollouts may be as many as its share of requests, and all of them wait for /resume."""
    loud = ((b"authorization", b"Bearer loud"),)
    client = Client(resume, running=4)
    client.trainers.pause(b"Bearer loud", "Bearer loud")
    assert (await client.ask(loud))[0] == 200
    assert not client.trainers.is_paused(b"Bearer loud")
    assert (await Client(is_paused, running=4).ask(loud)) == (200, '{"is_paused":false}')


async def test_calls_that_a_pause_holds_leave_room_to_other_keys_of_their_tenant() -> None:
    async def answers(call: HttpCall) -> None:
        await call.exchange.answer({})

    clients = [Client(answers) for _ in range(6)]
    first, endpoint = clients[0], clients[0]._endpoint
    trainer, other = (((b"x-tenant", b"acme"), (b"authorization", key)) for key in (b"trainer", b"other"))
    first.trainers.pause(b"trainer", "acme")
    for client in clients:
        client._endpoint = endpoint
    held = [asyncio.create_task(client.ask(trainer)) for client in clients[:4]]
    while endpoint._open.bytes._taken < 4 * len(b"{}"):  # noqa: ASYNC110  # they wait for /resume
        await asyncio.sleep(0)
    status, body = await clients[4].ask(trainer)
    assert (status, json.loads(body)["error"]["message"]) == (
        503,
        "the gateway holds as many calls of paused keys as it may; call /resume",
    )
    assert (await clients[5].ask(other))[0] == 200
    first.trainers.resume(b"trainer")
    assert [status for status, _ in await asyncio.gather(*held)] == [200] * 4
    assert not endpoint._open._running._of_tenant
    assert not endpoint._open.bytes._of_tenant


async def test_a_paused_call_ends_with_its_deadline() -> None:
    async def answers(call: HttpCall) -> None:
        await call.exchange.answer({})

    client = Client(answers)
    client.trainers.pause(b"Bearer loud", "Bearer loud")
    limits = ((b"authorization", b"Bearer loud"), (TIMEOUT_HEADER.encode(), b"1"))
    status, body = await client.ask(limits)
    assert (status, json.loads(body)["error"]["code"]) == (504, "deadline_exceeded")
    client.trainers.resume(b"Bearer loud")
    assert not client.trainers._shares._of_tenant


async def test_one_tenants_pauses_leave_room_for_others() -> None:
    trainers = Trainers()
    for number in range(512):
        trainers.pause(b"key %d" % number, "loud")
    with pytest.raises(HttpError, match="as many paused callers"):
        trainers.pause(b"key 512", "loud")
    trainers.pause(b"key 511", "loud, by another name")
    trainers.pause(b"key", "quiet")
    trainers.pause(b"key", "quiet")
    assert trainers.is_paused(b"key")
    for number in range(512):
        trainers.resume(b"key %d" % number)
    trainers.resume(b"key")
    assert not trainers._shares._of_tenant


def test_a_name_that_another_key_of_the_tenant_loads_is_the_new_one() -> None:
    trainers = Trainers()
    trainers.remember("tenant acme", "policy", "sha256:1")
    trainers.remember("tenant acme", "policy", "sha256:2")
    trainers.remember("", "policy", "sha256:3")
    assert trainers.exact("tenant acme", "policy") == "policy@sha256:2"
    assert trainers.exact("tenant globex", "policy") == trainers.exact("", "policy") == "policy"


async def test_the_bodies_of_a_caller_have_half_of_what_all_may_have() -> None:
    async def answers(call: HttpCall) -> None:
        assert shares._of_tenant["quiet"] == len(call.body)
        await call.exchange.answer({})

    shares = Shares(6)
    assert shares.take("loud", 3)
    for caller, expected in (("loud", 503), ("quiet", 200)):
        client = Client(answers)
        client._endpoint._open.bytes = shares
        assert (await client.ask(((b"authorization", caller.encode()),)))[0] == expected
        assert shares._of_tenant == {"loud": 3}


async def test_a_body_that_does_not_come_has_a_place_of_its_caller() -> None:
    async def answers(call: HttpCall) -> None:
        pytest.fail("there is no body")

    async def receive() -> Any:
        assert client._endpoint._open._running._of_tenant == {"Bearer slow": 1}
        return {"type": "http.disconnect"}

    client = Client(answers)
    client._receive = receive  # type: ignore[method-assign]
    assert (await client.ask(((b"authorization", b"Bearer slow"),)))[0] == 499


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "soon", "9" * 30, ""])
async def test_a_deadline_that_is_none(text: str) -> None:
    async def answers(call: HttpCall) -> None:
        await call.exchange.answer({})

    status, body = await Client(answers).ask(((b"x-request-timeout-ms", text.encode()),))
    assert (status, json.loads(body)["error"]["param"]) == (400, "x-request-timeout-ms")


async def test_a_client_that_leaves_cancels_the_handler() -> None:
    ended = asyncio.Event()

    async def waits(call: HttpCall) -> None:
        client.leaves.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    client = Client(waits)
    assert (await client.ask())[0] == 499
    assert ended.is_set()


async def test_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answers(call: HttpCall) -> None:
        pytest.fail("there is no body")

    async def receive() -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr("loraplex.gateway.exchange.BODY_S", 0.01)
    client = Client(answers)
    client._receive = receive  # type: ignore[method-assign]
    status, body = await client.ask()
    assert (status, json.loads(body)["error"]["code"]) == (408, "body_too_slow")
    assert (b"connection", b"close") in client.sent[0]["headers"]


async def test_a_stream_that_waits_has_comments_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.gateway.exchange.COMMENT_S", 0.001)

    async def waits(call: HttpCall) -> None:
        await call.exchange.begin_events()
        while len(client.sent) < 3:  # noqa: ASYNC110  # comments come by the clock alone
            await asyncio.sleep(0)
        await call.exchange.end(b"data: x\n\n")

    status, body = await (client := Client(waits)).ask()
    assert status == 200
    assert body.startswith(": waiting\n\n: waiting\n\n")
    assert body.endswith("data: x\n\n")
    sent = len(client.sent)
    await asyncio.sleep(0.005)
    assert len(client.sent) == sent


async def test_a_trace_goes_on() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent_metadata: list[Any] = []

    async def looks(call: HttpCall) -> None:
        sent_metadata.append(trace_metadata())
        await call.exchange.answer({})

    await Client(looks).ask(((b"traceparent", parent.encode()), (b"baggage", b"a=" + b"x" * 9_000)))
    await Client(looks).ask(((b"traceparent", b"nonsense"),))
    assert sent_metadata == [(("traceparent", parent),), ()]


async def refuses(call: HttpCall) -> None:
    await call.read(CHAT)
    raise HttpError(400, "bad_words", "no")


async def fails(call: HttpCall) -> None:
    await call.read(CHAT)
    raise UnavailableError("gone", reason="NO_WORKER")


async def breaks_off(call: HttpCall) -> None:
    await call.begin(b"data: x\n\n")
    raise UnavailableError("gone", reason="NO_WORKER")


@pytest.mark.parametrize(
    ("handler", "status", "error", "is_error"),
    [(refuses, 400, "bad_words", False), (fails, 503, "no_worker", True), (breaks_off, 200, "no_worker", True)],
)
async def test_a_span_says_what_was_asked_and_why_it_failed(
    handler: Callable[[HttpCall], Awaitable[None]], status: int, error: str, is_error: bool
) -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    body = b'{"model": "a", "messages": [{"role": "user", "content": "a secret"}], "max_completion_tokens": 7}'
    client = Client(handler, spans=Spans(provider.get_tracer("test")), body=body)
    await client.ask(((b"host", b"llm.example.com:8443"),))
    (span,) = memory.get_finished_spans()
    assert (span.name, span.kind.name, span.parent) == ("POST /x", "SERVER", None)
    assert (span.status.status_code.name == "ERROR") is is_error
    asked = {"gen_ai.request.model": "a", "gen_ai.request.max_tokens": 7} if handler is not breaks_off else {}
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "loraplex",
        "http.request.method": "POST",
        "http.route": "/x",
        "url.path": "/x",
        "url.scheme": "http",
        "server.address": "llm.example.com",
        "server.port": 8443,
        "http.response.status_code": status,
        "error.type": error,
        **asked,
    }
