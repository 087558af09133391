"""Retries: server calls and seconds of one call at most, and the share of a client's calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from loraplex.inference.v1 import inference_pb2

import loraplex_client as lx
from loraplex.admin.v1 import keys_pb2
from loraplex.runtime.rpc import errors
from loraplex_client import retries
from loraplex_client.calls import Call as ServerCall
from loraplex_client.retries import CALL_TRIES, RETRY_S, AddressRotation, RetryBudget, Tries
from tests.trials.chaos.links import Link

GONE = lx.UnavailableError("gone")
# The longest that a router needs for a failure, in seconds: its timeout for the store, and a client's for a dead link.
FAILURE_S = 5.0
DOCUMENTED_S = 20.0


class Clock:
    """A clock that moves when it is told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def tries_of(addresses: str, clock: Clock, budget: RetryBudget | None = None, timeout_s: float | None = None) -> Tries:
    uniform = random.Random(5).uniform
    return Tries(AddressRotation(addresses), budget or RetryBudget(clock), timeout_s, uniform=uniform, clock=clock)


def make(tries: Tries, clock: Clock, error: lx.LoraplexError, takes_s: float = 0.0) -> list[str]:
    """Make a call that always fails; returns the addresses called."""
    called = []
    while True:
        called.append(tries.begin()[0])
        clock.now_s += takes_s
        try:
            clock.now_s += tries.failed(error)
        except lx.UnavailableError:
            return called


@pytest.mark.parametrize("addresses", ["a", "ab", "abc", "abcdefgh"])
@pytest.mark.parametrize("retry_after_s", [None, 0.0, 1.0, 3.0, 60.0])
@pytest.mark.parametrize("takes_s", [0.0, 1.0, FAILURE_S])
def test_the_worst_case_of_a_call(addresses: str, retry_after_s: float | None, takes_s: float) -> None:
    clock = Clock()
    called = make(tries_of(addresses, clock), clock, lx.UnavailableError("gone", retry_after_s=retry_after_s), takes_s)
    assert len(called) <= CALL_TRIES == 4
    assert set(called) == set(addresses[: len(called)]), "an untried address goes first"
    assert clock.now_s <= 2 * FAILURE_S + RETRY_S == DOCUMENTED_S
    if retry_after_s == 60.0:
        assert len(called) == 1, "a server that asks for more than the budget is not called again"


def test_the_server_s_word_is_obeyed_with_jitter() -> None:
    pauses = set()
    for seed in range(5):
        tries = Tries(AddressRotation("ab"), RetryBudget(), None, uniform=random.Random(seed).uniform)
        tries.begin()
        pauses.add(tries.failed(lx.UnavailableError("gone", retry_after_s=1.0)))
    assert min(pauses) >= 1.0
    assert len(pauses) == 5


def test_all_tries_share_one_deadline() -> None:
    clock = Clock()
    tries = tries_of("a", clock, timeout_s=1.0)
    lefts_s: list[float] = []
    with pytest.raises(lx.UnavailableError):  # noqa: PT012  # the calls before the error count
        while True:
            lefts_s.append(tries.begin()[1] or 0.0)
            clock.now_s += min(0.3, lefts_s[-1])
            clock.now_s += tries.failed(GONE)
    assert lefts_s[0] == 1.0
    assert lefts_s == sorted(lefts_s, reverse=True)
    assert clock.now_s <= 1.0


def test_a_client_retries_a_tenth_of_its_calls_and_a_few_more() -> None:
    clock = Clock()
    budget = RetryBudget(clock)
    calls = sum(len(make(tries_of("abc", Clock(), budget), Clock(), GONE)) for _ in range(1_000))
    assert 1_000 + 100 <= calls <= 1_000 + 100 + retries.RETRIES_AT_START
    clock.now_s += 5.0  # a client that calls seldom has one retry a second
    assert 3 + 5 <= sum(len(make(tries_of("abc", Clock(), budget), Clock(), GONE)) for _ in range(3)) <= 3 + 6
    for _ in range(2_000):  # what goes well is saved up, but not for ever
        budget.earn()
    assert sum(budget.spend() for _ in range(200)) == retries.RETRIES_KEPT


Call = Callable[[lx.Client], object]


def generate(client: lx.Client) -> object:
    return client.generate("hello")


