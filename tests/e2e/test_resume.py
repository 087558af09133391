"""Streams that outlive their router: two routers, two workers, the hash model, everything killed in its turn."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc
from loraplex_client import (
    AbortedError,
    AlreadyExistsError,
    AsyncClient,
    AsyncGenerationStream,
    AsyncStoreClient,
    Client,
    Generation,
)
from loraplex_client.options import generate_request

from tests.e2e.conftest import TENANT, Cluster, running_cluster, write_hash_adapters

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW = "hash:?vocab=32000&seed=1&step_ms=5"
TOKENS = 100
DRAIN_S = "0.3"

# Everything that has a state of its own to carry over.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"adapter_id": "a"},
    {"adapter_id": "b", "n": 3, "logprobs": 2},
    {"adapter_id": "a", "temperature": 0.7, "top_p": 0.5, "seed": 2**63 + 9, "repetition_penalty": 1.5},
    {"adapters": {"a": 0.5, "c": -0.25}, "min_new_tokens": TOKENS, "frequency_penalty": 0.5},
    {"n": 2, "stream_interval": 5, "presence_penalty": 1.0},
    {"n": 2, "best_of": 3, "max_new_tokens": 40},
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp("resume")
    adapters = write_hash_adapters(directory / "adapters")
    os.environ["LORAPLEX_ROUTER_DRAIN_S"] = DRAIN_S
    try:
        async with running_cluster(directory / "cluster", SLOW, adapters, workers=2, routers=2) as running:
            yield running
    finally:
        del os.environ["LORAPLEX_ROUTER_DRAIN_S"]


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    """Of both routers."""
    async with AsyncClient(cluster.local.routers, TENANT) as both:
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
    whole = await client.generate("stop", adapter_id="c", max_new_tokens=TOKENS)
    # A stop string of which two tokens' text is the beginning: they are held back until the third has come.
    stop = "".join(f"<{token}>" for token in whole.token_ids[80:83])
    options = (*OPTIONS, {"adapter_id": "c", "stop": [stop], "logprobs": 0})
    return tuple({"max_new_tokens": TOKENS, **option} for option in options)


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


class Countdown:
    """Set once so many pieces have come."""

    def __init__(self, pieces: int) -> None:
        self.reached = asyncio.Event()
        self._left = pieces

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.reached.set()


async def serving(cluster: Cluster) -> None:
    await cluster.local.wait_serving()


async def test_streams_go_on_where_their_router_was_killed(cluster: Cluster, client: AsyncClient) -> None:
    asks = await asked(client)
    wholes = await asyncio.gather(*(client.generate(prompt_of(options), **options) for options in asks))
    truth = [comparable(whole) for whole in wholes]
    countdown = Countdown(200)
    streams = [client.generate_stream(prompt_of(options), **options) for _ in range(2) for options in asks]
    reads = asyncio.gather(*(read(stream, countdown) for stream in streams))

    def generate() -> Generation:
        with Client(cluster.local.routers, TENANT) as blocking:
            generation: Generation = blocking.generate("prompt", **asks[1])
            return generation

    blocked = asyncio.gather(*(asyncio.to_thread(generate) for _ in range(2)))
    await countdown.reached.wait()
    # Whoever resumes goes on with the revision that it began with.
    async with AsyncStoreClient(cluster.local.store, TENANT) as store:
        adapters = cluster.local.data_dir.parent / "adapters"
        # At once: the streams go on meanwhile, and some are to be running still when their router is killed.
        await asyncio.gather(*(store.push(adapters / other, name) for name, other in ("ab", "bc", "ca")))
    cluster.local.kill("router-1", signal.SIGKILL)
    answers, blocking_answers = await reads, await blocked
    assert [comparable(answer) for answer in answers] == truth * 2
    assert [comparable(answer) for answer in blocking_answers] == [truth[1]] * 2
    resumed = [answer for answer in (*answers, *blocking_answers) if answer.continuations]
    assert 0 < len(resumed) < len(streams) + 2, "the router that was killed had all of them, or none"
    assert all(answer.timings.ttft_s > 0 for answer in resumed)
    # The alias has moved: a new request gets the new revision.
    assert (await client.generate("prompt", **asks[0])).token_ids != truth[0].token_ids
    async with AsyncStoreClient(cluster.local.store, TENANT) as store:
        for name, digest in cluster.digests.items():
            await store.set_alias(name, "live", digest)
    await cluster.local.restart("router-1")
    await serving(cluster)


async def events_of(call: Any) -> list[inference_pb2.GenerateEvent]:
    return [answer.event async for answer in aiter(call)]


def without_times(event: inference_pb2.GenerateEvent) -> inference_pb2.GenerateEvent:
    copy = inference_pb2.GenerateEvent()
    copy.CopyFrom(event)
    copy.resume_token = ""
    if copy.HasField("summary"):
        copy.summary.ClearField("timings")
        copy.summary.ClearField("continuations")
    return copy


class Seen:
    """A client's state after some events: per choice the ids, the text, the log probabilities, and the end."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.ends: dict[int, inference_pb2.Finished] = {}
        self.summary: inference_pb2.GenerateEvent | None = None
        self.token = ""

    def take(self, event: inference_pb2.GenerateEvent) -> None:
        self.token = event.resume_token or self.token
        match event.WhichOneof("kind"):
            case "delta":
                delta = event.delta
                ids = self.ids.setdefault(delta.choice, [])
                assert delta.offset == len(ids)
                ids += delta.token_ids
                self.text[delta.choice] = self.text.get(delta.choice, "") + delta.text
                self.logprobs.setdefault(delta.choice, []).extend(logprob.logprob for logprob in delta.logprobs)
            case "finished":
                assert event.finished.choice not in self.ends
                self.ends[event.finished.choice] = event.finished
            case "summary":
                self.summary = without_times(event)
            case kind:
                raise AssertionError(kind)

    def received(self) -> list[inference_pb2.ReceivedTokens]:
        return [
            inference_pb2.ReceivedTokens(choice=choice, token_ids=ids, finished=choice in self.ends)
            for choice, ids in self.ids.items()
        ]

    def comparable(self) -> tuple[Any, ...]:
        return self.ids, self.text, self.logprobs, self.ends, self.summary


