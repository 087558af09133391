"""The load test over HTTP, against a server with OpenAI's protocol and no more: no ids, no tokenizer, no ignore_eos."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from loraplex.loadtest.arrivals import Constant, Extent
from loraplex.loadtest.decoding import PlanError
from loraplex.loadtest.draws import Fixed, power_law
from loraplex.loadtest.http_sender import HttpSender, HttpTarget, check_url, find_target
from loraplex.loadtest.plan import Cancel, LoadPlan, Tenant
from loraplex.loadtest.samples import LEFT, OK, Outcome
from loraplex.loadtest.sender import RequestFailure
from loraplex.loadtest.workload import Workload

USAGE = {"prompt_tokens": 9, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}
WHOLE = [*({"choices": [{"text": text}]} for text in ("a", "", "bc")), {"choices": [], "usage": USAGE}]


class Handler(BaseHTTPRequestHandler):
    """Answers by the server's script, whatever is asked."""

    protocol_version = "HTTP/1.1"
    server: Plain

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Keep stderr quiet."""

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "own"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((dict(self.headers), body))
        if self.path == "/tokenize":
            self._answer(404, {"detail": "Not Found"})
        elif not isinstance(body["prompt"], str) or "ignore_eos" in body:
            self._answer(400, {"error": {"message": "unknown parameter", "code": "unknown_parameter"}})
        elif not body.get("stream") or not self.server.events:
            self._answer(self.server.status, self.server.whole)
        else:
            events = "".join(f"data: {event}\r\n\r\n" for event in self.server.events).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(events)))
            self.end_headers()
            self.wfile.write(events)

    def _answer(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.send_header("retry-after", "3")
        self.end_headers()
        self.wfile.write(content)


class Plain(ThreadingHTTPServer):
    """The server, on a port of its own."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.seen: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.events: list[str] = []
        self.status = 200
        self.whole: Any = {"choices": [{"text": "x"}]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plain]:
    monkeypatch.delenv("LORAPLEX_API_KEY_FILE", raising=False)
    monkeypatch.setenv("LORAPLEX_API_KEY", "k1")
    with Plain() as plain:
        threading.Thread(target=plain.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield plain
        plain.shutdown()


def plan_of(**changes: Any) -> LoadPlan:
    tenant = Tenant("acme", adapters=power_law(("support",), 1.0), prompt_tokens=Fixed(5), **changes)
    return LoadPlan("test", Constant(1.0), Extent(4), (tenant,))


async def send(server: Plain, *events: object, plan: LoadPlan | None = None) -> tuple[Outcome, RequestFailure | None]:
    """Send a request, which is answered by these events."""
    server.events = [event if isinstance(event, str) else json.dumps(event) for event in events]
    plan = plan or plan_of()
    workload = Workload(plan)
    sender = HttpSender(HttpTarget(server.url, "own", ("river", "bread"), False), workload, (0, 1), plan)
    outcome = Outcome(0, 0, 0, 0.0, 0.0)
    failure = await sender.send(sender.prepare(workload.request(0)), outcome)
    await sender.close()
    assert not math.isnan(outcome.end_s)
    return outcome, failure


def test_the_server_is_asked_what_it_takes(server: Plain) -> None:
    target, pool = find_target(plan_of(), server.url)
    assert (target.model, target.ignore_eos, len(target.words)) == ("own", False, len(pool))
    assert server.seen[-1][1]["prompt"] == target.words[0]
    server.status, server.whole = 404, {"error": {"message": "no model own", "code": "model_not_found"}}
    with pytest.raises(PlanError, match=r"answers 404: no model own"):
        find_target(plan_of(), server.url)


async def test_an_answer_is_read_as_it_comes(server: Plain) -> None:
    outcome, failure = await send(server, *WHOLE, "[DONE]")
    assert failure is None
    assert (outcome.status, outcome.messages, outcome.tokens, len(outcome.gaps_s)) == (OK, 2, 7, 1)
    assert (outcome.prompt_tokens, outcome.cached_tokens) == (9, 2)
    headers, body = server.seen[-1]
    assert (headers["x-loraplex-tenant"], headers["authorization"]) == ("acme", "Bearer k1")
    assert (body["model"], body["max_tokens"], len(body["prompt"].split())) == ("support", 64, 5)
    left, failure = await send(server, *WHOLE, "[DONE]", plan=plan_of(cancel=Cancel(1.0, Fixed(1))))
    assert (left.status, left.tokens, failure) == (LEFT, 1, None)


@pytest.mark.parametrize(
    ("events", "status", "says"),
    [
        (WHOLE, "BROKEN_ANSWER", "the stream ended without [DONE]"),
        ([{"error": {"message": "lost", "code": "internal_error"}}], "ERROR_IN_STREAM: internal_error", "lost"),
        (["{"], "BROKEN_ANSWER", "DecodeError"),
    ],
    ids=["cut", "error", "malformed"],
)
async def test_a_stream_that_fails(server: Plain, events: list[Any], status: str, says: str) -> None:
    outcome, failure = await send(server, *events)
    assert outcome.status == status
    assert says in outcome.message
    assert failure is not None
    assert not failure.refused


async def test_refusals_and_silence(server: Plain) -> None:
    server.status, server.whole = 429, {"error": {"message": "slow down", "type": "rate_limit_error"}}
    outcome, failure = await send(server)
    assert (outcome.status, outcome.message) == ("HTTP 429: rate_limit_error", "slow down")
    assert failure is not None
    assert (failure.refused, failure.retry_after_s, failure.unreachable) == (True, 3.0, False)
    server.status, server.whole = 500, ["what?"]
    assert (await send(server))[0].status == "HTTP 500"
    server.url = "http://127.0.0.1:1"
    outcome, failure = await send(server)
    assert outcome.status == "UNREACHABLE"
    assert failure is not None
    assert failure.unreachable
    with pytest.raises(PlanError, match="no server answers at"):
        find_target(plan_of(), server.url)


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "http://", "http://example.com:80"])
def test_addresses(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_API_KEY", "k1")
    with pytest.raises(PlanError, match="--url"):
        check_url(url)
    assert check_url("https://example.com/v1/") == "https://example.com"
