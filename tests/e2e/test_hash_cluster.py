"""The whole path with the hash model: every token that is lost, repeated or of another adapter would show."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc
from loraplex_client import (
    AlreadyExistsError,
    AsyncClient,
    DeadlineExceededError,
    FinishReason,
    InvalidRequestError,
    NotFoundError,
    NotImplementedByServerError,
    UnavailableError,
)

from worker.engine.hash_tokens import expected_ids
from worker.engine_api import Sampling, Stopping

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
FAST = "hash:?vocab=32000&seed=1"
SLOW = "hash:?vocab=32000&seed=1&step_ms=5"


def expected(model: str, prompt: str, digest: str, max_tokens: int, sampling: Sampling | None = None) -> list[int]:
    ids = expected_ids(
        model, list(prompt.encode()), adapter_digest=digest, sampling=sampling, stopping=Stopping(max_tokens=max_tokens)
    )
    return list(ids)


async def test_every_client_gets_its_adapter_s_tokens(
    start_cluster: StartCluster, hash_adapters: Mapping[str, Path]
) -> None:
    async with start_cluster(FAST, hash_adapters, workers=2) as cluster:

        async def ask(number: int) -> None:
            name = ("a", "b", "c", None)[number % 4]
            prompt, length = f"prompt {number} " * (1 + number % 7), 1 + number * 13 % 200
            answer = await cluster.client.generate(prompt, adapter_id=name, max_new_tokens=length)
            digest = cluster.digests[name] if name else ""
            assert list(answer.token_ids) == expected(FAST, prompt, digest, length)
            assert answer.finish_reason is FinishReason.LENGTH
            assert answer.usage.completion_tokens == length
            assert answer.usage.prompt_tokens == len(prompt)
            assert answer.adapter_revision.rpartition("/")[2] == digest

        await asyncio.gather(*(ask(number) for number in range(100)))


async def test_a_seed_gives_the_same_tokens_again(
    start_cluster: StartCluster, hash_adapters: Mapping[str, Path]
) -> None:
    async with start_cluster(FAST, hash_adapters) as cluster:
        options = {"adapter_id": "a", "max_new_tokens": 20, "temperature": 0.5, "top_k": 7, "top_p": 0.25, "seed": 9}
        answers = [await cluster.client.generate("x", **options) for _ in range(2)]
        sampling = Sampling(temperature=0.5, top_k=7, top_p=0.25, seed=9)
        truth = expected(FAST, "x", cluster.digests["a"], 20, sampling)
        assert [list(answer.token_ids) for answer in answers] == [truth, truth]
        unseeded = [await cluster.client.generate("x", max_new_tokens=20, temperature=1.0) for _ in range(2)]
        assert unseeded[0].token_ids != unseeded[1].token_ids


async def test_stop_strings_end_the_answer_and_free_the_worker(
    start_cluster: StartCluster, eventually: Eventually
) -> None:
    async with start_cluster(SLOW, {}) as cluster:
        whole = await cluster.client.generate("stop", max_new_tokens=40)
        stop = f"<{whole.token_ids[20]}>"
        answer = await cluster.client.generate("stop", max_new_tokens=4000, stop=[stop])
        assert answer.token_ids == whole.token_ids[:20]
        assert (answer.finish_reason, answer.stop) == (FinishReason.STOP, stop)
        assert answer.usage.completion_tokens == 20
        await eventually(cluster.idle)


@pytest.mark.parametrize("victim", ["worker", "engine"])
async def test_killing_a_worker_in_mid_stream_changes_no_token(
    start_cluster: StartCluster, hash_adapters: Mapping[str, Path], victim: str, eventually: Eventually
) -> None:
    # Fewer rows than jobs: both workers hold some.
    async with start_cluster(SLOW, hash_adapters, workers=2, worker_flags=("--rows", "16")) as cluster:
        started = asyncio.Event()
        count = 0

        async def ask(number: int) -> int:
            nonlocal count
            name = "abc"[number % 3]
            prompt, total = f"prompt {number}", 0
            got: list[int] = []
            async for piece in cluster.client.generate_stream(prompt, adapter_id=name, max_new_tokens=150):
                assert piece.offset == len(got)
                got += piece.token_ids
                count += 1
                if count == 400:
                    started.set()
                if piece.finished:
                    total = piece.finished.continuations
            assert got == expected(SLOW, prompt, cluster.digests[name], 150)
            return total

        asks = asyncio.gather(*(ask(number) for number in range(24)))
        await started.wait()
        if victim == "worker":
            cluster.local.kill("worker-1", signal.SIGKILL)
        else:
            (state,) = [w for w in await cluster.workers() if w.pid == cluster.local.processes["worker-1"].pid]
            os.kill(state.engine_pid, signal.SIGKILL)
        continuations = await asks
        assert sum(continuations) > 0, "the killed worker held nothing"
        await eventually(cluster.idle)


async def test_cancelling_half_of_200_leaves_nothing_behind(
    start_cluster: StartCluster, hash_adapters: Mapping[str, Path], eventually: Eventually
) -> None:
    seed = 5
    print(f"seed {seed}")
    rng = random.Random(seed)
    leaves_after = {number: rng.randrange(1, 60) for number in rng.sample(range(200), 100)}
    async with start_cluster(SLOW, hash_adapters, workers=2) as cluster:

        async def ask(number: int) -> str:
            name, prompt = "abc"[number % 3], f"prompt {number}"
            got: list[int] = []
            async with cluster.client.generate_stream(prompt, adapter_id=name, max_new_tokens=60) as stream:
                async for piece in stream:
                    got += piece.token_ids
                    if len(got) >= leaves_after.get(number, 1000):
                        break
            truth = expected(SLOW, prompt, cluster.digests[name], 60)
            assert got == truth[: len(got)]
            return "left" if len(got) < 60 else "whole"

        outcomes = await asyncio.gather(*(ask(number) for number in range(200)))
        assert outcomes.count("whole") >= 100
        assert outcomes.count("left") >= 90  # one that left at its last token is whole
        await eventually(cluster.idle)


async def test_a_deadline_ends_the_work(start_cluster: StartCluster, eventually: Eventually) -> None:
    async with start_cluster(SLOW, {}) as cluster:
        got: list[int] = []

        async def read() -> None:
            async for piece in cluster.client.generate_stream("x", max_new_tokens=20_000, timeout_s=1.0):
                got.extend(piece.token_ids)

        with pytest.raises(DeadlineExceededError):
            await read()
        assert got
        assert got == expected(SLOW, "x", "", len(got))
        await eventually(cluster.idle)


async def test_bad_requests_get_the_status_of_the_table(
    start_cluster: StartCluster, hash_adapters: Mapping[str, Path]
) -> None:
    async with start_cluster(FAST, hash_adapters) as cluster:
        client = cluster.client
        cases: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"adapter_id": "nobody"}, NotFoundError, "nobody"),
            ({"adapter_id": "tenants/globex/adapters/a"}, NotFoundError, "tenants/globex/adapters/a"),
            ({"adapter_id": "Not A Name"}, InvalidRequestError, "adapter"),
            ({"model": "other"}, NotFoundError, "other"),
            ({"top_p": 1.5}, InvalidRequestError, "sampling.top_p"),
            ({"temperature": -1.0}, InvalidRequestError, "sampling.temperature"),
            ({"max_new_tokens": 0}, InvalidRequestError, "stopping.max_tokens"),
            ({"max_new_tokens": 10**6}, InvalidRequestError, "context"),
            ({"stop": [""]}, InvalidRequestError, "stopping.stop"),
            ({"stop_token_ids": [40_000]}, InvalidRequestError, "stopping.stop_token_ids"),
            ({"repetition_penalty": 0.0}, InvalidRequestError, "sampling.repetition_penalty"),
            ({"frequency_penalty": 3.0}, InvalidRequestError, "sampling.frequency_penalty"),
            ({"presence_penalty": -2.5}, InvalidRequestError, "sampling.presence_penalty"),
            ({"min_p": 2.0}, InvalidRequestError, "sampling.min_p"),
            ({"typical_p": 0.0}, InvalidRequestError, "sampling.typical_p"),
            ({"logit_bias": {40_000: 1.0}}, InvalidRequestError, "sampling.logit_bias"),
            ({"logit_bias": {1: 101.0}}, InvalidRequestError, "sampling.logit_bias"),
            ({"logit_bias": dict.fromkeys(range(301), 1.0)}, InvalidRequestError, "sampling.logit_bias"),
            ({"n": 17}, InvalidRequestError, "output.n"),
            ({"n": 3, "best_of": 2}, InvalidRequestError, "output.best_of"),
            ({"logprobs": 21}, InvalidRequestError, "output.logprobs"),
            ({"echo": True}, NotImplementedByServerError, "output.echo"),
        ]
        for options, error, names in cases:
            with pytest.raises(error, match=names):
                await client.generate("x", **options)
        with pytest.raises(InvalidRequestError, match="prompt"):
            await client.generate("")
        with pytest.raises(InvalidRequestError, match="beyond the vocabulary"):
            await client.generate(token_ids=[99_999])
        async with AsyncClient(cluster.local.router, "globex") as stranger:
            with pytest.raises(NotFoundError) as theirs:
                await stranger.generate("x", adapter_id="tenants/acme/adapters/a")
            with pytest.raises(NotFoundError) as nobodys:
                await stranger.generate("x", adapter_id="tenants/acme/adapters/z")
        assert str(theirs.value).replace("adapters/a", "adapters/z") == str(nobodys.value)
        answer = await client.generate("x", adapter_id="a", max_new_tokens=5)
        assert list(answer.token_ids) == expected(FAST, "x", cluster.digests["a"], 5)


async def test_a_call_without_a_tenant_is_refused(start_cluster: StartCluster) -> None:
    async with start_cluster(FAST, {}) as cluster, grpc.aio.insecure_channel(cluster.local.router) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        spec = inference_pb2.GenerateSpec(prompt="x")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(inference_pb2.GenerateRequest(spec=spec)):
                pass
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_tells_whether_work_can_be_served(start_cluster: StartCluster) -> None:
    async with start_cluster(FAST, {}) as cluster, grpc.aio.insecure_channel(cluster.local.router) as channel:
        changes = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(changes)).status == health_pb2.HealthCheckResponse.SERVING
        cluster.local.kill("worker-1", signal.SIGKILL)
        assert (await anext(changes)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(UnavailableError, match="no worker"):
            await cluster.client.generate("x")
        await cluster.local.start_worker()
        assert (await anext(changes)).status == health_pb2.HealthCheckResponse.SERVING
        answer = await cluster.client.generate("x", max_new_tokens=5)
        assert list(answer.token_ids) == expected(FAST, "x", "", 5)


async def test_a_worker_that_is_told_to_stop_hands_its_work_over(start_cluster: StartCluster) -> None:
    flags = ("--rows", "8", "--drain-s", "0.2")
    async with start_cluster(SLOW, {}, workers=2, worker_flags=flags) as cluster:
        streams = [cluster.client.generate_stream(f"prompt {number}", max_new_tokens=300) for number in range(12)]
        firsts = [await anext(stream) for stream in streams]
        cluster.local.kill("worker-1", signal.SIGTERM)
        wholes = [await stream.result() for stream in streams]
        for number, (first, whole) in enumerate(zip(firsts, wholes, strict=True)):
            assert first.offset == 0
            assert list(whole.token_ids) == expected(SLOW, f"prompt {number}", "", 300)
        assert await cluster.local.processes["worker-1"].exited == 0
        assert sum(whole.continuations for whole in wholes) > 0


async def test_the_launcher_replaces_a_worker_that_died(start_cluster: StartCluster) -> None:
    async with start_cluster(SLOW, {}) as cluster:
        stream = cluster.client.generate_stream("x", max_new_tokens=200)
        await anext(stream)
        os.kill(cluster.local.processes["worker-1"].pid, signal.SIGKILL)
        whole = await stream.result()
        assert list(whole.token_ids) == expected(SLOW, "x", "", 200)
        assert whole.continuations > 0


async def test_several_choices_survive_a_killed_worker(start_cluster: StartCluster, eventually: Eventually) -> None:
    async with start_cluster(SLOW, {}, workers=2, worker_flags=("--rows", "6")) as cluster:
        streams = [cluster.client.generate_stream(f"prompt {number}", n=4, max_new_tokens=100) for number in range(2)]
        for stream in streams:
            await anext(stream)
        cluster.local.kill("worker-1", signal.SIGKILL)
        wholes = [await stream.result() for stream in streams]
        for number, whole in enumerate(wholes):
            prompt = list(f"prompt {number}".encode())
            truth = [expected_ids(SLOW, prompt, stopping=Stopping(max_tokens=100), choice=c) for c in range(4)]
            assert [choice.token_ids for choice in whole.choices] == truth
            assert whole.usage.completion_tokens == 400
        assert sum(whole.continuations for whole in wholes) > 0
        await eventually(cluster.idle)


async def test_a_stop_string_ends_its_own_choice_alone(start_cluster: StartCluster, eventually: Eventually) -> None:
    async with start_cluster(SLOW, {}) as cluster:
        truth = [expected_ids(SLOW, [ord("x")], stopping=Stopping(max_tokens=40), choice=c) for c in range(3)]
        answer = await cluster.client.generate("x", n=3, max_new_tokens=40, stop=[f"<{truth[1][10]}>"])
        assert [choice.token_ids for choice in answer.choices] == [truth[0], truth[1][:10], truth[2]]
        await eventually(cluster.idle)


async def test_an_id_that_is_used_again_at_once_gets_its_own_tokens(
    start_cluster: StartCluster, eventually: Eventually
) -> None:
    async with start_cluster(SLOW, {}, workers=2, worker_flags=("--rows", "4")) as cluster:

        async def ask_and_leave_and_ask(number: int) -> None:
            for turn in range(5):
                prompt = f"prompt {number} {turn}"
                options = {"request_id": f"same {number}", "max_new_tokens": 30}
                while True:
                    try:
                        async with cluster.client.generate_stream(prompt, **options) as stream:
                            first = await anext(stream)
                            if turn % 2 == 0:
                                break  # leaves in mid-stream, and the next turn comes at once
                            whole = await stream.result()
                            assert list(whole.token_ids) == expected(SLOW, prompt, "", 30)
                            break
                    except AlreadyExistsError:  # the router has not yet seen that the last one left
                        await asyncio.sleep(0.01)
                assert first.token_ids[0] == expected(SLOW, prompt, "", 1)[0]

        async with asyncio.timeout(60):
            await asyncio.gather(*(ask_and_leave_and_ask(number) for number in range(8)))
        await eventually(cluster.idle)


async def test_logprobs_arrive_and_tell_the_best_of_several(start_cluster: StartCluster) -> None:
    async with start_cluster(FAST, {}) as cluster:
        options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "frequency_penalty": 0.5, "logprobs": 2}
        several = await cluster.client.generate("x", n=4, **options)
        for choice in several.choices:
            likeliest = [(token, one.logprob) for token, one in zip(choice.token_ids, choice.logprobs, strict=True)]
            assert [one.alternatives[0] for one in choice.logprobs] == likeliest
            assert all(len(one.alternatives) == 2 for one in choice.logprobs)
        ranked = sorted(several.choices, key=lambda choice: -sum(one.logprob for one in choice.logprobs))
        best = await cluster.client.generate("x", n=2, best_of=4, **options)
        assert [choice.token_ids for choice in best.choices] == [choice.token_ids for choice in ranked[:2]]
        spec = inference_pb2.GenerateSpec(prompt="prompt", output=inference_pb2.Output(prompt_logprobs=3))
        async with grpc.aio.insecure_channel(cluster.local.router) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=[("x-loraplex-tenant", "acme")])
            events = [answer.event async for answer in call]
        kinds = [event.WhichOneof("kind") for event in events]
        assert kinds[0] == "prompt_logprobs"
        assert kinds.count("prompt_logprobs") == 1
        told = events[0].prompt_logprobs.tokens
        assert [one.alternatives[0].token_id for one in told] == list(b"prompt"[1:])
        assert all(len(one.alternatives) == 3 for one in told)


async def test_operators_see_the_jobs_and_queues(start_cluster: StartCluster) -> None:
    async with start_cluster(SLOW, {}) as cluster, grpc.aio.insecure_channel(cluster.local.router) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        async with cluster.client.generate_stream("x", max_new_tokens=20_000) as stream:
            await anext(stream)
            (job,) = (await stub.ListJobs(cluster_pb2.ListJobsRequest())).jobs
            assert (job.tenant, job.attempt, job.prompt_tokens) == ("acme", 1, 1)
            assert job.worker_id == (await cluster.workers())[0].worker_id
            assert job.completion_tokens >= 1
            (queue,) = (await stub.ListQueues(cluster_pb2.ListQueuesRequest())).queues
            assert (queue.model, queue.waiting) == ("hash", 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.DrainWorker(cluster_pb2.DrainWorkerRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
