"""The relay with certificates: which workers a router takes, and which routers a worker; both ends are real."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from loraplex.cli.development_ca import DevelopmentCa
from loraplex.contracts.broker.messages import Job
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import Placement
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc
from loraplex.router.app import RelayAccess
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.relay import RelayService, check_advertised
from loraplex.runtime.rpc.errors import CallError
from loraplex.runtime.rpc.principal import Principal, Role
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.tenancy.signatures import Signature, SignatureError, Signer, Verifier, welcome_parts
from loraplex.worker.engine_api import Output
from loraplex.worker.io.credentials import LinkCredentials
from loraplex.worker.io.local_jobs import LocalJobs
from loraplex.worker.io.relay.links import LinkSettings, RouterLinks
from tests.credentials_files import CA, HOSTS, tls_files
from tests.router.recording_link import KEYS, dispatched
from tests.worker.io.relay.handlers import NoRequests


class Relay:
    """A router's relay; `refusals` is what its callback was told, as callers' names and reasons."""

    def __init__(self, dispatcher: Dispatcher, tls: TlsFiles) -> None:
        self.dispatcher = dispatcher
        self.refusals: list[tuple[str, str]] = []
        self._access = RelayAccess(tls, self._refused)
        self.service = RelayService(dispatcher, credentials=self._access.credentials)
        self.service.add_to(self._access.server)
        self.port = self._access.bind("127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.port}"
        self.server = self._access.server

    def _refused(self, method: str, caller: Principal | None, error: CallError, peer: str) -> None:
        self.refusals.append((caller.name if caller else "", error.reason))


@asynccontextmanager
async def relaying(redis: Redis, tls: TlsFiles) -> AsyncIterator[Relay]:
    queue = JobQueue(redis, KEYS)
    dispatcher = Dispatcher(lambda *_: queue, lambda *_: Placement())
    relay = Relay(dispatcher, tls)
    await relay.server.start()
    try:
        yield relay
    finally:
        relay.service.close()
        await relay.server.stop(0)
        await dispatcher.drain_tasks()


@asynccontextmanager
async def linked(tls: TlsFiles, name: str = "w-1") -> AsyncIterator[tuple[RouterLinks, LocalJobs]]:
    credentials, jobs = LinkCredentials(tls), LocalJobs()
    settings = LinkSettings(credentials.named(name), credentials.named("i-1"), credentials=credentials, pause_s=0.01)
    links = RouterLinks(settings, jobs, NoRequests())
    try:
        yield links, jobs
    finally:
        await links.close(0.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # both ends are in this process, without a common event
            await asyncio.sleep(0.005)


async def say(relay: Relay, tls: TlsFiles, *messages: pb.ConnectRequest) -> list[pb.ConnectResponse]:
    """Send messages over a stream of one's own; return what came until all was read. Raises AioRpcError."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(relay.address, tls.channel_credentials(), options) as channel:
        call = relay_pb2_grpc.RelayServiceStub(channel).Connect(timeout=10)
        for message in messages:
            await call.write(message)
        await call.done_writing()
        return [response async for response in call]


def hello(worker: str, incarnation: str, nonce: bytes = bytes(32), **holds: int) -> pb.ConnectRequest:
    held = [pb.JobAttempt(job_id=job_id, attempt=attempt) for job_id, attempt in holds.items()]
    return pb.ConnectRequest(hello=pb.Hello(worker_id=worker, incarnation=incarnation, nonce=nonce, holds=held))


def frame(job_id: str, *ids: int) -> pb.ConnectRequest:
    return pb.ConnectRequest(frames=pb.FrameBatch(frames=[pb.Frame(job_id=job_id, attempt=1, token_ids=ids)]))


