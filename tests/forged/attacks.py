"""The attacks: each makes tries from a seed, and says how many of them were accepted."""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import msgspec
from loraplex.adapters.v1 import adapters_pb2, adapters_pb2_grpc
from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc
from redis.asyncio import Redis

from artifacts.base_model import read_base_model
from broker.commands import DRAIN, Command, Verb, encode_command
from broker.messages import AdapterRef, AdapterRequest, Job, StoppingParams
from broker.queue import JobQueue
from broker.seal_kinds import SealKind
from broker.seals import Seals
from rpc.identity.principal import TENANT_KEY, WORKER_GRANT_KEY, Role
from rpc.identity.revision_grants import RevisionGrantIssuer
from rpc.identity.signatures import Signer, Verifier
from rpc.identity.tls import TlsFiles
from tests.credentials_files import job_keys
from tests.forged.cluster import KEYS, MODEL, OTHER, TENANT, Cluster
from tests.hostile.run import OWN_ERROR

THIEF = "loraplex://worker/thief"
PROMPT = tuple(range(1, 9))
_LOCAL = [("grpc.use_local_subchannel_pool", 1)]
_TIMEOUT_S = 20.0
# Maximum answers that end before the frames that are forged for them have come; their tries are made again.
_LATE = 5
# Tokens of an answer that others send frames for, a millisecond each.
ANSWER = 300
# Statuses of a refusal; any other one says that nobody was there to refuse.
_REFUSALS = {
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
}
# The header of an array: a script packs a job's facts one after the other, without it.
_FACTS = b"\xdc\x00\x12"


@dataclass
class Stage:
    """The cluster, and what the attackers have captured: a private revision, a resume token, a sealed job."""

    cluster: Cluster
    chance: random.Random
    revision: adapters_pb2.Revision
    spec: inference_pb2.GenerateSpec
    token: str
    job_id: str
    sealed: Mapping[bytes, bytes]
    base_digest: str

    def job(self, job_id: str, **changes: Any) -> Job:
        """Return a job of another tenant on the private adapter, whose answer goes to the router."""
        ref = AdapterRef(self.revision.name, self.revision.digest, 8, 100)
        made = Job(
            job_id,
            OTHER,
            KEYS.model,
            self.base_digest,
            self.cluster.relay,
            PROMPT,
            StoppingParams(4),
            seed=1,
            adapter=ref,
        )
        return replace(made, **changes)


@asynccontextmanager
async def channel(address: str, tls: TlsFiles) -> AsyncIterator[grpc.aio.Channel]:
    """Open a connection of its own with a certificate."""
    async with grpc.aio.secure_channel(address, tls.channel_credentials(), _LOCAL) as found:
        yield found


async def hellos(stage: Stage, tries: int) -> int:
    """Say hello at the relay as another worker, as another incarnation, or without a worker's certificate."""
    real = await _incarnation(stage)
    accepted = 0
    own = pb.Hello(worker_id="thief", incarnation="thief/i", nonce=stage.chance.randbytes(32))
    assert await _say(stage, stage.cluster.tls(THIEF), [pb.ConnectRequest(hello=own)]), "its own hello has an answer"
    for number in range(tries):
        kind = number % 4
        tls = stage.cluster.tls((THIEF, THIEF, "loraplex://tenant/globex", "loraplex://router/thief")[kind])
        named = ((real, real), ("thief", real), ("thief", "thief/i"), ("thief", "thief/i"))[kind]
        hello = pb.Hello(worker_id=named[0], incarnation=named[1], nonce=stage.chance.randbytes(32))
        answers = await _say(stage, tls, [pb.ConnectRequest(hello=hello)])
        accepted += bool(answers)
    return accepted


