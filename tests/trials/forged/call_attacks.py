"""Attacks by calls: hellos and frames at the relay, resume tokens, downloads from the store."""

from __future__ import annotations

import asyncio
import random
import string
from typing import Any

import grpc
from loraplex.adapters.v1 import adapters_pb2, adapters_pb2_grpc
from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc

from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc
from loraplex.runtime.rpc.principal import TENANT_KEY, WORKER_GRANT_KEY, Role
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.tenancy.signatures import RevisionGrantIssuer, Signer
from tests.trials.forged.cluster import OTHER, TENANT
from tests.trials.forged.stage import ANSWER, PROMPT, THIEF, TIMEOUT_S, Stage, channel, incarnation_of, running_job
from tests.trials.hostile.run import OWN_ERROR

# Maximum number of answers that end before the frames forged for them have come; their tries are made again.
_LATE = 5
# Statuses of a refusal; any other one says that nobody was there to refuse.
_REFUSALS = {
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
}


async def hellos(stage: Stage, tries: int) -> int:
    """Say hello at the relay as another worker, as another incarnation, or without a worker's certificate."""
    real = await incarnation_of(stage)
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
            running = asyncio.create_task(client.generate(token_ids=PROMPT, max_tokens=ANSWER))
            job_id = await running_job(stage.cluster)
            messages = [pb.ConnectRequest(hello=pb.Hello(worker_id="thief", incarnation="thief/i", nonce=bytes(32)))]
            messages += [_frame(job_id, stage.chance) for _ in range(min(tries, per_answer))]
            welcomed = await _say(stage, tls, messages)
            came_in_time = bool(welcomed) and not running.done()
            answer = await running
        async with stage.cluster.client(TENANT) as client:
            alone = await client.generate(token_ids=PROMPT, max_tokens=ANSWER)
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
            call = stub.Resume(inference_pb2.ResumeRequest(spec=stage.spec, resume_token=token), timeout=TIMEOUT_S)
            accepted += await _answers(call)
    async with channel(stage.cluster.ports["router"]["mtls"], owner) as opened:
        stub = inference_pb2_grpc.InferenceServiceStub(opened)
        request = inference_pb2.ResumeRequest(spec=stage.spec, resume_token=stage.token)
        assert await _answers(stub.Resume(request, timeout=TIMEOUT_S)), "the owner's own token is good"
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
                adapters_pb2.DownloadRevisionRequest(name=stage.revision.name), metadata=metadata, timeout=TIMEOUT_S
            )
            accepted += await _answers(call)
    return accepted


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
        call = relay_pb2_grpc.RelayServiceStub(opened).Connect(timeout=TIMEOUT_S)
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


def _altered_text(text: str, chance: random.Random) -> str:
    at = chance.randrange(len(text))
    other = chance.choice([letter for letter in string.ascii_letters + string.digits if letter != text[at]])
    return text[:at] + other + text[at + 1 :]