async def test_a_worker_s_tokens_come_and_those_of_another_certificate_do_not(redis: Redis, tmp_path: Path) -> None:
    router, own = tls_files(tmp_path, "loraplex://router/r"), tls_files(tmp_path, "loraplex://worker/gpu")
    thief = tls_files(tmp_path, "loraplex://worker/thief")
    async with relaying(redis, router) as relay, linked(own) as (links, jobs):
        await check_advertised("localhost", relay.port, relay.service.router_id, router, pause_s=0.0)
        links.follow([relay.address])
        await until(lambda: links.live == (relay.address,))
        job = Job(
            "j",
            "acme",
            "tiny",
            "sha256:0",
            relay.address,
            (1, 2),
            StoppingParams(max_tokens=9),
            sampling=SamplingParams(seed=1),
        )
        async with dispatched(relay.dispatcher, job) as routed:
            local = jobs.add(job)
            links.claimed(local)
            await until(lambda: routed.link is not None)
            await say(relay, thief, hello("thief", "thief/i"), frame("j", 666))
            await say(relay, thief, hello("thief", "thief/i", j=1))
            for claimed in (("gpu", "gpu/i-1"), ("thief", "gpu/i-1"), ("gpu/w-1", "thief/i")):
                # While it sends, grpc.aio's client may take a refusal for an error of its own: `refusals` tells.
                with pytest.raises(grpc.aio.AioRpcError, match=r"says hello as|Internal error from Core"):
                    await say(relay, thief, hello(*claimed), frame("j", 666))
            assert routed.link is not None
            assert routed.link.incarnation == "gpu/i-1"
            local.choices[0].record(Output(local.choices[0].sequence_id, 0, (7,), None))
            links.progressed(local.choices[0])
            await until(lambda: routed.emitted_tokens == 1)
            assert routed.choices[0].emitted == [7]
            jobs.remove("j", 1)
            links._handler.remove = lambda *_: None  # type: ignore[method-assign]  # the job ends
        refused = [("worker/thief", "OTHER_WORKERS_JOB")] * 2 + [("worker/thief", "OTHER_WORKER")] * 3
        assert relay.refusals == refused


async def test_only_workers_of_the_authority_are_taken(redis: Redis, tmp_path: Path) -> None:
    async with relaying(redis, tls_files(tmp_path, "loraplex://router/r")) as relay:
        for uri, reason in (
            ("loraplex://tenant/acme", "ROLE_NOT_PERMITTED"),
            ("loraplex://operator/ann", "ROLE_NOT_PERMITTED"),
            ("loraplex://router/r2", "ROLE_NOT_PERMITTED"),
            ("loraplex://store/s", "ROLE_NOT_PERMITTED"),
            ("https://nobody", "CREDENTIAL_INVALID"),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await say(relay, tls_files(tmp_path, uri), hello("w", "w/i"))
            assert relay.refusals[-1][1] == reason
        with pytest.raises(grpc.aio.AioRpcError) as stranger:
            await say(relay, tls_files(tmp_path, "loraplex://worker/w", DevelopmentCa()), hello("w", "w/i"))
        assert stranger.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError, match="no nonce"):
            await say(relay, tls_files(tmp_path, "loraplex://worker/w"), hello("w", "w/i", b""))
        assert relay.refusals[-1] == ("worker/w", "NONCE_MISSING")


class Impostor(relay_pb2_grpc.RelayServiceServicer):
    """Answers as a router, with a proof that it has got elsewhere; `heard` is what it was sent after the hello."""

    def __init__(self, proof: Callable[[bytes], pb.RouterProof | None]) -> None:
        self._proof = proof
        self.hellos = 0
        self.heard: list[pb.ConnectRequest] = []

    async def Connect(self, request_iterator: AsyncIterator[pb.ConnectRequest], context: Any) -> Any:
        first = await anext(request_iterator)
        self.hellos += 1
        yield pb.ConnectResponse(welcome=pb.Welcome(proof=self._proof(first.hello.nonce)))
        async for request in request_iterator:
            self.heard.append(request)


def proof_of(tls: TlsFiles, role: Role, worker: str) -> Callable[[bytes], pb.RouterProof]:
    def proof(nonce: bytes) -> pb.RouterProof:
        made = Signer(tls, role).sign(*welcome_parts(nonce, worker))
        return pb.RouterProof(certificates=made.certificates, signature=made.value)

    return proof


