"""The stage of the attacks: the cluster, and what attackers have captured of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
from loraplex.adapters.v1 import adapters_pb2, adapters_pb2_grpc
from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc
from redis.asyncio import Redis

from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.broker.messages import AdapterRef, Job
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.runtime.rpc.principal import TENANT_KEY
from loraplex.runtime.rpc.tls import TlsFiles
from tests.trials.forged.cluster import KEYS, MODEL, OTHER, TENANT, Cluster

THIEF = "loraplex://worker/thief"
PROMPT = tuple(range(1, 9))
_LOCAL = [("grpc.use_local_subchannel_pool", 1)]
# Timeout in seconds of a call, and of a wait for a job to appear.
TIMEOUT_S = 20.0
# Number of tokens of an answer that others send frames for; each takes the worker a millisecond.
ANSWER = 300


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
            sampling=SamplingParams(seed=1),
            adapter=ref,
        )
        return replace(made, **changes)


@asynccontextmanager
async def channel(address: str, tls: TlsFiles) -> AsyncIterator[grpc.aio.Channel]:
    """Open a connection of its own with a certificate."""
    async with grpc.aio.secure_channel(address, tls.channel_credentials(), _LOCAL) as found:
        yield found


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
        blocking = asyncio.create_task(client.generate(token_ids=PROMPT, max_tokens=ANSWER))
        await running_job(cluster)
        owner = cluster.tls(f"loraplex://tenant-admin/{TENANT}")
        async with channel(cluster.ports["router"]["mtls"], owner) as opened:
            stub = inference_pb2_grpc.InferenceServiceStub(opened)
            call = stub.Generate(inference_pb2.GenerateRequest(spec=spec), timeout=TIMEOUT_S)
            job_id, sealed = await _waiting_job(cluster.redis)
            token = next(iter([event.event.resume_token async for event in call]))
        await blocking
    return Stage(cluster, chance, revision, spec, token, job_id, sealed, read_base_model(MODEL).digest)


async def incarnation_of(stage: Stage) -> str:
    (found,) = await stage.cluster.redis.hkeys(KEYS.workers)
    return found.decode() if isinstance(found, bytes) else found


async def running_job(cluster: Cluster) -> str:
    """Return the id of the one job that a worker has, once its router knows."""
    address = cluster.ports["router"]["operators-mtls"]
    async with channel(address, cluster.tls("loraplex://operator/o")) as opened, asyncio.timeout(TIMEOUT_S):
        stub = cluster_pb2_grpc.ClusterServiceStub(opened)
        while True:
            jobs = (await stub.ListJobs(cluster_pb2.ListJobsRequest())).jobs
            if jobs and jobs[0].worker_id:
                return str(jobs[0].job_id)


async def _waiting_job(redis: Redis) -> tuple[str, dict[bytes, bytes]]:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            keys: Any = await redis.keys(KEYS.job("*"))
            for key in keys:
                stored: Any = await redis.hgetall(key)
                if b"body" in stored:
                    return key.decode().removeprefix(KEYS.job("")), stored
            await asyncio.sleep(0.002)