async def frames(stage: Stage, tries: int) -> int:
    """Send tokens, ends and claims for a running answer of another worker, from a worker of the cluster."""
    tls, per_answer = stage.cluster.tls(THIEF), 50
    accepted = late = 0
    while tries > 0:
        async with stage.cluster.client(TENANT) as client:
            running = asyncio.create_task(client.generate(token_ids=PROMPT, max_new_tokens=ANSWER))
            job_id = await _running_job(stage.cluster)
            messages = [pb.ConnectRequest(hello=pb.Hello(worker_id="thief", incarnation="thief/i", nonce=bytes(32)))]
            messages += [_frame(job_id, stage.chance) for _ in range(min(tries, per_answer))]
            welcomed = await _say(stage, tls, messages)
            came_in_time = bool(welcomed) and not running.done()
            answer = await running
        async with stage.cluster.client(TENANT) as client:
            alone = await client.generate(token_ids=PROMPT, max_new_tokens=ANSWER)
        accepted += answer.token_ids != alone.token_ids
        late += not came_in_time
        assert late <= _LATE, "the answers end before the forged frames come"
        tries -= per_answer if came_in_time else 0
    return accepted


def _frame(job_id: str, chance: random.Random) -> pb.ConnectRequest:
    kind = chance.randrange(3)
    if kind == 0:
        return pb.ConnectRequest(claims=pb.Claims(jobs=[pb.JobAttempt(job_id=job_id, attempt=1)]))
    frame = pb.Frame(job_id=job_id, attempt=1, offset=chance.randrange(100), token_ids=[599])
    if kind == 2:
        frame.finish.kind = pb.FINISH_KIND_END
    return pb.ConnectRequest(frames=pb.FrameBatch(frames=[frame]))


async def unsealed_jobs(stage: Stage, tries: int) -> int:
    """Put jobs of another tenant on the private adapter into the queue, as a cluster without credentials has them."""
    queue = JobQueue(stage.cluster.redis, KEYS)
    return await _to_worker(stage, tries, lambda n: queue.enqueue(stage.job(f"plain-{n}")))


async def jobs_of_workers(stage: Stage, tries: int) -> int:
    """Put in jobs that a worker has sealed, which knows the job key."""
    tls = stage.cluster.tls(THIEF)
    seals = Seals(job_keys(stage.cluster.directory), Verifier(tls, Role.WORKER), Signer(tls, Role.WORKER))
    queue = JobQueue(stage.cluster.redis, KEYS, seals=seals)
    return await _to_worker(stage, tries, lambda n: queue.enqueue(stage.job(f"worker-{n}")))


async def altered_jobs(stage: Stage, tries: int) -> int:
    """Put in a router's job of before with another field: of its seal, or of the facts beside it."""
    return await _to_worker(stage, tries, lambda _: _put(stage, _altered(stage.sealed, stage.chance)))


async def replayed_jobs(stage: Stage, tries: int) -> int:
    """Put in a router's job of before as it was."""
    return await _to_worker(stage, tries, lambda _: _put(stage, stage.sealed))


async def commands(stage: Stage, tries: int) -> int:
    """Send the worker commands to drain, and to load the private adapter, without a seal or with a worker's."""
    tls, key = stage.cluster.tls(THIEF), KEYS.commands(await _incarnation(stage))
    seals = Seals(job_keys(stage.cluster.directory), Verifier(tls, Role.WORKER), Signer(tls, Role.WORKER))
    request = AdapterRequest(AdapterRef(stage.revision.name, stage.revision.digest, 8, 100), OTHER)

    async def send(number: int) -> None:
        command = (DRAIN, Command(Verb.WARM, request), Command(Verb.PIN, request))[number % 3]
        entry = encode_command(command)
        if number % 2:
            entry = b"sealed " + seals.seal(SealKind.COMMAND, key, entry).SerializeToString()
        await stage.cluster.redis.rpush(key, entry)

    accepted = await _to_worker(stage, tries, send)
    async with stage.cluster.client(TENANT) as client:  # the worker has not drained
        await client.generate(token_ids=PROMPT, max_new_tokens=2)
    return accepted


async def resume_tokens(stage: Stage, tries: int) -> int:
    """Go on with another tenant's answer by its stolen token, and with one's own by an altered one."""
    accepted = 0
    thief = stage.cluster.tls(f"loraplex://tenant-admin/{OTHER}")
    owner = stage.cluster.tls(f"loraplex://tenant-admin/{TENANT}")
    for number in range(tries):
        stolen = number % 2
        token = stage.token if stolen else _altered_text(stage.token, stage.chance)
        async with channel(stage.cluster.ports["router"]["mtls"], thief if stolen else owner) as opened:
            stub = inference_pb2_grpc.InferenceServiceStub(opened)
            call = stub.Resume(inference_pb2.ResumeRequest(spec=stage.spec, resume_token=token), timeout=_TIMEOUT_S)
            accepted += await _answers(call)
    async with channel(stage.cluster.ports["router"]["mtls"], owner) as opened:
        stub = inference_pb2_grpc.InferenceServiceStub(opened)
        request = inference_pb2.ResumeRequest(spec=stage.spec, resume_token=stage.token)
        assert await _answers(stub.Resume(request, timeout=_TIMEOUT_S)), "the owner's own token is good"
    return accepted


