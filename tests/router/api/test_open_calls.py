"""Open calls of a real server: bursts are refused with a reason, running streams stay, nothing is held after a call."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2 as details_pb2
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from loraplex.router.api.service import FIELDS, LARGE_BYTES, OpenCalls
from loraplex.runtime.rpc.errors import CallError, InvalidField
from loraplex.runtime.rpc.principal import TENANT_KEY
from loraplex.runtime.rpc.server import MESSAGE_BYTES, Server, channel_options
from loraplex.runtime.rpc.status import DETAILS_KEY
from loraplex.runtime.tenancy.guard import open_guard
from loraplex.runtime.tenancy.permissions import SGLANG_SERVICE

# Maximum number of calls of one connection at a time: more than any test makes, as a router has more than it serves.
STREAMS = 4_096


class Made:
    """Something large that a call has made."""


class Service(inference_pb2_grpc.InferenceServiceServicer):
    """Streams one event, and another one once `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.running: Counter[str] = Counter()
        self.left = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        tenant = dict(context.invocation_metadata())[TENANT_KEY]
        self.running[tenant] += 1
        try:
            yield pb.GenerateResponse()
            await self.go.wait()
            yield pb.GenerateResponse()
        finally:
            self.running[tenant] -= 1
            self.left.set()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        if not request.prompt:
            made = Made()
            self.made = weakref.ref(made)
            raise InvalidField("prompt", "is empty")
        return pb.TokenizeResponse(token_ids=[len(request.prompt)])


class Served:
    """A server with bounds, and what it refused."""

    def __init__(self, calls: int, message_bytes: int, receive_s: float) -> None:
        self.refused: Counter[str] = Counter()
        self.service = Service()  # type: ignore[abstract]  # grpc has its own methods for those left out
        self.server = Server(
            open_guard(),
            interceptors=[OpenCalls(calls, message_bytes, self._refuse, receive_s=receive_s)],
            options=[*channel_options(), ("grpc.max_concurrent_streams", STREAMS)],
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.service, self.server.services)
        self.channel: grpc.aio.Channel

    def _refuse(self, method: str, tenant: str, error: CallError) -> None:
        self.refused[error.reason] += 1

    @property
    def stub(self) -> Any:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    def generate(self, tenant: str, prompt: str = "") -> Any:
        return self.stub.Generate(
            pb.GenerateRequest(spec=pb.GenerateSpec(prompt=prompt)), metadata=((TENANT_KEY, tenant),)
        )

    async def begun(self, tenant: str) -> Any:
        call = self.generate(tenant)
        assert await call.read() is not grpc.aio.EOF
        return call


@asynccontextmanager
async def serving(calls: int = 100, message_bytes: int = 1 << 28, receive_s: float = 10.0) -> AsyncIterator[Served]:
    served = Served(calls, message_bytes, receive_s)
    port = served.server.bind("127.0.0.1", 0)
    await served.server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as served.channel:
        yield served
    await served.server.stop(0)


async def end_of(call: Any) -> str:
    """Read a call to its end; return its code and the reason that the server gave."""
    while True:
        try:
            if await call.read() is grpc.aio.EOF:
                code: grpc.StatusCode = await call.code()
                return str(code.name)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {reason_of(error)}"


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """Return the reason, with `later` where the client is told when to call again."""
    given = dict(error.trailing_metadata() or ()).get(DETAILS_KEY)
    if given is None:
        return "without a reason"
    info, later = details_pb2.ErrorInfo(), ""
    assert isinstance(given, bytes)
    for packed in Status.FromString(given).details:
        packed.Unpack(info)
        later = later or (" later" if packed.Is(details_pb2.RetryInfo.DESCRIPTOR) else "")
    return str(info.reason) + later


async def test_a_gateways_requests_are_bounded_and_its_health_checks_are_not() -> None:
    engine = pytest.importorskip("smg_grpc_proto", reason="pip install '.[smg]'").sglang_scheduler_pb2
    served = Served(calls=1, message_bytes=1 << 28, receive_s=10.0)

    async def healthy(request: bytes, context: Any) -> bytes:
        return request

    async def endless(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b""
        await served.service.go.wait()

    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "HealthCheck": grpc.unary_unary_rpc_method_handler(healthy),
        "Generate": grpc.unary_stream_rpc_method_handler(endless, engine.GenerateRequest.FromString),
    }
    served.server.services.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SGLANG_SERVICE, handlers),))
    port, metadata = served.server.bind("127.0.0.1", 0), ((TENANT_KEY, "acme"),)
    await served.server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        generate: Any = channel.unary_stream(f"/{SGLANG_SERVICE}/Generate")
        health: Any = channel.unary_unary(f"/{SGLANG_SERVICE}/HealthCheck")
        running = generate(b"", metadata=metadata)
        assert await running.read() == b""
        assert await end_of(generate(b"", metadata=metadata)) == "RESOURCE_EXHAUSTED ROUTER_FULL later"
        assert await health(b"alive", metadata=metadata) == b"alive"
        served.service.go.set()
        assert await end_of(running) == "OK"
    await served.server.stop(0)


async def test_every_call_of_a_burst_is_served_or_refused_with_a_reason() -> None:
    async with serving(calls=100) as served:
        running = [await served.begun("quiet") for _ in range(5)]
        burst = [asyncio.create_task(end_of(served.generate("loud"))) for _ in range(1500)]
        while sum(task.done() for task in burst) + served.service.running["loud"] < len(burst):
            await asyncio.wait([task for task in burst if not task.done()], timeout=0.05)
        assert served.service.running == {"loud": 48, "quiet": 5}  # as many as are left free, in whole calls
        assert (await served.begun("newcomer")).cancel()
        served.service.go.set()
        ends = Counter(await asyncio.gather(*burst))
        assert ends == {"OK": 48, "RESOURCE_EXHAUSTED ROUTER_FULL later": 1452}
        assert served.refused == {"ROUTER_FULL": 1452}
        assert {await end_of(call) for call in running} == {"OK"}


async def test_operators_and_health_get_through_a_full_router() -> None:
    async with serving(calls=1) as served:
        await served.begun("acme")
        assert await end_of(served.generate("acme")) == "RESOURCE_EXHAUSTED ROUTER_FULL later"
        health = health_pb2_grpc.HealthStub(served.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status


class Lists(cluster_pb2_grpc.ClusterServiceServicer):
    """Lists jobs once `go` is set."""

    def __init__(self, go: asyncio.Event) -> None:
        self.go = go

    async def ListJobs(self, request: cluster_pb2.ListJobsRequest, context: Any) -> cluster_pb2.ListJobsResponse:
        await self.go.wait()
        return cluster_pb2.ListJobsResponse()


async def test_lists_of_jobs_are_bounded_and_need_no_tenant() -> None:
    served = Served(calls=3, message_bytes=1 << 28, receive_s=10.0)
    lists = Lists(served.service.go)  # type: ignore[abstract]  # as above
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(lists, served.server.services)
    port = served.server.bind("127.0.0.1", 0)
    await served.server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = cluster_pb2_grpc.ClusterServiceStub(channel)
        loud = [stub.ListJobs(cluster_pb2.ListJobsRequest(), metadata=((TENANT_KEY, "loud"),)) for _ in range(9)]
        while not served.refused:
            await asyncio.wait([asyncio.ensure_future(call.code()) for call in loud], return_when="FIRST_COMPLETED")
        nobodys = stub.ListJobs(cluster_pb2.ListJobsRequest())
        served.service.go.set()
        await nobodys
        ends = [await call.code() for call in loud]
        assert 0 < ends.count(grpc.StatusCode.OK) < 9
        assert served.refused["ROUTER_FULL"] == ends.count(grpc.StatusCode.RESOURCE_EXHAUSTED)
    await served.server.stop(0)


async def test_a_call_that_its_client_leaves_holds_nothing() -> None:
    async with serving(calls=1) as served:
        for _ in range(3):
            call = await served.begun("acme")
            served.service.left.clear()
            call.cancel()
            await served.service.left.wait()
        metadata = ((TENANT_KEY, "acme"),)
        assert (await served.stub.Tokenize(pb.TokenizeRequest(prompt="abc"), metadata=metadata)).token_ids == [3]


async def test_the_messages_of_open_calls_are_bounded_in_bytes() -> None:
    async with serving(message_bytes=MESSAGE_BYTES) as served:
        long = served.generate("acme", "x" * (MESSAGE_BYTES // 2))
        assert await long.read() is not grpc.aio.EOF
        assert (
            await end_of(served.generate("acme", "x" * (MESSAGE_BYTES // 4))) == "RESOURCE_EXHAUSTED ROUTER_FULL later"
        )
        await served.begun("other")
        long.cancel()


async def test_a_message_that_does_not_come_ends_the_call() -> None:
    async with serving(receive_s=0.01) as served:
        method = "/loraplex.inference.v1.InferenceService/Generate"
        call: Any = served.channel.stream_stream(method)(metadata=((TENANT_KEY, "acme"),))
        assert await end_of(call) == "DEADLINE_EXCEEDED MESSAGE_LATE"
        assert served.refused == {"MESSAGE_LATE": 1}
        call = served.channel.stream_stream(method)(metadata=((TENANT_KEY, "acme"),))
        await call.done_writing()
        assert await end_of(call) == "INVALID_ARGUMENT INVALID_FIELD"


async def test_a_refused_call_keeps_nothing_until_a_garbage_collection() -> None:
    async with serving() as served:
        gc.disable()
        try:
            with pytest.raises(grpc.aio.AioRpcError, match="prompt: is empty"):
                await served.stub.Tokenize(pb.TokenizeRequest(), metadata=((TENANT_KEY, "acme"),))
            assert served.service.made() is None
        finally:
            gc.enable()


async def test_a_call_without_a_tenant_is_refused_before_its_message() -> None:
    async with serving() as served:
        call = served.stub.Generate(pb.GenerateRequest())
        assert await end_of(call) == "UNAUTHENTICATED UNAUTHENTICATED"
        assert served.refused == {"UNAUTHENTICATED": 1}


async def test_a_message_of_too_many_fields_is_refused_before_it_is_decoded() -> None:
    parts = pb.ChatMessage(role="user", parts=[pb.ContentPart()] * (FIELDS + 1))
    request = pb.GenerateRequest(spec=pb.GenerateSpec(chat=pb.Chat(messages=[parts])))
    async with serving(calls=1, message_bytes=request.ByteSize()) as served:
        call = served.stub.Generate(request, metadata=((TENANT_KEY, "acme"),))
        with pytest.raises(grpc.aio.AioRpcError, match="has more than 10000 fields") as refused:
            await call.read()
        assert (refused.value.code(), reason_of(refused.value)) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "TOO_MANY_FIELDS",
        )
        assert "chat.messages.parts" in (refused.value.details() or "")
        assert served.refused == {"TOO_MANY_FIELDS": 1}
        full = served.generate("acme", "x" * (request.ByteSize() - 100))
        assert await full.read() is not grpc.aio.EOF  # its place and its bytes are free again


async def test_a_message_without_room_is_refused_before_it_is_decoded() -> None:
    stops = pb.Stopping(stop=["x"] * (FIELDS + 1))
    request = pb.GenerateRequest(spec=pb.GenerateSpec(stopping=stops))
    async with serving(message_bytes=request.ByteSize() - 1) as served:
        call = served.stub.Generate(request, metadata=((TENANT_KEY, "acme"),))
        assert await end_of(call) == "RESOURCE_EXHAUSTED ROUTER_FULL later"


async def test_of_large_messages_the_event_loop_decodes_one_in_a_pass() -> None:
    order = list[str]()
    calls = OpenCalls(100, 1 << 30, lambda method, tenant, error: None)
    method: Any = SimpleNamespace(read=lambda data: order.append("large" if len(data) > LARGE_BYTES else "small"))

    async def others() -> None:
        while order.count("large") < 8:
            order.append("others")
            await asyncio.sleep(0)

    large = [calls._decode(method, f"t{number % 3}", b"x" * (LARGE_BYTES + 1)) for number in range(8)]
    async with asyncio.timeout(60):
        await asyncio.gather(calls._decode(method, "t0", b"x"), others(), *large)
    assert order[0] == "small"
    assert ("large", "large") not in pairwise(order)
