"""Bytes that are no message, sent to every kind of method of a real server: one clean status, after the credential."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from loraplex.adapters.v1 import adapters_pb2 as store_pb
from loraplex.adapters.v1 import adapters_pb2_grpc as store_grpc
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.router.api.service import OpenCalls
from loraplex.runtime.rpc.principal import TENANT_KEY, calling_tenant
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.tenancy.guard import open_guard

INFERENCE, STORE = "/loraplex.inference.v1.InferenceService/", "/loraplex.adapters.v1.AdapterService/"
# A string of invalid UTF-8, a field cut short, a group that never ends, a length of 2^63, a bad wire type.
BROKEN = [b"\x0a\x02\xff\xfe", b"\x0a\x7f", b"\x0b", b"\x0a" + b"\xff" * 9 + b"\x01", b"\x0f\x01"]


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Answers whatever it can read."""

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse()


class Store(store_grpc.AdapterServiceServicer):
    """Reads a stream of messages."""

    async def UploadRevision(self, request_iterator: Any, context: Any) -> store_pb.UploadRevisionResponse:
        calling_tenant()
        async for _ in request_iterator:
            pass
        return store_pb.UploadRevisionResponse()


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    open_calls = OpenCalls(100, 1 << 28, lambda method, tenant, error: None)
    server = Server(open_guard(), interceptors=[open_calls])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Inference(), server.services)  # type: ignore[abstract]  # grpc has its own methods for those left out
    store_grpc.add_AdapterServiceServicer_to_server(Store(), server.services)  # type: ignore[abstract]  # as above
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def code_of(channel: Any, method: str, data: bytes, tenant: str = "acme") -> grpc.StatusCode:
    """Send bytes as the one message of a call; return its status."""
    metadata = ((TENANT_KEY, tenant),) if tenant else ()
    try:
        if method.endswith("Generate"):
            async for _ in channel.unary_stream(method)(data, metadata=metadata):
                pass
        elif method.endswith("UploadRevision"):
            await channel.stream_unary(method)(iter([b"", data]), metadata=metadata)
        else:
            await channel.unary_unary(method)(data, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code() if "\n" not in (error.details() or "") else grpc.StatusCode.UNKNOWN
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", [f"{INFERENCE}Tokenize", f"{INFERENCE}Generate", f"{STORE}UploadRevision"])
async def test_broken_bytes_are_a_bad_argument_and_no_traceback(
    channel: grpc.aio.Channel, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for data in BROKEN:
            assert await code_of(channel, method, data) is grpc.StatusCode.INVALID_ARGUMENT, data
    assert not caplog.records
    assert await code_of(channel, method, b"") is grpc.StatusCode.OK


async def test_the_credential_is_read_first(channel: grpc.aio.Channel) -> None:
    for method in (f"{INFERENCE}Tokenize", f"{STORE}UploadRevision"):
        assert await code_of(channel, method, BROKEN[0], tenant="") is grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(channel, method, BROKEN[0], tenant="Not A Tenant") is grpc.StatusCode.UNAUTHENTICATED


async def test_random_bytes_end_as_an_answer_or_a_bad_argument(channel: grpc.aio.Channel) -> None:
    seed = 16
    rng = random.Random(seed)
    wanted = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    for size in range(100):
        data = rng.randbytes(size)
        assert await code_of(channel, f"{INFERENCE}Tokenize", data) in wanted, (seed, size)
