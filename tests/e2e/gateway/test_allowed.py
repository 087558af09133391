"""Plans that allow some adapters and models, at every door: gRPC calls of each kind, HTTP, and lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.runtime.rpc.principal import TENANT_KEY
from loraplex_client import AsyncStoreClient
from tests.e2e.conftest import Cluster, write_hash_adapters
from tests.e2e.gateway.conftest import MESSAGES, Eventually
from tests.plans_file import set_plans

pytestmark = pytest.mark.asyncio(loop_scope="package")
TENANT = "narrow"
METADATA = ((TENANT_KEY, TENANT),)
REFUSED, ANSWERED = "PERMISSION_DENIED", "OK"


async def code_of(stub: Any, method: str, request: Any) -> str:
    """Return the code that a call ends with."""
    call = getattr(stub, method)(request, metadata=METADATA)
    try:
        if hasattr(call, "read"):
            _ = [message async for message in call]
        else:
            await call
    except grpc.aio.AioRpcError:
        pass
    return str((await call.code()).name)


async def codes(stub: Any, **names: Any) -> set[str]:
    """Return the codes of calls of every kind that name these models and adapters."""
    scored, texts = pb.GenerateSpec(**names, prompt="x"), pb.EncodeSpec(**names, inputs=[pb.EncodeInput(text="x")])
    generated = pb.GenerateSpec(**names, prompt="x", stopping=pb.Stopping(max_tokens=2))
    requests = {
        "Generate": pb.GenerateRequest(spec=generated),
        "CountTokens": pb.CountTokensRequest(spec=scored),
        "Score": pb.ScoreRequest(spec=scored, continuations=[pb.Continuation(text="y")]),
        "Rerank": pb.RerankRequest(**names, query="x", documents=["y"], yes="y", no="n"),
        "Embed": pb.EmbedRequest(spec=texts),
    }
    if "adapters" not in names:  # these take no weighted set
        requests |= {"Classify": pb.ClassifyRequest(spec=texts), "Tokenize": pb.TokenizeRequest(**names, prompt="x")}
    return {await code_of(stub, method, request) for method, request in requests.items()}


async def test_calls_use_what_plans_allow(
    cluster: Cluster, client: openai.AsyncOpenAI, eventually: Eventually, tmp_path: Path
) -> None:
    narrow = client.with_options(default_headers={"x-loraplex-tenant": TENANT})

    async def hold(**refused: Any) -> None:
        """Wait until both routers have read the plans."""

        async def have_read() -> bool:
            request = pb.TokenizeRequest(**refused, prompt="x")
            return {await code_of(one, "Tokenize", request) for one in (stub, other)} == {REFUSED}

        await eventually(have_read)

    async def listed() -> list[str]:
        return [model.id async for model in narrow.models.list()]

    async with AsyncStoreClient(cluster.local.store, TENANT) as store:
        for name, files in write_hash_adapters(tmp_path).items():
            await store.push(files, name)
        channel, second = map(grpc.aio.insecure_channel, cluster.local.routers)
        async with channel, second:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            other: Any = inference_pb2_grpc.InferenceServiceStub(second)
            spec = pb.GenerateSpec(request_id="begun", adapter="b", prompt="x", stopping=pb.Stopping(max_tokens=500))
            begun = stub.Generate(pb.GenerateRequest(spec=spec), metadata=METADATA)
            token = (await begun.read()).event.resume_token
            plan = f'[tenants.{TENANT}]\nallowed_adapters = ["a", "tenants/shared/adapters/*"]\n'
            await set_plans(cluster.local.store, plan)
            await hold(adapter="b")
            assert await listed() == ["hash", "a"]
            assert [one.name.rpartition("/")[2] for one in await store.list()] == ["a", "b", "c"]

            pair = [pb.WeightedAdapter(adapter="a", weight=1), pb.WeightedAdapter(adapter="b", weight=1)]
            own = f"tenants/{TENANT}/adapters/"
            for allowed in ({"adapter": "a"}, {"adapter": f"{own}a@live"}, {}):
                assert await codes(stub, **allowed) == {ANSWERED}
            for refused in ({"adapter": "b"}, {"adapter": f"{own}b@live"}, {"adapters": pair}):
                assert await codes(stub, **refused) == {REFUSED}
            resumed = pb.ResumeRequest(spec=spec, resume_token=token)
            assert await code_of(stub, "Resume", resumed) == REFUSED  # while it runs here
            assert await code_of(other, "Resume", resumed) == REFUSED
            begun.cancel()
            assert (await narrow.chat.completions.create(model="a", messages=MESSAGES, max_tokens=2)).choices
            with pytest.raises(openai.PermissionDeniedError, match=r"adapters/b is not among allowed_adapters"):
                await narrow.chat.completions.create(model="b", messages=MESSAGES, max_tokens=2)

            await set_plans(cluster.local.store, f'[tenants.{TENANT}]\nallowed_models = ["other"]\n')
            await hold(adapter="a")
            assert await listed() == []
            for refused in ({"adapter": "a"}, {"model": "hash"}, {}):
                assert await codes(stub, **refused) == {REFUSED}
            assert await code_of(stub, "Detokenize", pb.DetokenizeRequest(token_ids=[1])) == REFUSED
