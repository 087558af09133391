"""Streams that outlive their router: two routers, two workers, the hash model, everything killed in its turn."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex_client import (
    AsyncClient,
    AsyncGenerationStream,
    AsyncStoreClient,
    Client,
    Generation,
)
from tests.e2e.conftest import TENANT, Cluster, running_cluster, write_hash_adapters

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW = "hash:?vocab=32000&seed=1&step_ms=5"
TOKENS = 100

# Everything that has a state of its own to carry over.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"adapter_id": "a"},
    {"adapter_id": "b", "n": 3, "logprobs": 2},
    {"adapter_id": "a", "temperature": 0.7, "top_p": 0.5, "seed": 2**63 + 9, "repetition_penalty": 1.5},
    {"adapters": {"a": 0.5, "c": -0.25}, "min_tokens": TOKENS, "frequency_penalty": 0.5},
    {"n": 2, "stream_interval": 5, "presence_penalty": 1.0},
    {"n": 2, "best_of": 3, "max_tokens": 40},
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp("resume")
    adapters = write_hash_adapters(directory / "adapters")
    async with running_cluster(directory / "cluster", SLOW, adapters, workers=2, routers=2) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    """Of both routers; it waits for as long as they take to start again on a busy machine."""
    async with AsyncClient(cluster.local.routers, TENANT, resume_attempts=100) as both:
        yield both


def comparable(generation: Generation) -> Generation:
    """An answer without what may differ when it is disturbed."""
    return replace(
        generation,
        timings=replace(generation.timings, queue_s=0, adapter_s=0, ttft_s=0, decode_s=0),
        usage=replace(generation.usage, cached_tokens=0),
        continuations=0,
        request_id="",
    )


async def asked(client: AsyncClient) -> tuple[dict[str, Any], ...]:
    """The options of every kind of request, one of them with a stop string that it comes to."""
    whole = await client.generate("stop", adapter_id="c", max_tokens=TOKENS)
    # A stop string of which two tokens' text is the beginning: they are held back until the third has come.
    stop = "".join(f"<{token}>" for token in whole.token_ids[80:83])
    options = (*OPTIONS, {"adapter_id": "c", "stop": [stop], "logprobs": 0})
    return tuple({"max_tokens": TOKENS, **option} for option in options)


def prompt_of(options: dict[str, Any]) -> str:
    return "stop" if "stop" in options else "prompt"


async def read(stream: AsyncGenerationStream, on_token: Callable[[], None]) -> Generation:
    """The whole answer, which its pieces must make up."""
    texts: dict[int, str] = {}
    ids: dict[int, tuple[int, ...]] = {}
    async for piece in stream:
        if piece.finished:
            assert [choice.text for choice in piece.finished.choices] == [text for _, text in sorted(texts.items())]
            assert [choice.token_ids for choice in piece.finished.choices] == [all_ for _, all_ in sorted(ids.items())]
            return piece.finished
        assert piece.offset == len(ids.get(piece.choice, ()))
        texts[piece.choice] = texts.get(piece.choice, "") + piece.text
        ids[piece.choice] = ids.get(piece.choice, ()) + piece.token_ids
        on_token()
    raise AssertionError("no end")


class Begun:
    """Set once so many streams have brought something; a client starts the others anew where their router dies."""

    def __init__(self, streams: int) -> None:
        self.all = asyncio.Event()
        self._streams = streams
        self._begun = set[int]()

    def note(self, stream: int) -> None:
        """Note a piece of a stream."""
        self._begun.add(stream)
        if len(self._begun) == self._streams:
            self.all.set()


async def serving(cluster: Cluster) -> None:
    await cluster.local.wait_serving()


async def test_streams_go_on_where_their_router_was_killed(
    cluster: Cluster, client: AsyncClient, eventually: Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
) -> None:
    asks = await asked(client)
    wholes = await asyncio.gather(*(client.generate(prompt_of(options), **options) for options in asks))
    truth = [comparable(whole) for whole in wholes]
    streams = [client.generate_stream(prompt_of(options), **options) for _ in range(2) for options in asks]
    # The best of several come when all have ended, which may be before others begin.
    waited = [at for at in range(len(streams)) if "best_of" not in asks[at % len(asks)]]
    begun = Begun(len(waited))

    def note(at: int) -> None:
        if at in waited:
            begun.note(at)

    reads = asyncio.gather(*(read(stream, partial(note, at)) for at, stream in enumerate(streams)))

    loop, blocked_begun = asyncio.get_running_loop(), Begun(2)

    def generate(number: int) -> Generation:
        with Client(cluster.local.routers, TENANT) as blocking:
            stream = blocking.generate_stream("prompt", **asks[1])
            next(stream)
            loop.call_soon_threadsafe(blocked_begun.note, number)
            return stream.result()

    blocked = asyncio.gather(*(asyncio.to_thread(generate, number) for number in range(2)))
    await asyncio.gather(begun.all.wait(), blocked_begun.all.wait())
    cluster.local.kill("router-1", signal.SIGSTOP)  # its streams do not end meanwhile
    # Whoever resumes goes on with the revision that it began with.
    async with AsyncStoreClient(cluster.local.store, TENANT) as store:
        adapters = cluster.local.data_dir.parent / "adapters"
        await asyncio.gather(*(store.push(adapters / other, name) for name, other in ("ab", "bc", "ca")))
    cluster.local.kill("router-1", signal.SIGKILL)
    answers, blocking_answers = await reads, await blocked
    assert [comparable(answer) for answer in answers] == truth * 2
    assert [comparable(answer) for answer in blocking_answers] == [truth[1]] * 2
    resumed = [answer for answer in (*answers, *blocking_answers) if answer.continuations]
    assert 0 < len(resumed) < len(streams) + 2, "the router that was killed had all of them, or none"
    assert all(answer.timings.ttft_s > 0 for answer in resumed)

    async def has_moved() -> bool:
        return bool((await client.generate("prompt", **asks[0])).token_ids != truth[0].token_ids)

    await eventually(has_moved)  # routers know what a name means for a second
    async with AsyncStoreClient(cluster.local.store, TENANT) as store:
        for name, digest in cluster.digests.items():
            await store.set_alias(name, "live", digest)
    await cluster.local.restart("router-1")
    await serving(cluster)


async def test_streams_survive_the_death_of_routers_workers_and_redis_together(
    cluster: Cluster, client: AsyncClient, eventually: Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
) -> None:
    local = cluster.local
    options: dict[str, Any] = {"adapter_id": "a", "temperature": 0.5, "seed": 3, "n": 2, "max_tokens": 300}
    truth = comparable(await client.generate("prompt", **options))
    begun = Begun(4)
    streams = [client.generate_stream("prompt", **options) for _ in range(4)]
    reads = asyncio.gather(*(read(stream, partial(begun.note, at)) for at, stream in enumerate(streams)))
    await begun.all.wait()
    victims = [name for name in local.processes if name != "store" and not local.processes[name].exited.done()]
    assert sorted(name.partition("-")[0] for name in victims) == ["router", "router", "valkey", "worker", "worker"]
    for name in victims:
        local.kill(name, signal.SIGKILL)
    await asyncio.gather(*(local.processes[name].exited for name in victims))
    await local.restart("valkey")
    await asyncio.gather(local.restart("router-1"), local.restart("router-2"))
    async with grpc.aio.insecure_channel(local.router) as channel:
        changes = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(changes)).status == health_pb2.HealthCheckResponse.NOT_SERVING, "there is no worker"
        await local.start_worker()
        assert (await anext(changes)).status == health_pb2.HealthCheckResponse.SERVING
    answers = await reads
    assert [comparable(answer) for answer in answers] == [truth] * 4
    assert all(answer.continuations for answer in answers)
    await eventually(cluster.idle)