async def test_a_stream_resumes_after_any_of_its_messages(cluster: Cluster, client: AsyncClient) -> None:
    metadata = [("x-loraplex-tenant", TENANT)]
    whole = await client.generate("x", n=3, max_new_tokens=24)
    second = whole.choices[1].token_ids
    stop = f"<{second[10]}><{second[11]}>"
    spec = generate_request("x", {"n": 3, "max_new_tokens": 24, "stop": [stop], "logprobs": 1}).spec
    async with (
        grpc.aio.insecure_channel(cluster.local.routers[0]) as first,
        grpc.aio.insecure_channel(cluster.local.routers[1]) as other,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(first)
        events = await events_of(stub.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=metadata))
        truth = Seen()
        for event in events:
            truth.take(event)
        assert truth.ends[1].stop_string == stop
        assert len(truth.ids[1]) == 10
        assert [bool(event.resume_token) for event in events] == [True] + [False] * (len(events) - 1)

        async def resume_after(count: int) -> None:
            seen = Seen()
            for event in events[:count]:
                seen.take(event)
            request = inference_pb2.ResumeRequest(spec=spec, resume_token=seen.token, received=seen.received())
            resumed = await events_of(inference_pb2_grpc.InferenceServiceStub(other).Resume(request, metadata=metadata))
            assert resumed[-1].summary.continuations == 1
            for event in resumed:
                seen.take(event)
            assert seen.comparable() == truth.comparable()

        assert len(events) > 20
        # The last but one has every end, and only the summary to come.
        for count in (*range(1, len(events), 6), len(events) - 1):
            await resume_after(count)


async def test_tokens_that_are_not_this_request_s_are_refused(cluster: Cluster) -> None:
    metadata = [("x-loraplex-tenant", TENANT)]
    spec = generate_request("x", {"n": 2, "max_new_tokens": 4, "adapter_id": "a"}).spec
    async with grpc.aio.insecure_channel(cluster.local.routers[0]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        first, *_ = await events_of(stub.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=metadata))
        token = first.resume_token
        other = inference_pb2.GenerateSpec()
        other.CopyFrom(spec)
        other.adapter = "b"
        received = inference_pb2.ReceivedTokens
        middle = "A" if token[60] != "A" else "B"
        cases: list[tuple[str, dict[str, Any], str]] = [
            (TENANT, {"resume_token": ""}, "resume_token"),
            (TENANT, {"resume_token": "no token"}, "resume_token"),
            (TENANT, {"resume_token": token[:60] + middle + token[61:]}, "resume_token"),
            ("globex", {}, "resume_token"),
            (TENANT, {"spec": other}, "spec"),
            (TENANT, {"received": [received(choice=2, token_ids=[1])]}, r"received\[0\]\.choice"),
            (TENANT, {"received": [received(choice=1), received(choice=1)]}, r"received\[1\]\.choice"),
            (TENANT, {"received": [received(choice=1, token_ids=[32_000])]}, r"received\[0\]\.token_ids"),
            (TENANT, {"received": [received(choice=0, token_ids=[1] * 5)]}, r"received\[0\]\.token_ids"),
        ]
        for tenant, changes, field in cases:
            request = inference_pb2.ResumeRequest(**{"spec": spec, "resume_token": token, **changes})
            with pytest.raises(grpc.aio.AioRpcError, match=field) as refused:
                await events_of(stub.Resume(request, metadata=[("x-loraplex-tenant", tenant)]))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def jobs_at(address: str) -> list[cluster_pb2.Job]:
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await cluster_pb2_grpc.ClusterServiceStub(channel).ListJobs(cluster_pb2.ListJobsRequest())
        return list(answer.jobs)