async def downloads(stage: Stage, tries: int) -> int:
    """Download the private adapter as a worker: without a grant, with a worker's own, with an altered one."""
    tls = stage.cluster.tls(THIEF)
    forged = RevisionGrantIssuer(Signer(tls, Role.WORKER)).issue(TENANT, (stage.revision.name,))
    accepted = 0
    async with channel(stage.cluster.ports["store"]["operators-mtls"], tls) as opened:
        stub = adapters_pb2_grpc.AdapterServiceStub(opened)
        for number in range(tries):
            metadata: list[tuple[str, str | bytes]] = [(TENANT_KEY, TENANT)]
            if number % 3:
                metadata.append((WORKER_GRANT_KEY, forged if number % 3 == 1 else stage.chance.randbytes(200)))
            call = stub.DownloadRevision(
                adapters_pb2.DownloadRevisionRequest(name=stage.revision.name), metadata=metadata, timeout=_TIMEOUT_S
            )
            accepted += await _answers(call)
    return accepted


ATTACKS: dict[str, Callable[[Stage, int], Awaitable[int]]] = {
    "hellos at the relay": hellos,
    "frames and claims of another worker": frames,
    "jobs without a seal": unsealed_jobs,
    "jobs that a worker has sealed": jobs_of_workers,
    "altered jobs": altered_jobs,
    "replayed jobs": replayed_jobs,
    "commands to the worker": commands,
    "resume tokens": resume_tokens,
    "downloads of a worker": downloads,
}
# Processes whose audit log has the refusals; those of all other attacks are the worker's.
REFUSED_BY = {
    "hellos at the relay": "router",
    "frames and claims of another worker": "router",
    "resume tokens": "router",
    "downloads of a worker": "store",
}


async def _answers(call: Any) -> bool:
    try:
        return await call.read() is not grpc.aio.EOF
    except grpc.aio.AioRpcError as error:
        if error.code() not in _REFUSALS:
            raise
        return False
    finally:
        call.cancel()


async def _say(stage: Stage, tls: TlsFiles, messages: list[pb.ConnectRequest]) -> list[pb.ConnectResponse]:
    """Send messages over a relay stream; return the answers, none where the router refuses it."""
    async with channel(stage.cluster.relay, tls) as opened:
        call = relay_pb2_grpc.RelayServiceStub(opened).Connect(timeout=_TIMEOUT_S)
        try:
            for message in messages:
                await call.write(message)
            await call.done_writing()
            return [answer async for answer in call]
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            if await call.code() in _REFUSALS:
                return []
            if await call.details() != OWN_ERROR:
                raise
    return await _say(stage, tls, messages)  # the client has lost the refusal that came while it still sent


async def _incarnation(stage: Stage) -> str:
    (found,) = await stage.cluster.redis.hkeys(KEYS.workers)
    return found.decode() if isinstance(found, bytes) else found


async def _running_job(cluster: Cluster) -> str:
    """Return the id of the one job that a worker has, once its router knows."""
    address = cluster.ports["router"]["operators-mtls"]
    async with channel(address, cluster.tls("loraplex://operator/o")) as opened, asyncio.timeout(_TIMEOUT_S):
        stub = cluster_pb2_grpc.ClusterServiceStub(opened)
        while True:
            jobs = (await stub.ListJobs(cluster_pb2.ListJobsRequest())).jobs
            if jobs and jobs[0].worker_id:
                return str(jobs[0].job_id)


