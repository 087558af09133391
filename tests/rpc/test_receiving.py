"""Messages that do not end: how much of them a server takes, for how long, and from whom."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc

from loraplex.runtime.rpc import receiving
from loraplex.runtime.rpc.server import MESSAGE_BYTES, Server
from loraplex.runtime.tenancy.guard import Guard, open_guard
from loraplex.runtime.tenancy.permissions import Port
from tests.rpc.half_sent import HalfSent

CHECK = "/grpc.health.v1.Health/Check"
# Maximum bytes that a client may send of a message that nobody reads yet.
_AHEAD = 65_536


class _Service(inference_pb2_grpc.InferenceServiceServicer):
    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        return inference_pb2.TokenizeResponse()


@asynccontextmanager
async def serving(guard: Guard | None = None) -> AsyncIterator[tuple[Server, int]]:
    """A server and its port."""
    server = Server(guard)
    port = server.bind("127.0.0.1", 0)
    if guard is not None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(_Service(), server.services)  # type: ignore[abstract]  # one method is enough
    await server.start()
    try:
        yield server, port
    finally:
        await server.stop(0)


async def test_a_stranger_is_refused_before_its_message() -> None:
    method = "/loraplex.inference.v1.InferenceService/Tokenize"
    async with serving(Guard([Port.PUBLIC], [])) as (_, port), HalfSent(port, method, 4 << 20) as stranger:
        for _ in range(8):
            stranger.call()
        await stranger.until(lambda: len(stranger.answered) == 8)
        assert max(stranger.sent.values()) <= _AHEAD


async def test_half_sent_messages_of_an_address_are_received_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "RECEIVING_BYTES", 4 * MESSAGE_BYTES)
    calls, turns = 8, 2  # half of four
    async with serving() as (_, port), HalfSent(port, CHECK, 1 << 20) as stranger:
        for _ in range(calls):
            stranger.call()
        for _ in range(calls // turns):
            await stranger.until(lambda: len(stranger.whole) == turns)
            assert sum(sent > _AHEAD for sent in stranger.unanswered.values()) == turns
            answered = len(stranger.answered)
            for stream in stranger.whole:
                stranger.end(stream)
            await stranger.until(lambda answered=answered: len(stranger.answered) == answered + turns)  # type: ignore[misc]  # a default


async def test_a_message_that_never_ends_gives_its_turn_to_the_next() -> None:
    async with serving() as (server, port), HalfSent(port, CHECK, 1_000) as stranger:
        server._messages._limit_s = 0.02
        for _ in range(20):
            stranger.call()
        await stranger.until(lambda: len(stranger.answered) == 20)


async def test_strangers_have_one_share_and_take_no_turns_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "RECEIVING_BYTES", 2 * MESSAGE_BYTES)
    async with (
        serving(open_guard()) as (_, port),
        HalfSent(port, CHECK, 1 << 20, "127.0.0.2") as one,
        HalfSent(port, CHECK, 1 << 20, "127.0.0.3") as other,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        one.call()
        await one.until(lambda: len(one.whole) == 1)  # it has one of two turns
        other.call()
        tokenize = inference_pb2_grpc.InferenceServiceStub(channel).Tokenize
        assert await tokenize(inference_pb2.TokenizeRequest(), timeout=5, metadata=[("loraplex-tenant", "acme")])
        assert not other.whole