async def test_a_second_call_of_an_id_takes_the_first_one_over(cluster: Cluster) -> None:
    options: dict[str, Any] = {"request_id": "mine", "n": 2, "max_new_tokens": TOKENS, "logprobs": 1}
    async with AsyncClient(cluster.local.routers[0], TENANT) as client:
        truth = comparable(await client.generate("prompt", **options))
        older = client.generate_stream("prompt", **options)
        for _ in range(20):
            await anext(older)
        (before,) = await jobs_at(cluster.local.routers[0])
        newer = client.generate_stream("prompt", **options)
        first = await anext(newer)
        assert first.offset == 0
        with pytest.raises(AbortedError) as aborted:
            await older.result()
        assert aborted.value.reason == "TAKEN_OVER"
        with pytest.raises(AlreadyExistsError):
            await client.generate("another prompt", **options)
        (now,) = await jobs_at(cluster.local.routers[0])
        assert (now.job_id, now.attempt) == (before.job_id, 1), "it was computed twice"
        async with AsyncClient(cluster.local.routers[0], "globex") as stranger:
            await stranger.generate("x", request_id="mine", max_new_tokens=1)
        whole = await newer.result()
        assert comparable(whole) == truth
        assert whole.continuations == 0
        assert await jobs_at(cluster.local.routers[0]) == []


async def test_a_resume_takes_over_what_still_runs(cluster: Cluster) -> None:
    """A client whose way to the router broke is back before the router has noticed."""
    metadata = [("x-loraplex-tenant", TENANT)]
    spec = generate_request("prompt", {"max_new_tokens": TOKENS, "logprobs": 1}).spec
    async with grpc.aio.insecure_channel(cluster.local.routers[0]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        seen = Seen()
        older = stub.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=metadata)
        for _ in range(10):
            seen.take((await anext(aiter(older))).event)
        (before,) = await jobs_at(cluster.local.routers[0])
        request = inference_pb2.ResumeRequest(spec=spec, resume_token=seen.token, received=seen.received())
        newer = stub.Resume(request, metadata=metadata)
        seen.take((await anext(aiter(newer))).event)
        (now,) = await jobs_at(cluster.local.routers[0])
        assert now.job_id == before.job_id
        with pytest.raises(grpc.aio.AioRpcError) as aborted:  # after what had come for it before
            await events_of(older)
        assert aborted.value.code() is grpc.StatusCode.ABORTED
        for event in await events_of(newer):
            seen.take(event)
        assert seen.summary is not None
        assert seen.summary.summary.continuations == 0
        assert len(seen.ids[0]) == len(seen.logprobs[0]) == TOKENS


async def test_a_router_that_is_told_to_stop_hands_its_streams_over(cluster: Cluster, client: AsyncClient) -> None:
    options: dict[str, Any] = {"adapter_id": "a", "max_new_tokens": 150}
    truth = comparable(await client.generate("prompt", **options))
    countdown = Countdown(100)
    reads = asyncio.gather(*(read(client.generate_stream("prompt", **options), countdown) for _ in range(6)))
    async with grpc.aio.insecure_channel(cluster.local.routers[0]) as channel:
        health = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(health)).status == health_pb2.HealthCheckResponse.SERVING
        spec = generate_request("prompt", {"max_new_tokens": 20_000}).spec
        plain = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
            inference_pb2.GenerateRequest(spec=spec), metadata=[("x-loraplex-tenant", TENANT)]
        )
        await anext(aiter(plain))
        await countdown.reached.wait()
        cluster.local.kill("router-1", signal.SIGTERM)
        assert (await anext(health)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await events_of(plain)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert b"ROUTER_DRAINING" in dict(ended.value.trailing_metadata())["grpc-status-details-bin"]
    answers = await reads
    assert [comparable(answer) for answer in answers] == [truth] * 6
    assert sum(answer.continuations for answer in answers) > 0
    assert await cluster.local.processes["router-1"].exited == 0
    await cluster.local.restart("router-1")
    await serving(cluster)


async def test_streams_survive_the_death_of_routers_workers_and_redis_together(
    cluster: Cluster, client: AsyncClient, eventually: Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
) -> None:
    local = cluster.local
    options: dict[str, Any] = {"adapter_id": "a", "temperature": 0.5, "seed": 3, "n": 2, "max_new_tokens": 120}
    truth = comparable(await client.generate("prompt", **options))
    countdown = Countdown(100)
    reads = asyncio.gather(*(read(client.generate_stream("prompt", **options), countdown) for _ in range(4)))
    await countdown.reached.wait()
    victims = [name for name in local.processes if name != "store" and not local.processes[name].exited.done()]
    assert sorted(name.partition("-")[0] for name in victims) == ["router", "router", "valkey", "worker", "worker"]
    for name in victims:
        local.kill(name, signal.SIGKILL)
    await asyncio.gather(*(local.processes[name].exited for name in victims))
    await local.restart("valkey")
    await asyncio.gather(local.restart("router-1"), local.restart("router-2"), local.start_worker())
    answers = await reads
    assert [comparable(answer) for answer in answers] == [truth] * 4
    assert all(answer.continuations for answer in answers)
    await eventually(cluster.idle)
