"""Refusals of requests, and what operators see of those that run."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc

from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from loraplex_client import AsyncClient, InvalidRequestError, NotFoundError
from tests.e2e.answers.conftest import expected
from tests.e2e.conftest import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_bad_requests_get_the_status_of_the_table(cluster: Cluster) -> None:
    client = cluster.client
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"adapter_id": "nobody"}, NotFoundError, "nobody"),
        ({"adapter_id": "tenants/globex/adapters/a"}, NotFoundError, "tenants/globex/adapters/a"),
        ({"adapter_id": "Not A Name"}, InvalidRequestError, "adapter"),
        ({"model": "other"}, NotFoundError, "other"),
        ({"top_p": 1.5}, InvalidRequestError, "sampling.top_p"),
        ({"temperature": -1.0}, InvalidRequestError, "sampling.temperature"),
        ({"max_tokens": 10**6}, InvalidRequestError, "context"),
        ({"stop": [""]}, InvalidRequestError, "stopping.stop"),
        ({"stop_token_ids": [40_000]}, InvalidRequestError, "stopping.stop_token_ids"),
        ({"repetition_penalty": 0.0}, InvalidRequestError, "sampling.repetition_penalty"),
        ({"frequency_penalty": 3.0}, InvalidRequestError, "sampling.frequency_penalty"),
        ({"presence_penalty": -2.5}, InvalidRequestError, "sampling.presence_penalty"),
        ({"min_p": 2.0}, InvalidRequestError, "sampling.min_p"),
        ({"allowed_token_ids": [1, 1 << 20]}, InvalidRequestError, "sampling.allowed_token_ids"),
        ({"allowed_token_ids": [1, 2], "regex": "a+"}, InvalidRequestError, "sampling.allowed_token_ids"),
        ({"bad_words": ["a"], "regex": "a+"}, InvalidRequestError, "sampling.bad_words"),
        ({"typical_p": 0.0}, InvalidRequestError, "sampling.typical_p"),
        ({"logit_bias": {40_000: 1.0}}, InvalidRequestError, "sampling.logit_bias"),
        ({"logit_bias": {1: 101.0}}, InvalidRequestError, "sampling.logit_bias"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, InvalidRequestError, "sampling.logit_bias"),
        ({"n": 17}, InvalidRequestError, "output.n"),
        ({"n": 3, "best_of": 2}, InvalidRequestError, "output.best_of"),
        ({"logprobs": 21}, InvalidRequestError, "output.logprobs"),
        ({"regex": "(?=a)"}, InvalidRequestError, "regex: look-around"),
        (
            {"json_schema": '{"properties": {"a": {"not": {}}}}'},
            InvalidRequestError,
            "properties.a.not",
        ),
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
    answer = await client.generate("x", adapter_id="a", max_tokens=5)
    assert list(answer.token_ids) == expected("x", cluster.digests["a"], 5)


async def test_a_call_without_a_tenant_is_refused(cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(cluster.local.router) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        spec = inference_pb2.GenerateSpec(prompt="x")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(inference_pb2.GenerateRequest(spec=spec)):
                pass
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_operators_see_the_jobs_and_queues(cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(cluster.local.router) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        async with cluster.client.generate_stream("x", max_tokens=20_000) as stream:
            await anext(stream)
            (job,) = (await stub.ListJobs(cluster_pb2.ListJobsRequest())).jobs
            assert (job.tenant, job.attempt, job.prompt_tokens) == ("acme", 1, 1)
            assert job.worker_id in {worker.worker_id for worker in await cluster.workers()}
            assert job.completion_tokens >= 1
            (queue,) = (await stub.ListQueues(cluster_pb2.ListQueuesRequest())).queues
            assert (queue.model, queue.waiting) == ("hash", 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.DrainWorker(cluster_pb2.DrainWorkerRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
