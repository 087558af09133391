"""Values of a model's generation_config.json stand for what requests leave unset, and stay with a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import httpx2
import openai
import pytest
import pytest_asyncio
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.cli.local import LocalCluster
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex_client import AsyncClient, AsyncStoreClient, GenerationConfig
from tests.e2e.conftest import TENANT, Cluster, running_cluster
from tests.hash_oracle import expected_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")

Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
MODEL = "hash:?vocab=32000&seed=1&step_ms=2"
PROMPT, SEED, TOKENS = "prompt", 7, 60
CONFIG = GenerationConfig(
    do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, max_new_tokens=TOKENS
)
# The same as a request's own fields, and as the engine gets them.
EXPLICIT: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
SPEC = pb.GenerateSpec(request_id="mine", prompt=PROMPT, sampling=pb.Sampling(seed=SEED))
# Too long to end while the test runs.
LONG = pb.GenerateSpec(
    request_id="long", prompt=PROMPT, sampling=SPEC.sampling, stopping=pb.Stopping(max_tokens=20_000)
)
METADATA = (("x-loraplex-tenant", TENANT),)


class TwoSettings(LocalCluster):
    """A cluster whose second router leaves models' files alone; the gateway calls the first one."""

    async def _spawn_service(self, name: str, flags: list[str]) -> None:
        more = {"router-2": ["--generation-config", "none"], "gateway": ["--router", self.router]}
        await super()._spawn_service(name, [*flags, *more.get(name, [])])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp("generation-config") / "cluster"
    async with running_cluster(directory, MODEL, {}, routers=2, http=True, launch=TwoSettings) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def proposed(cluster: Cluster, eventually: Eventually) -> None:
    """Register the model with the configuration, and wait until the first router has it."""
    await register(cluster, CONFIG)
    await eventually(lambda: answers_as(cluster.client, EXPLICIT))


async def register(cluster: Cluster, config: GenerationConfig) -> None:
    base = read_base_model(MODEL)
    async with AsyncStoreClient(cluster.local.store, TENANT) as store:
        await store.register_model(replace(registered(base), generation_config=config), base.files, replace=True)


async def answers_as(client: AsyncClient, explicit: dict[str, Any]) -> bool:
    """Tell whether a request without values gets the tokens of one with these."""
    unset = await client.generate(PROMPT, seed=SEED, max_tokens=9)
    return bool(unset.token_ids == oracle(9, **explicit))


def oracle(tokens: int, **sampling: Any) -> tuple[int, ...]:
    return expected_ids(
        MODEL,
        list(PROMPT.encode()),
        sampling=SamplingParams(seed=SEED, **sampling),
        stopping=StoppingParams(max_tokens=tokens),
    )


def text(**sampling: Any) -> str:
    """Return the text of nine tokens."""
    return "".join(chr(token) if token < 256 else f"<{token}>" for token in oracle(9, **sampling))


async def test_unset_fields_are_as_if_the_request_had_the_models_values(cluster: Cluster) -> None:
    async with AsyncClient(cluster.local.routers[1], TENANT) as other:
        for given in ({}, {"top_k": 3}, {"temperature": 0.0}, {"temperature": 0.9, "repetition_penalty": 1.0}):
            values = {"repetition_penalty": 1.05} if given == {"temperature": 0.0} else EXPLICIT
            unset = await cluster.client.generate(PROMPT, seed=SEED, **given)
            assert unset.token_ids == oracle(TOKENS, **(values | given))
            explicit = {**values, **given, "seed": SEED, "max_tokens": TOKENS}
            for client in (cluster.client, other):
                assert (await client.generate(PROMPT, **explicit)).token_ids == unset.token_ids
            # Of the router with --generation-config none.
            assert (await other.generate(PROMPT, seed=SEED, **given)).token_ids == oracle(128, **given)


async def test_programs_of_lorax_stay_greedy_unless_they_ask_for_sampling(cluster: Cluster) -> None:
    async with httpx2.AsyncClient(headers={"x-loraplex-tenant": TENANT}) as client:
        for given, values in (
            ({}, {"repetition_penalty": 1.05}),
            ({"do_sample": True}, EXPLICIT | {"temperature": 1.0}),
        ):
            parameters = {"seed": SEED, "max_new_tokens": 9, **given}
            body = {"inputs": PROMPT, "parameters": parameters}
            answer = await client.post(f"http://{cluster.local.http}/generate", json=body)
            assert answer.json() == {"generated_text": text(**values)}