def tokenize(client: lx.Client) -> object:
    return client.tokenize("hello")


# Each way to fail, and the server calls of one call.
WAYS: dict[str, tuple[errors.CallError | grpc.StatusCode, int]] = {
    "unavailable, with a reason": (errors.Unavailable("no worker", retry_after_s=0.01, reason="NO_WORKER"), CALL_TRIES),
    "unavailable, without": (grpc.StatusCode.UNAVAILABLE, CALL_TRIES),
    "refused": (errors.Exhausted("queue", "the queue is full", retry_after_s=0.01, reason="QUEUE_FULL"), 1),
    "comes back too late": (errors.Unavailable("maintenance", retry_after_s=60.0), 1),
    "too late": (errors.DeadlinePassed("too late"), 1),
    "a fault": (errors.Internal("our fault", reason="POISON_REQUEST"), 1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", [generate, tokenize])
@pytest.mark.parametrize("count", [1, 2])
def test_the_server_calls_of_one_call(server: Any, other_server: Any, way: str, call: Call, count: int) -> None:
    failure, calls = WAYS[way]
    servers = [server, other_server][:count]
    for one in servers:
        one.service.script, one.service.unary_failure = [failure], failure
    with lx.Client([one.address for one in servers]) as client, pytest.raises(lx.LoraplexError):
        call(client)
    assert sum(len(one.service.requests) for one in servers) == calls


@pytest.mark.parametrize("status", [grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN])
@pytest.mark.parametrize("call", [generate, tokenize])
def test_a_call_that_breaks_before_its_first_message(server: Any, status: grpc.StatusCode, call: Call) -> None:
    server.service.script, server.service.unary_failure = [status], status
    with lx.Client(server.address) as client, pytest.raises(lx.LoraplexError):
        call(client)
    assert len(server.service.requests) == CALL_TRIES


async def test_a_connection_that_breaks_under_every_call(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "PAUSE_S", 0.3)  # the connection is open again before the next try
    link, loop = await Link(server.address).start(), asyncio.get_running_loop()

    def break_all() -> None:
        link.cut()
        link.heal()

    server.service.on_call = lambda: loop.call_soon_threadsafe(break_all)
    server.service.script = ["hang"]
    async with lx.AsyncClient(link.address) as client:
        with pytest.raises(lx.UnavailableError):
            await client.generate("hello")
    await link.stop()
    assert 1 <= len(server.service.requests) <= CALL_TRIES


def test_one_client_in_trouble_does_not_multiply_its_calls(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "RETRIES_PER_S", 0.0)
    server.service.script = [grpc.StatusCode.UNAVAILABLE]
    with lx.Client(server.address) as client:
        for _ in range(200):
            with pytest.raises(lx.UnavailableError):
                client.generate("hello")
    assert len(server.service.requests) <= 200 + 20 + retries.RETRIES_AT_START


@pytest.mark.parametrize("call", [generate, tokenize])
def test_calls_that_a_router_hands_back_cost_no_retries(
    server: Any, other_server: Any, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    for name in ("RETRIES_AT_START", "RETRIES_PER_S", "RETRY_SHARE"):
        monkeypatch.setattr(retries, name, 0.0)
    handed_back = errors.Unavailable("the router stops", retry_after_s=0.0, reason="ROUTER_DRAINING")
    server.service.script, server.service.unary_failure = [handed_back], handed_back
    delta = inference_pb2.Delta(token_ids=[97])
    end = inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_LENGTH)
    answer = {"delta": delta}, {"finished": end}, {"summary": inference_pb2.Summary()}
    other_server.service.script = [inference_pb2.GenerateEvent(**event) for event in answer]
    with lx.Client([server.address, other_server.address]) as client:
        for _ in range(20):
            call(client)
    assert server.service.requests
    assert len(other_server.service.requests) == 20


def test_a_deletion_is_not_repeated() -> None:
    assert ServerCall("GetAdapter", None).may_repeat
    assert not ServerCall("DeleteAdapter", None).may_repeat
    assert not ServerCall("CreateKey", keys_pb2.CreateKeyRequest(tenant="acme")).may_repeat
    assert ServerCall("CreateKey", keys_pb2.CreateKeyRequest(request_id="1", secret_sha256=b"1")).may_repeat
