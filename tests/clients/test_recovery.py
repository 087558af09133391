"""A stream whose router is lost goes on at another, or at the same one later; and where that ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from loraplex.inference.v1 import inference_pb2

import loraplex_client as lx
from loraplex.runtime.rpc import errors
from loraplex_client.generation import Recovery
from loraplex_client.options import generate_request
from loraplex_client.retries import RESUME_PATIENCE_S, AddressRotation, RetryBudget, Tries, read_addresses

HANG = "hang"
GONE = errors.Unavailable("the router is shutting down", retry_after_s=0.0, reason="ROUTER_DRAINING")

Event = inference_pb2.GenerateEvent


def delta(offset: int, *ids: int, token: str = "", text: str = "") -> Event:
    text = text or "".join(map(chr, ids))
    return Event(resume_token=token, delta=inference_pb2.Delta(offset=offset, token_ids=ids, text=text))


END = Event(finished=inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_LENGTH))
SUMMARY = Event(summary=inference_pb2.Summary(continuations=1))


def _pieces(addresses: list[str], **options: Any) -> list[lx.Piece]:
    with lx.Client(addresses, tenant="acme", **options) as client:
        return list(client.generate_stream("hello", request_id="r"))


def _pieces_async(addresses: list[str], **options: Any) -> list[lx.Piece]:
    async def run() -> list[lx.Piece]:
        async with lx.AsyncClient(addresses, tenant="acme", **options) as client:
            return [piece async for piece in client.generate_stream("hello", request_id="r")]

    return asyncio.run(run())


PiecesBy = Callable[..., list[lx.Piece]]


@pytest.fixture(params=[_pieces, _pieces_async], ids=["sync", "async"])
def pieces(request: pytest.FixtureRequest) -> PiecesBy:
    """All pieces of a stream, with either client."""
    by: PiecesBy = request.param
    return by


def text_of(pieces: list[lx.Piece]) -> str:
    assert pieces[-1].finished is not None
    assert pieces[-1].finished.text == "".join(piece.text for piece in pieces)
    assert [piece.offset for piece in pieces] == [
        sum(len(one.token_ids) for one in pieces[:index]) for index in range(len(pieces))
    ]
    return pieces[-1].finished.text


def test_a_lost_stream_goes_on_at_the_other_router(server: Any, other_server: Any, pieces: PiecesBy) -> None:
    server.service.script = [delta(0, 97, 98, token="first"), delta(2, 99), GONE]
    # Tokens that come twice are told once.
    other_server.service.resume_script = [delta(2, 99, token="second"), delta(3, 100), GONE]
    server.service.resume_script = [delta(4, 101, token="third"), END, SUMMARY]
    assert text_of(pieces([server.address, other_server.address])) == "abcde"
    (resumed,) = other_server.service.requests
    spec = generate_request("hello", {"request_id": "r"}).spec
    received = [inference_pb2.ReceivedTokens(choice=0, token_ids=[97, 98, 99], text_bytes=3)]
    assert resumed == inference_pb2.ResumeRequest(spec=spec, resume_token="first", received=received)
    assert other_server.service.tenants == ["acme"]
    again = server.service.requests[1]
    assert again.resume_token == "second"
    assert list(again.received[0].token_ids) == [97, 98, 99, 100]


def test_choices_that_have_ended_stay_so(server: Any, pieces: PiecesBy) -> None:
    second = Event(delta=inference_pb2.Delta(choice=1, offset=0, token_ids=[120], text="x"))
    end = Event(finished=inference_pb2.Finished(choice=1, reason=inference_pb2.FINISH_REASON_END))
    server.service.script = [delta(0, 97, token="first"), second, end, GONE]
    server.service.resume_script = [end, delta(1, 98), END, SUMMARY]
    *before, last = pieces([server.address])
    whole = last.finished
    assert whole is not None
    assert [piece.ended for piece in before if piece.ended] == [whole.choices[1], whole.choices[0]], "each once"
    assert [choice.text for choice in whole.choices] == ["ab", "x"]
    assert [choice.finish_reason for choice in whole.choices] == [lx.FinishReason.LENGTH, lx.FinishReason.END]
    assert [(one.choice, one.finished) for one in server.service.requests[1].received] == [(0, False), (1, True)]


def test_a_call_that_nobody_has_begun_to_answer_is_made_elsewhere(server: Any, pieces: PiecesBy) -> None:
    server.service.script = [delta(0, 97, token="first"), END, SUMMARY]
    for addresses in (["127.0.0.1:1", server.address], [server.address, "127.0.0.1:1"]):
        assert text_of(pieces(addresses)) == "a"


def test_a_call_is_tried_again_before_the_first_message(server: Any, pieces: PiecesBy) -> None:
    refusal = errors.Unavailable("no worker", retry_after_s=0.01, reason="NO_WORKER")
    server.service.scripts = [[refusal], [refusal], [delta(0, 97, token="first"), END, SUMMARY]]
    assert text_of(pieces([server.address])) == "a"
    assert [request.spec.request_id for request in server.service.requests] == ["r"] * 3


def test_other_calls_go_to_whoever_answers(server: Any) -> None:
    for _ in range(2):
        with lx.Client(f"127.0.0.1:1, {server.address}") as client:
            assert client.tokenize("hi") == (104, 105)


@pytest.mark.parametrize("timeout_s", [None, 0.3])
def test_leaving_ends_the_wait_for_a_router(server: Any, timeout_s: float | None) -> None:
    """Between two attempts there is nothing to cancel: closing must still end the iteration, and a deadline too."""
    server.service.script = [delta(0, 97, token="first"), errors.Unavailable("gone", retry_after_s=60.0)]
    with lx.Client(server.address) as client:
        stream = client.generate_stream("hello", timeout_s=timeout_s)
        assert next(stream).text == "a"
        if timeout_s is not None:  # a pause that is longer than the time left is not made
            with pytest.raises(lx.UnavailableError):
                next(stream)
            return
        rest: list[lx.Piece] = []
        reading = threading.Thread(target=lambda: rest.extend(stream))
        reading.start()
        stream.close()
        reading.join()
        assert rest == []


async def test_closing_ends_the_wait_of_another_task(server: Any) -> None:
    server.service.script = [delta(0, 97, token="first"), errors.Unavailable("gone", retry_after_s=60.0)]
    async with lx.AsyncClient(server.address) as client:
        stream = client.generate_stream("hello")
        await anext(stream)
        waiting = asyncio.create_task(stream.result())
        await asyncio.sleep(0)
        await stream.aclose()
        with pytest.raises(lx.CancelledError):
            await waiting


def test_closing_the_client_ends_its_streams_for_good(server: Any) -> None:
    server.service.script = [delta(0, 97, token="first"), HANG]
    server.service.resume_script = [delta(1, 98), END, SUMMARY]
    with lx.Client(server.address) as client:
        stream = client.generate_stream("hello")
        next(stream)
        client.close()
        with pytest.raises(lx.CancelledError):
            next(stream)
    assert len(server.service.requests) == 1


def recovery(
    addresses: str = "a:1",
    timeout_s: float | None = None,
    attempts: int = 3,
    clock: Callable[[], float] = time.monotonic,
) -> Recovery:
    rotation = AddressRotation(read_addresses(addresses))
    tries = Tries(rotation, RetryBudget(), timeout_s, attempts, uniform=lambda least, most: most, clock=clock)
    return Recovery(generate_request("hello", {}), tries)


def test_attempts_are_bounded_and_slow_down() -> None:
    stream = recovery(attempts=6)
    stream.attempt()
    stream.take(delta(0, 97, token="first"))
    pauses = []
    error = lx.UnavailableError("gone", reason="NO_WORKER")
    for _ in range(6):
        pauses.append(stream.lost(error))
        stream.attempt()
    with pytest.raises(lx.UnavailableError) as raised:
        stream.lost(error)
    assert raised.value is error
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.0]


@pytest.mark.parametrize("timeout_s", [None, 1_000.0])
@pytest.mark.parametrize(
    "error",
    [
        lx.ResourceExhaustedError("full", reason="QUEUE_FULL", retry_after_s=1.0),
        lx.UnavailableError("no worker", reason="NO_WORKER", retry_after_s=1.0),
    ],
)
def test_a_stream_that_has_begun_waits_while_the_cluster_answers(
    error: lx.LoraplexError, timeout_s: float | None
) -> None:
    now = [1_000.0]
    stream = recovery("a:1,b:1", timeout_s, clock=lambda: now[0])
    stream.attempt()
    stream.take(delta(0, 97, token="first"))
    now[0] += 600.0  # the stream runs for long before its router dies
    lost_at, calls = now[0], 0

    def lose(error: lx.LoraplexError) -> None:
        now[0] += stream.lost(error)
        assert stream.attempt().call.method == "Resume"

    with contextlib.suppress(type(error)):
        for _ in range(1_000):
            lose(lx.CancelledError("the connection broke"))
            lose(error)
            calls += 2
    waited_s = now[0] - lost_at
    assert 40 <= calls < 1_000
    # With a deadline until that, of 1,000 s; the stream had run for 600.
    least_s, most_s = (390.0, 400.0) if timeout_s else (RESUME_PATIENCE_S, RESUME_PATIENCE_S + 10.0)
    assert least_s <= waited_s <= most_s


def test_a_request_that_routers_hand_back_waits_elsewhere_and_pays_nothing() -> None:
    now = [1_000.0]
    budget = RetryBudget(lambda: now[0])
    while budget.spend():
        pass
    tries = Tries(AddressRotation(["a:1", "b:1"]), budget, None, uniform=lambda least, most: most, clock=lambda: now[0])
    stream = Recovery(generate_request("hello", {}), tries)
    handed_back = lx.UnavailableError("stops", reason="ROUTER_DRAINING", retry_after_s=0.0)
    meanwhile = [
        *[lx.UnavailableError("connection refused")] * 9,
        lx.UnavailableError("no worker yet", reason="NO_WORKER", retry_after_s=1.0),
        lx.ResourceExhaustedError("no room yet", reason="QUEUE_FULL", retry_after_s=1.0),
    ]
    for _ in range(3):  # in a rolling restart
        assert stream.attempt().call.method == "Generate"
        now[0] += 2 * RESUME_PATIENCE_S  # in a queue
        assert stream.lost(handed_back) <= 3.0
        for error in meanwhile:
            stream.attempt()
            now[0] += stream.lost(error)
    stream.attempt()
    with pytest.raises(lx.NotFoundError):
        stream.lost(lx.NotFoundError("deleted meanwhile"))


def test_a_token_that_one_router_refuses_is_shown_to_each_other_once() -> None:
    stream = recovery("a:1,b:1,c:1")
    stream.attempt()
    stream.take(delta(0, 97, token="first"))
    assert stream.lost(lx.UnavailableError("gone")) == 0.0
    stream.attempt()
    refused = lx.InvalidRequestError("of another key", reason="RESUME_TOKEN_INVALID", field="resume_token")
    assert stream.lost(refused) == 0.0
    stream.attempt()
    with pytest.raises(lx.InvalidRequestError):
        stream.lost(refused)


def test_progress_starts_the_count_again() -> None:
    stream = recovery(attempts=1)
    for offset in range(5):
        attempt = stream.attempt()
        assert attempt.call.method == ("Resume" if offset else "Generate")
        stream.take(delta(offset, 97, token="token"))
        assert stream.lost(lx.UnavailableError("gone")) == 0.1


def test_others_are_tried_at_once_and_the_server_s_word_is_kept() -> None:
    stream = recovery("a:1,b:1,c:1", attempts=10)
    first = stream.attempt().address
    stream.take(delta(0, 97, token="first"))
    tried = [first]
    for _ in range(2):
        assert stream.lost(lx.UnavailableError("gone")) == 0.0
        tried.append(stream.attempt().address)
    assert sorted(tried) == ["a:1", "b:1", "c:1"]
    assert stream.lost(lx.UnavailableError("gone", retry_after_s=2.0)) == 2.5
    stream.attempt()
    assert stream.lost(lx.ResourceExhaustedError("full", reason="QUEUE_FULL", retry_after_s=4.0)) == 5.0


@pytest.mark.parametrize(
    "error",
    [
        lx.AbortedError("taken over", reason="TAKEN_OVER"),
        lx.InternalError("poison", reason="POISON"),
        lx.DeadlineExceededError("late"),
        lx.ResourceExhaustedError("too slow", reason="CLIENT_TOO_SLOW", retry_after_s=1.0),
        lx.NotFoundError("no such revision"),
    ],
)
def test_what_no_other_router_would_answer_otherwise_is_raised(error: lx.LoraplexError) -> None:
    stream = recovery()
    stream.attempt()
    stream.take(delta(0, 97, token="first"))
    with pytest.raises(type(error)):
        stream.lost(error)


def test_a_broken_connection_is_a_loss_whatever_it_is_called() -> None:
    for error in (lx.CancelledError("by the server"), lx.InternalError("RST_STREAM"), lx.LoraplexError("unknown")):
        stream = recovery()
        stream.attempt()
        stream.take(delta(0, 97, token="first"))
        assert stream.lost(error) == 0.1


def test_without_a_token_nothing_is_resumed() -> None:
    stream = recovery("a:1,b:1")
    stream.attempt()
    stream.take(delta(0, 97))
    with pytest.raises(lx.UnavailableError):
        stream.lost(lx.UnavailableError("gone"))


def test_an_address_that_failed_is_left_out_for_a_while() -> None:
    rotation = AddressRotation(["a", "b", "c"])
    assert [rotation.pick() for _ in range(4)] == ["a", "b", "c", "a"]
    rotation.failed("b")
    assert [rotation.pick() for _ in range(3)] == ["c", "a", "c"]
    rotation.answered("b")
    assert "b" in [rotation.pick() for _ in range(3)]
    assert rotation.pick(["a", "c"]) == "b"


@pytest.mark.parametrize("given", ["", "a:1,", ",", []])
def test_addresses_that_are_none(given: Any) -> None:
    for cls in (lx.Client, lx.AsyncClient):
        with pytest.raises(lx.InvalidRequestError) as refused:
            cls(given)
        assert refused.value.field == "address"