@pytest.mark.parametrize("fault", ["no proof", "a worker's proof", "another worker's welcome", "another nonce"])
async def test_a_worker_sends_nothing_to_who_is_no_router(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    impostor = tls_files(tmp_path, "loraplex://worker/impostor")
    router = tls_files(tmp_path, "loraplex://router/r")
    proof: Callable[[bytes], pb.RouterProof | None] = {
        "no proof": lambda _: None,
        "a worker's proof": proof_of(impostor, Role.WORKER, "gpu"),
        "another worker's welcome": proof_of(router, Role.ROUTER, "impostor"),
        "another nonce": lambda _: proof_of(router, Role.ROUTER, "gpu")(bytes(32)),
    }[fault]
    service, server = Impostor(proof), grpc.aio.server()
    relay_pb2_grpc.add_RelayServiceServicer_to_server(service, server)
    port = server.add_secure_port("127.0.0.1:0", impostor.server_credentials(client_certificates=True))
    await server.start()
    async with linked(tls_files(tmp_path, "loraplex://worker/gpu")) as (links, jobs):
        address = f"127.0.0.1:{port}"
        job = Job(
            "j",
            "acme",
            "tiny",
            "sha256:0",
            address,
            (1, 2),
            StoppingParams(max_tokens=9),
            sampling=SamplingParams(seed=1),
        )
        links.claimed(jobs.add(job))
        links.follow([address])
        await until(lambda: service.hellos >= 3)
        assert links.live == ()
        assert service.heard == []
        jobs.remove("j", 1)
    await server.stop(0)
    assert caplog.text.count("answers as a router and is none") == 1


async def test_a_renewed_certificate_is_used_for_the_next_stream(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.runtime.files.LOOK_S", 0.0)
    own = tls_files(tmp_path, "loraplex://worker/gpu")
    async with linked(own) as (links, _), relaying(redis, tls_files(tmp_path, "loraplex://router/r")) as relay:
        links.follow([relay.address])
        await until(lambda: links.live == (relay.address,))
        first = next(iter(relay.service.links)).worker
        CA.write(tmp_path, "worker-gpu", CA.issue("loraplex://worker/gpu", HOSTS))
        relay.service.close()
        await until(lambda: any(link.worker is not first for link in relay.service.links))
        assert own.version == 1


def test_signatures_are_of_one_role_authority_content_and_time(tmp_path: Path) -> None:
    router, worker = tls_files(tmp_path, "loraplex://router/r"), tls_files(tmp_path, "loraplex://worker/w")
    made, verifier = Signer(router, Role.ROUTER).sign(b"what", b"a", b"b"), Verifier(worker, Role.ROUTER)
    assert verifier.verify(made, b"what", b"a", b"b").name == "router/r"
    for parts in ((b"what", b"ab", b""), (b"what", b"a"), (b"other", b"a", b"b")):
        with pytest.raises(SignatureError, match="not what router/r has signed"):
            verifier.verify(made, *parts)
    with pytest.raises(SignatureError, match="names router/r, not a store"):
        Verifier(worker, Role.STORE).verify(made, b"what", b"a", b"b")
    with pytest.raises(SignatureError, match="no authority"):
        Verifier(tls_files(tmp_path, "loraplex://worker/w2", trusted=DevelopmentCa()), Role.ROUTER).verify(
            made, b"what"
        )
    for certificates in ((), made.certificates * 5, (b"no certificate",)):
        with pytest.raises(SignatureError):
            verifier.verify(Signature(certificates, made.value), b"what", b"a", b"b")
    late = Verifier(worker, Role.ROUTER, lambda: time.time() + 400 * 86_400)
    with pytest.raises(SignatureError, match="expired"):
        late.verify(made, b"what", b"a", b"b")
    short, now = DevelopmentCa(timedelta(days=1)), [time.time()]
    third = tls_files(tmp_path, "loraplex://router/r3", short, short)
    made, verifier = Signer(third, Role.ROUTER).sign(b"what"), Verifier(third, Role.ROUTER, lambda: now[0])
    verifier.verify(made, b"what")
    now[0] += 86_400
    with pytest.raises(SignatureError, match="expired"):  # its authority has, before it
        verifier.verify(made, b"what")
    with pytest.raises(ValueError, match="names worker/w; it needs the URI loraplex://router/NAME"):
        Signer(worker, Role.ROUTER)


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
def test_certificates_that_are_broken_anywhere_are_refused_as_signatures_are(tmp_path: Path) -> None:
    made = Signer(tls_files(tmp_path, "loraplex://router/r"), Role.ROUTER).sign(b"what")
    verifier, chance = Verifier(tls_files(tmp_path, "loraplex://worker/w"), Role.ROUTER), random.Random(7)
    for _ in range(500):
        broken = bytearray(made.certificates[0])
        broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
        with pytest.raises(SignatureError):
            verifier.verify(Signature((bytes(broken),), made.value), b"what")