async def _to_worker(stage: Stage, tries: int, put: Callable[[int], Awaitable[None]]) -> int:
    """Put entries into Redis one after the other, each once the worker has looked at the last; return what ran."""
    computed, refused = await stage.cluster.worker_counts()
    for number in range(tries):
        await put(number)
        if number % 10 == 9:
            await stage.cluster.until_refused(refused + number + 1)
    await stage.cluster.until_refused(refused + tries)
    after, counted = await stage.cluster.worker_counts()
    return int(after != computed) + abs(tries - (counted - refused))


async def _put(stage: Stage, stored: Mapping[bytes, bytes]) -> None:
    """Put a job into the queue as one that has begun, once the worker has taken the last one of its id."""
    redis, key = stage.cluster.redis, KEYS.job(stage.job_id)
    content: dict[Any, Any] = dict(stored)
    async with asyncio.timeout(_TIMEOUT_S):
        while await redis.exists(key):  # noqa: ASYNC110  # a worker's claim removes it
            await asyncio.sleep(0.001)
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hset(key, mapping=content)
        pipe.zadd(KEYS.waiting, {stage.job_id: "inf"})
        pipe.zadd(KEYS.prefix + "again", {stage.job_id: 0})
        pipe.lpush(KEYS.wake, 1)
        await pipe.execute()


# Facts of a job, by index, and other values with which the queue would still give it away.
_OTHER_FACTS: dict[int, Any] = {0: OTHER, 2: "sha256:other", 5: 7, 6: 2.5, 7: 2, 8: 1, 9: 1}


def _altered(stored: Mapping[bytes, bytes], chance: random.Random) -> dict[bytes, bytes]:
    """Return a job's hash with one fact, or one bit of its body, changed."""
    changed = dict(stored)
    if chance.random() < 0.3:
        facts = msgspec.msgpack.decode(_FACTS + stored[b"facts"])
        index = chance.choice(list(_OTHER_FACTS))
        facts[index] = _OTHER_FACTS[index]
        changed[b"facts"] = msgspec.msgpack.encode(facts)[len(_FACTS) :]
        return changed
    body = bytearray(stored[b"body"])
    body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
    changed[b"body"] = bytes(body)
    return changed


def _altered_text(text: str, chance: random.Random) -> str:
    at = chance.randrange(len(text))
    other = chance.choice([letter for letter in string.ascii_letters + string.digits if letter != text[at]])
    return text[:at] + other + text[at + 1 :]


async def set_stage(cluster: Cluster, seed: int) -> Stage:
    """Let the owner use its adapter, and capture what an attacker may see: the token, the job as it waits in Redis."""
    chance = random.Random(seed)
    operator = cluster.tls("loraplex://operator/o")
    async with channel(cluster.ports["store"]["operators-mtls"], operator) as opened:
        store = adapters_pb2_grpc.AdapterServiceStub(opened)
        named = adapters_pb2.GetAdapterRequest(name="private")
        revision = (await store.GetAdapter(named, metadata=[(TENANT_KEY, TENANT)])).revision
    spec = inference_pb2.GenerateSpec(adapter="private")
    spec.token_ids.ids.extend(PROMPT)
    spec.stopping.max_tokens = 3
    async with cluster.client(TENANT) as client:
        blocking = asyncio.create_task(client.generate(token_ids=PROMPT, max_new_tokens=ANSWER))
        await _running_job(cluster)
        owner = cluster.tls(f"loraplex://tenant-admin/{TENANT}")
        async with channel(cluster.ports["router"]["mtls"], owner) as opened:
            stub = inference_pb2_grpc.InferenceServiceStub(opened)
            call = stub.Generate(inference_pb2.GenerateRequest(spec=spec), timeout=_TIMEOUT_S)
            job_id, sealed = await _waiting_job(cluster.redis)
            token = next(iter([event.event.resume_token async for event in call]))
        await blocking
    return Stage(cluster, chance, revision, spec, token, job_id, sealed, read_base_model(MODEL).digest)


async def _waiting_job(redis: Redis) -> tuple[str, dict[bytes, bytes]]:
    async with asyncio.timeout(_TIMEOUT_S):
        while True:
            keys: Any = await redis.keys(KEYS.job("*"))
            for key in keys:
                stored: Any = await redis.hgetall(key)
                if b"body" in stored:
                    return key.decode().removeprefix(KEYS.job("")), stored
            await asyncio.sleep(0.002)
