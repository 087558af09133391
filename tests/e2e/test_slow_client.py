"""A client that stops reading is dropped alone: its row is freed while it still holds its stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.contracts.options import StoppingParams
from loraplex.runtime.rpc.principal import TENANT_KEY
from loraplex.runtime.rpc.status import DETAILS_KEY
from tests.hash_oracle import expected_ids

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
MODEL = "hash:?vocab=32000&seed=1&step_ms=1"
TOKENS = 20_000
# Number of bytes that gRPC reads ahead of a slow client; log probabilities make the messages large.
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0)]


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The ErrorInfo's reason."""
    status = status_pb2.Status()
    status.ParseFromString(dict(error.trailing_metadata())[DETAILS_KEY])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return str(info.reason)


async def rest_of(call: Any) -> list[int]:
    """Return all further ids of a call. Raises the error that ends it."""
    ids: list[int] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        ids += response.event.delta.token_ids
    return ids


async def test_a_client_that_stops_reading_is_dropped_alone(
    start_cluster: StartCluster, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_ROUTER_CLIENT_STALL_S", "1.5")
    async with (
        start_cluster(MODEL, {}) as cluster,
        grpc.aio.insecure_channel(cluster.local.router, options=SMALL_WINDOW) as channel,
    ):
        spec = pb.GenerateSpec(prompt="slow", stopping=pb.Stopping(max_tokens=TOKENS), output=pb.Output(logprobs=20))
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(spec=spec), metadata=((TENANT_KEY, "acme"),))
        first = await call.read()
        assert isinstance(first, pb.GenerateResponse)
        ids = first.event.delta.token_ids
        assert list(ids) == list(expected_ids(MODEL, list(b"slow"), stopping=StoppingParams(max_tokens=len(ids))))

        async def rows(count: int) -> bool:
            running: int = sum(worker.rows_running for worker in await cluster.workers())
            return running == count

        # A client that reads, beside it and beyond its end.
        beside: list[int] = []
        more = asyncio.Event()

        async def read() -> None:
            async for piece in cluster.client.generate_stream("fast", max_tokens=TOKENS):
                assert piece.offset == len(beside)
                beside.extend(piece.token_ids)
                more.set()

        reading = asyncio.create_task(read())
        await eventually(lambda: rows(2))
        await eventually(lambda: rows(1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(caught.value) == "CLIENT_TOO_SLOW"
        more.clear()
        await more.wait()
        assert not reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert beside[:200] == list(expected_ids(MODEL, list(b"fast"), stopping=StoppingParams(max_tokens=200)))
        await eventually(cluster.idle)
