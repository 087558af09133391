"""Clients that send or read nothing: each call ends, for its server and on the wire, and no other call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from rpc.errors import Internal, Unauthenticated
from rpc.identity.guard import open_guard
from rpc.identity.running_calls import end_call
from rpc.server import Server
from tests.rpc.raw_http2 import DATA, HEADERS, RESET, UnreadingClient

SERVICE = "/loraplex.inference.v1.InferenceService/"
# Timeout in seconds for the clients of these tests to send or read a message.
STALL_S = 0.3


class Answers(inference_pb2_grpc.InferenceServiceServicer):
    """Notes the tasks of its calls; a call of Generate goes on for ever, fails, or is ended as its prompt says."""

    def __init__(self) -> None:
        self.calls: dict[str, asyncio.Task[Any]] = {}
        self.left = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        task = self.calls[request.spec.prompt] = asyncio.current_task()  # type: ignore[assignment]  # a task runs
        assert task is not None
        try:
            if request.spec.prompt == "revoked":
                asyncio.get_running_loop().call_soon(end_call, task, Unauthenticated("revoked"))
            yield pb.GenerateResponse()
            if request.spec.prompt == "fails":
                raise Internal("as planned")
            while request.spec.prompt != "one":
                yield pb.GenerateResponse()
        finally:
            self.left.set()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self.calls["unary"] = asyncio.current_task()  # type: ignore[assignment]  # a task runs
        return pb.TokenizeResponse(token_ids=range(10))


@pytest.fixture
async def served() -> AsyncIterator[tuple[Answers, Server, int]]:
    server, answers = Server(open_guard(), stall_s=STALL_S), Answers()  # type: ignore[abstract]  # grpc has its own methods for those left out
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(answers, server.grpc)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        # The first call of a server, and its last one, stay with the loop that accepts calls.
        await inference_pb2_grpc.InferenceServiceStub(channel).Tokenize(pb.TokenizeRequest())
    yield answers, server, port
    async with asyncio.timeout(3):
        await server.stop(2)


@pytest.mark.parametrize("prompt", ["goes on", "one", "fails", "revoked"])
async def test_a_stream_of_which_nothing_is_read_is_cut(served: tuple[Answers, Server, int], prompt: str) -> None:
    answers, _, port = served
    async with asyncio.timeout(10), UnreadingClient(port) as client:
        request = pb.GenerateRequest(spec=pb.GenerateSpec(prompt=prompt)).SerializeToString()
        client.call(1, SERVICE + "Generate", request)
        await client.frames(1, HEADERS)
        client.call(3, SERVICE + "Nothing")
        assert await client.frames(1, RESET) == [HEADERS, HEADERS, RESET]  # CANCELLED, and no message
        await answers.left.wait()
        await asyncio.wait([answers.calls[prompt]])


async def test_an_answer_that_is_not_read_is_given_up(served: tuple[Answers, Server, int]) -> None:
    answers, _, port = served
    async with asyncio.timeout(10), UnreadingClient(port) as client:
        client.call(1, SERVICE + "Tokenize")
        await client.frames(1, HEADERS)
        client.call(3, SERVICE + "Nothing")
        assert await client.frames(1, RESET) == [HEADERS, HEADERS, RESET]  # CANCELLED, and no message
        await asyncio.wait([answers.calls["unary"]])


async def test_a_call_without_a_message_is_cut(served: tuple[Answers, Server, int]) -> None:
    _, _, port = served
    async with asyncio.timeout(10), UnreadingClient(port) as client:
        client.call(1, SERVICE + "Tokenize", message=None)
        client.call(3, SERVICE + "Nothing")
        assert await client.frames(1, RESET) == [HEADERS, RESET]  # CANCELLED


async def test_a_call_ends_and_a_warning_says_so_where_its_stream_cannot_be_reset(
    served: tuple[Answers, Server, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers, _, port = served
    monkeypatch.setattr("rpc.unread_messages._WAITER", "a name of another version of gRPC")
    async with asyncio.timeout(10), UnreadingClient(port) as client:
        client.call(1, SERVICE + "Generate")
        await answers.left.wait()
    assert "0 of 1 calls" in caplog.text


async def test_calls_that_are_read_go_on_beside_one_that_is_cut(served: tuple[Answers, Server, int]) -> None:
    _, _, port = served
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    async with asyncio.timeout(10), UnreadingClient(port) as client, channel:
        beside = inference_pb2_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest())
        client.call(1, SERVICE + "Generate")
        await client.frames(1, HEADERS)
        client.call(3, SERVICE + "Nothing")
        cut = asyncio.create_task(client.frames(1, RESET))
        while not cut.done():
            assert await beside.read() is not grpc.aio.EOF
        assert await beside.read() is not grpc.aio.EOF
        beside.cancel()


async def test_a_client_that_reads_in_time_gets_the_whole_answer(served: tuple[Answers, Server, int]) -> None:
    _, _, port = served
    async with asyncio.timeout(10), UnreadingClient(port) as client:
        request = pb.GenerateRequest(spec=pb.GenerateSpec(prompt="one")).SerializeToString()
        client.call(1, SERVICE + "Generate", request)
        await client.frames(1, HEADERS)
        client.read()
        async with client.arrived:
            await client.arrived.wait_for(lambda: client.kinds[1] == [HEADERS, DATA, HEADERS])
