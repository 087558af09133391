"""A cluster whose only worker or engine dies: its health, its refusals, and what takes the place of the dead one."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loraplex_client import InternalError, UnavailableError

from broker.messages import STRIKES_LIMIT
from tests.e2e.conftest import Cluster, running_cluster
from tests.e2e.full_cluster import jobs
from worker.engine.hash_engine import expected_ids
from worker.engine_api import Stopping
from worker.io.local_jobs import CLEARED_ATTEMPTS

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "hash:?vocab=32000&seed=1&step_ms=5"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Run a cluster with one worker; each test leaves one that serves."""
    async with running_cluster(tmp_path_factory.mktemp("lone") / "cluster", MODEL, {}) as running:
        yield running


def worker(cluster: Cluster) -> str:
    """Return the name of the process of the worker that runs."""
    (name,) = [n for n, one in cluster.local.processes.items() if n.startswith("worker-") and not one.exited.done()]
    return name


async def test_health_tells_whether_work_can_be_served(cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(cluster.local.router) as channel:
        changes = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(changes)).status == health_pb2.HealthCheckResponse.SERVING
        cluster.local.kill(worker(cluster), signal.SIGKILL)
        assert (await anext(changes)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(UnavailableError, match="no worker"):
            await cluster.client.generate("x")
        await cluster.local.start_worker()
        assert (await anext(changes)).status == health_pb2.HealthCheckResponse.SERVING
        answer = await cluster.client.generate("x", max_new_tokens=5)
        assert answer.token_ids == expected_ids(MODEL, list(b"x"), stopping=Stopping(max_tokens=5))


async def test_the_launcher_replaces_a_worker_that_died(cluster: Cluster) -> None:
    stream = cluster.client.generate_stream("x", n=4, max_new_tokens=200)
    await anext(stream)
    os.kill(cluster.local.processes[worker(cluster)].pid, signal.SIGKILL)
    whole = await stream.result()
    prompt, stopping = list(b"x"), Stopping(max_tokens=200)
    truth = [expected_ids(MODEL, prompt, stopping=stopping, choice=choice) for choice in range(4)]
    assert [choice.token_ids for choice in whole.choices] == truth
    assert whole.usage.completion_tokens == 800
    assert whole.continuations > 0


# The last: the tenant is in quarantine afterwards.
async def test_what_always_gives_tokens_before_it_kills_ends_too(
    cluster: Cluster, eventually: Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
) -> None:
    """Here a signal kills, as soon as a new engine has given some."""

    async def alone() -> bool:
        return len(await cluster.workers()) == 1

    await eventually(alone)  # the worker that died before has lapsed
    killed: set[int] = set()
    # Tokens of the answer when each engine was first seen; an engine has given those that came after.
    tokens_before: dict[int, int] = {}

    async def answer() -> None:
        async for _ in cluster.client.generate_stream("gives, then kills", max_new_tokens=4000):
            (state,) = await cluster.workers() or (None,)
            (job,) = await jobs(cluster) or (None,)
            if state is None or job is None or state.engine_pid in killed:
                continue
            if job.completion_tokens > tokens_before.setdefault(state.engine_pid, job.completion_tokens):
                killed.add(state.engine_pid)
                os.kill(state.engine_pid, signal.SIGKILL)

    with pytest.raises(InternalError) as caught:
        await answer()
    assert caught.value.reason == "POISON_REQUEST"
    assert len(killed) == CLEARED_ATTEMPTS + STRIKES_LIMIT + 1
    await eventually(cluster.idle)
