"""The cluster that the tests of this folder share; each leaves it idle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import openai
import pytest
import pytest_asyncio

from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.runtime.rpc.settings import is_installed
from tests.e2e.conftest import TENANT, Cluster, running_cluster, write_hash_adapters
from tests.hash_oracle import expected_ids

Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
MODEL = "hash:?vocab=32000&seed=1&step_ms=5"
ENGINE_PROTOCOL = ("--engine-protocol", "sglang,vllm", "--engine-tenant", TENANT, "--engine-adapter", "a")
HEADERS = {"x-loraplex-tenant": TENANT}
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
# The prompt that the hash model's template makes of these.
PROMPT = "user: Hi\nassistant: "


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two routers, two workers, a gateway, and the adapters a, b and c.

    Where its package is installed, the routers serve the engine protocol, to tenant acme and with adapter a.
    """
    flags = ENGINE_PROTOCOL if is_installed("smg_grpc_proto") else ()
    directory = tmp_path_factory.mktemp("gateway")
    adapters = write_hash_adapters(directory / "adapters")
    sources = directory / "sources.toml"
    sources.write_text(f'[[source]]\nprefix = "file://{directory}/adapters"\n')
    async with running_cluster(
        directory / "cluster",
        MODEL,
        adapters,
        workers=2,
        routers=2,
        http=True,
        router_flags=flags,
        store_flags=("--sources", str(sources)),
    ) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="package")
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client, of tenant acme."""
    async with openai.AsyncOpenAI(
        base_url=f"http://{cluster.local.http}/v1", api_key="none", default_headers=HEADERS, max_retries=0
    ) as own:
        yield own


@pytest_asyncio.fixture(loop_scope="package")
async def stub(cluster: Cluster) -> AsyncIterator[Any]:
    """Sglang's protocol at the first router, without any metadata. For tests that skip without its package."""
    from smg_grpc_proto import sglang_scheduler_pb2_grpc

    async with grpc.aio.insecure_channel(cluster.local.router) as channel:
        yield sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel)


@pytest_asyncio.fixture(loop_scope="package")
async def vllm_stub(cluster: Cluster) -> AsyncIterator[Any]:
    """VLLM's protocol at the first router, as `stub`."""
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    async with grpc.aio.insecure_channel(cluster.local.router) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def expected(prompt: str, digest: str, max_tokens: int, sampling: SamplingParams | None = None, choice: int = 0) -> str:
    """Return the text that the engine's ids make."""
    ids = expected_ids(
        MODEL,
        list(prompt.encode()),
        adapter_digest=digest,
        sampling=sampling,
        stopping=StoppingParams(max_tokens=max_tokens),
        choice=choice,
    )
    return "".join(chr(token) if token < 256 else f"<{token}>" for token in ids)