async def test_a_request_over_http_gets_the_models_temperature_before_openais(
    cluster: Cluster, eventually: Eventually
) -> None:
    async def complete(**given: Any) -> str:
        answer = await client.completions.create(model="hash", prompt=PROMPT, max_tokens=9, seed=SEED, **given)
        return str(answer.choices[0].text)

    extra = {name: EXPLICIT[name] for name in ("top_k", "repetition_penalty")}
    headers = {"x-loraplex-tenant": TENANT}
    async with openai.AsyncOpenAI(
        base_url=f"http://{cluster.local.http}/v1", api_key="none", default_headers=headers, max_retries=0
    ) as client:
        assert await complete() == text(**EXPLICIT)
        assert await complete(temperature=0.6, top_p=0.95, extra_body=extra) == text(**EXPLICIT)
        assert await complete(temperature=0) == text(repetition_penalty=1.05)
        assert await complete(extra_body={"top_k": -1}) == text(**(EXPLICIT | {"top_k": 0}))
        # A model that says nothing of its temperature leaves OpenAI's.
        await register(cluster, GenerationConfig(repetition_penalty=1.5))
        await eventually(lambda: answers_as(cluster.client, {"repetition_penalty": 1.5}))
        assert await complete() == text(temperature=1.0, repetition_penalty=1.5)


@pytest.mark.parametrize("first", [0, 1])
async def test_a_stream_goes_on_as_it_began_wherever_it_is_resumed(
    cluster: Cluster, eventually: Eventually, first: int
) -> None:
    """At a router with the other setting, and after the model was registered with other values."""
    truth = oracle(TOKENS, **EXPLICIT) if first == 0 else oracle(128)
    async with grpc.aio.insecure_channel(cluster.local.routers[first]) as channel:
        token, began = await begin(channel)
    assert began == truth[: len(began)]
    async with grpc.aio.insecure_channel(cluster.local.routers[1 - first]) as channel:
        token, more = await rest(channel, token, began, stop_after=10)
    began += more
    assert len(began) < len(truth)
    await register(cluster, GenerationConfig(do_sample=True, temperature=2.0, max_new_tokens=5))
    await eventually(lambda: answers_as(cluster.client, {"temperature": 2.0}))
    for address in cluster.local.routers:
        async with grpc.aio.insecure_channel(address) as channel:
            _, more = await rest(channel, token, began)
        assert began + more == truth


async def test_a_call_with_the_same_id_takes_over_what_was_admitted(cluster: Cluster, eventually: Eventually) -> None:
    async with grpc.aio.insecure_channel(cluster.local.router) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        older = stub.Generate(pb.GenerateRequest(spec=LONG), metadata=METADATA)
        began = asyncio.Event()
        reading = asyncio.create_task(read(older, on_token=began.set))
        await began.wait()
        await register(cluster, GenerationConfig(do_sample=True, temperature=2.0))
        await eventually(lambda: answers_as(cluster.client, {"temperature": 2.0}))
        _, ids = await read(stub.Generate(pb.GenerateRequest(spec=LONG), metadata=METADATA), 300)
        with pytest.raises(grpc.aio.AioRpcError, match="took it over"):
            await reading
    assert ids == oracle(len(ids), **EXPLICIT)


async def begin(channel: grpc.aio.Channel) -> tuple[str, tuple[int, ...]]:
    """Read the beginning of a stream and leave it; return its resume token and the ids."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return await read(stub.Generate(pb.GenerateRequest(spec=SPEC), metadata=METADATA), 5)


async def rest(
    channel: grpc.aio.Channel, token: str, ids: tuple[int, ...], stop_after: int = 0
) -> tuple[str, tuple[int, ...]]:
    """Resume a stream after these ids; return its new resume token and the ids that follow."""
    received = [pb.ReceivedTokens(choice=0, token_ids=ids)]
    request = pb.ResumeRequest(spec=SPEC, resume_token=token, received=received)
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return await read(stub.Resume(request, metadata=METADATA), stop_after)


async def read(
    stream: Any, stop_after: int = 0, on_token: Callable[[], None] = lambda: None
) -> tuple[str, tuple[int, ...]]:
    """Read a stream, to its end or until so many ids have come; return its resume token and the ids."""
    token, ids = "", list[int]()
    async with aclosing(aiter(stream)) as responses:
        async for response in responses:
            token = token or response.event.resume_token
            ids += response.event.delta.token_ids
            on_token()
            if stop_after and len(ids) >= stop_after:
                stream.cancel()
                break
    return token, tuple(ids)
