"""The table of statuses over a real server: code, message and details of every error, from all kinds of methods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2 as details_pb2
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.runtime.rpc import errors
from loraplex.runtime.rpc.principal import Unauthenticated
from loraplex.runtime.rpc.server import PortInUse, Server
from loraplex.runtime.rpc.status import CODES, DETAILS_KEY, to_error, to_status
from loraplex.runtime.tenancy.guard import open_guard

CASES: list[tuple[errors.CallError, grpc.StatusCode, type[Any] | None]] = [
    (errors.InvalidField("sampling.top_p", "bad"), grpc.StatusCode.INVALID_ARGUMENT, details_pb2.BadRequest),
    (errors.NotBuilt("adapters"), grpc.StatusCode.UNIMPLEMENTED, details_pb2.BadRequest),
    (errors.PositionGone("start", "gone"), grpc.StatusCode.OUT_OF_RANGE, details_pb2.BadRequest),
    (errors.NotFound("adapter", "a"), grpc.StatusCode.NOT_FOUND, details_pb2.ResourceInfo),
    (errors.Mismatch("adapter", "m"), grpc.StatusCode.FAILED_PRECONDITION, details_pb2.PreconditionFailure),
    (errors.AlreadyExists("taken"), grpc.StatusCode.ALREADY_EXISTS, None),
    (errors.Aborted("changed"), grpc.StatusCode.ABORTED, None),
    (errors.Exhausted("queue", "f", retry_after_s=2), grpc.StatusCode.RESOURCE_EXHAUSTED, details_pb2.QuotaFailure),
    (Unauthenticated("who?"), grpc.StatusCode.UNAUTHENTICATED, None),
    (errors.PermissionDenied("no"), grpc.StatusCode.PERMISSION_DENIED, None),
    (errors.Unavailable("later"), grpc.StatusCode.UNAVAILABLE, details_pb2.RetryInfo),
    (errors.DeadlinePassed("late"), grpc.StatusCode.DEADLINE_EXCEEDED, None),
    (errors.DataLoss("adapter", "a", "rot"), grpc.StatusCode.DATA_LOSS, details_pb2.ResourceInfo),
    (errors.Internal("us"), grpc.StatusCode.INTERNAL, None),
]


class Raises(inference_pb2_grpc.InferenceServiceServicer):
    """Raises the error that the test sets, from a unary and a streaming method."""

    error: Exception = errors.Internal("unset")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        raise self.error

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse()
        raise self.error


@pytest.fixture
async def served() -> AsyncIterator[tuple[Raises, inference_pb2_grpc.InferenceServiceAsyncStub]]:
    server, raises = Server(open_guard()), Raises()  # type: ignore[abstract]  # grpc has its own methods for those left out
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(raises, server.services)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield raises, inference_pb2_grpc.InferenceServiceStub(channel)
    await server.stop(0)


async def unary(stub: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(pb.TokenizeRequest())
    return caught.value


async def streamed(stub: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(pb.GenerateRequest()):
            pass
    return caught.value


def test_every_error_of_the_tree_has_a_code() -> None:
    assert set(CODES) == set(errors.CallError.__subclasses__()) == {type(error) for error, _, _ in CASES}


def test_a_status_leaves_its_error_as_it_is() -> None:
    error = errors.NotFound("adapter", "a" * 1000)
    before = error.message
    _, status = to_status(error)
    assert len(status.message) < len(before)
    assert error.message == before


def test_a_status_s_parts_make_the_error_again() -> None:
    for error, code, _ in CASES:
        again = to_error(code.value[0], "A_REASON", "message", "field")
        assert type(again) is type(error)
        assert again.reason == ("NOT_BUILT" if isinstance(error, errors.NotBuilt) else "A_REASON")
    assert type(to_error(99, "", "message", "")) is errors.Internal


@pytest.mark.parametrize("call", [unary, streamed])
async def test_every_error_ends_the_call_with_its_status(served: Any, call: Any) -> None:
    raises, stub = served
    for error, code, detail in CASES:
        raises.error = error
        status = await call(stub)
        assert (status.code(), status.details()) == (code, error.message)
        rich = Status.FromString(dict(status.trailing_metadata())[DETAILS_KEY])
        assert (rich.code, rich.message) == (code.value[0], error.message)
        info = details_pb2.ErrorInfo()
        assert rich.details[0].Unpack(info)
        assert (info.reason, info.domain) == (error.reason, "loraplex")
        assert detail is None or any(packed.Is(detail.DESCRIPTOR) for packed in rich.details)


@pytest.mark.parametrize("call", [unary, streamed])
async def test_what_is_not_in_the_table_tells_the_caller_nothing(served: Any, call: Any) -> None:
    raises, stub = served
    raises.error = KeyError("a secret")
    status = await call(stub)
    assert status.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in status.details()


async def test_health_tells_when_the_process_serves() -> None:
    server = Server(open_guard())
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        seen: asyncio.Queue[int] = asyncio.Queue()

        async def watch() -> None:
            async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                seen.put_nowait(answer.status)

        watching = asyncio.create_task(watch())
        assert await seen.get() == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.set_serving(True)
        assert await seen.get() == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    await server.stop(0)


async def test_a_port_in_use_is_named() -> None:
    first, second = Server(open_guard()), Server(open_guard())
    port = first.bind("127.0.0.1", 0)
    with pytest.raises(PortInUse, match=str(port)):
        second.bind("127.0.0.1", port)
    await first.stop(0)
    await second.stop(0)
