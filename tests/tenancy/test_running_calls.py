"""Calls that run when their credential expires, or their API key is revoked, end with its status; others go on."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.router.api.service import OpenCalls
from loraplex.runtime.rpc.interceptors import end_call, let_finish
from loraplex.runtime.rpc.principal import CredentialKind, Principal, Role, Unauthenticated
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.tenancy.api_keys import ApiKeyReader, HashedKey, HashedSecret, KeyDirectory, new_api_key
from loraplex.runtime.tenancy.guard import Guard, RunningCalls
from loraplex.runtime.tenancy.permissions import Port


class Endless(inference_pb2_grpc.InferenceServiceServicer):
    """Streams a message and then none; its unary method never answers."""

    def __init__(self) -> None:
        self.ended = asyncio.Semaphore(0)
        self.asked = asyncio.Event()
        self.stalled = asyncio.Event()
        self.begins: Callable[[], None] = lambda: None

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Go on for ever; with a spec, with messages that a client which does not read them keeps from going."""
        try:
            self.begins()
            yield pb.GenerateResponse()
            while request.HasField("spec"):
                asyncio.get_running_loop().call_later(0.05, self.stalled.set)
                yield pb.GenerateResponse(event=pb.GenerateEvent(resume_token="x" * 1_000_000))
            await asyncio.Event().wait()
        finally:
            self.ended.release()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Never answer."""
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.release()
        raise AssertionError


class Served:
    """A server with two keys, and its stub."""

    def __init__(self) -> None:
        self.directory = KeyDirectory()
        self.service = Endless()  # type: ignore[abstract]  # grpc has its own methods for those left out
        self.stub: Any
        self.texts: list[str] = []
        self.keys: list[HashedKey] = []
        for _ in range(2):
            key_id, text, sha256 = new_api_key()
            key = HashedKey(key_id, "acme", Role.TENANT_USER, frozenset(), None, False, (HashedSecret(sha256),))
            self.keys.append(key)
            self.texts.append(text)
        self.directory.put(self.keys)

    def metadata(self, which: int) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call with a key."""
        return (("authorization", f"Bearer {self.texts[which]}"),)

    def revoke(self, which: int) -> None:
        """Revoke a key."""
        self.directory.put([dataclasses.replace(self.keys[which], revoked=True)])


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A running server, with the bounds of a router."""
    found = Served()
    guard = Guard([Port.PUBLIC], [ApiKeyReader(found.directory)], calls=found.directory.calls)
    server = Server(guard, interceptors=[OpenCalls(100, 1 << 28, lambda *_: None)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(found.service, server.services)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        found.stub = inference_pb2_grpc.InferenceServiceStub(channel)
        yield found
    await server.stop(0)


async def rest(call: Any) -> None:
    """Read a stream to its end."""
    while await call.read():
        pass


async def test_a_stream_ends_when_its_key_is_revoked(served: Served) -> None:
    calls = [served.stub.Generate(pb.GenerateRequest(), metadata=served.metadata(which)) for which in (0, 0, 1)]
    for call in calls:
        await call.read()
    await asyncio.to_thread(served.revoke, 0)  # as the store does it
    for call in calls[:2]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert caught.value.details() == "the API key is revoked"
        await served.service.ended.acquire()
    assert not calls[2].done()
    calls[2].cancel()
    await served.service.ended.acquire()
    async with asyncio.timeout(60):
        while served.directory.calls._of_key:  # noqa: ASYNC110  # the tasks tell it a turn after their end
            await asyncio.sleep(0)


async def test_a_stream_whose_client_reads_nothing_ends_with_its_status(served: Served) -> None:
    request = pb.GenerateRequest(spec=pb.GenerateRequest().spec)
    call = served.stub.Generate(request, metadata=served.metadata(0))
    await call.read()
    await served.service.stalled.wait()
    served.revoke(0)
    await served.service.ended.acquire()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def in_turns(turns: int, act: Callable[[], None]) -> None:
    """Act after so many turns of the event loop."""
    if turns:
        asyncio.get_running_loop().call_soon(in_turns, turns - 1, act)
    else:
        act()


@pytest.mark.parametrize("turns", range(5))
async def test_a_stream_whose_key_is_revoked_during_its_first_write_ends_with_its_status(
    served: Served, turns: int
) -> None:
    served.service.begins = lambda: in_turns(turns, lambda: served.revoke(0))
    call = served.stub.Generate(pb.GenerateRequest(), metadata=served.metadata(0))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(60):
            await rest(call)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await served.service.ended.acquire()


async def test_a_call_that_has_its_answer_gets_it(served: Served) -> None:
    async def in_this_moment() -> bool:
        task = asyncio.current_task()
        assert task is not None
        end_call(task, Unauthenticated("revoked"))
        await let_finish()
        await asyncio.sleep(0)
        return True

    assert await asyncio.create_task(in_this_moment())

    async def late() -> bool:
        served.directory.calls.enter(Principal("a", frozenset(), CredentialKind.API_KEY, key_id=served.keys[0].key_id))
        await let_finish()
        served.revoke(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return True

    assert await asyncio.create_task(late())


async def test_a_unary_call_ends_too(served: Served) -> None:
    call = served.stub.Tokenize(pb.TokenizeRequest(), metadata=served.metadata(0))
    await served.service.asked.wait()
    served.revoke(0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_client_that_leaves_is_no_revocation(served: Served) -> None:
    call = served.stub.Generate(pb.GenerateRequest(), metadata=served.metadata(0))
    await call.read()
    call.cancel()
    await served.service.ended.acquire()
    served.revoke(0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Generate(pb.GenerateRequest(), metadata=served.metadata(0)).read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def ended(key: HashedKey, at: float) -> HashedKey:
    """Return a key that expires at a time."""
    return dataclasses.replace(key, expires_at=at)


@pytest.mark.parametrize(
    "change",
    [
        lambda key: ended(key, time.time() + 0.05),
        lambda key: ended(key, 1.0),
        lambda key: dataclasses.replace(key, secrets=(HashedSecret(key.secrets[0].sha256, time.time() + 0.05),)),
        lambda key: dataclasses.replace(key, secrets=(HashedSecret(b"another"),)),
    ],
    ids=["the key expires", "it has expired", "its secret expires", "its secret is gone"],
)
async def test_a_key_that_changes_ends_its_streams_in_time(served: Served, change: Any) -> None:
    calls = [served.stub.Generate(pb.GenerateRequest(), metadata=served.metadata(which)) for which in (0, 1)]
    for call in calls:
        await call.read()
    await asyncio.to_thread(served.directory.put, [change(served.keys[0])])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calls[0].read()
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.UNAUTHENTICATED,
        "the credential has expired",
    )
    assert not calls[1].done()
    calls[1].cancel()


async def test_a_batchs_call_goes_on_while_its_key_is_valid(served: Served) -> None:
    async def line() -> None:
        roles, kind = frozenset({Role.BATCHES}), CredentialKind.CERTIFICATE
        served.directory.calls.enter(Principal("a", roles, kind, key_id=served.keys[0].key_id, for_batch=True))
        await asyncio.Event().wait()

    async with asyncio.timeout(5):
        running = asyncio.create_task(line())
        await asyncio.sleep(0)
        served.directory.put(served.keys, clear=True)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not running.cancelling()
        served.revoke(0)
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_keys_that_an_older_catalog_lacks_end_their_streams(served: Served) -> None:
    call = served.stub.Generate(pb.GenerateRequest(), metadata=served.metadata(0))
    await call.read()
    served.directory.put(served.keys[1:], clear=True)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("kind", [CredentialKind.CERTIFICATE, CredentialKind.JWT])
async def test_a_stream_ends_with_its_certificate_or_token(kind: CredentialKind) -> None:
    class Reader:
        """Reads a credential that ends soon."""

        def read(self, metadata: Any, auth_context: Any) -> Principal:
            """Return its holder."""
            roles = frozenset({Role.TENANT_USER})
            return Principal("a", roles, kind, "acme", expires_at=time.time() + 0.05)

    service = Endless()  # type: ignore[abstract]  # grpc has its own methods for those left out
    server = Server(Guard([Port.PUBLIC], [Reader()], calls=RunningCalls()))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server.services)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest())
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await service.ended.acquire()
    await server.stop(0)
