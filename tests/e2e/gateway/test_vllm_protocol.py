"""vLLM's engine protocol by its own stubs: every RPC, every field that is refused, and the gauges of pickers."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from typing import Any

import grpc
import pytest

from loraplex.contracts.options import Encode, SamplingParams, StoppingParams
from tests.e2e.conftest import TENANT, Cluster
from tests.e2e.gateway.conftest import MODEL, Eventually
from tests.hash_oracle import expected_ids, expected_vector

pytest.importorskip("smg_grpc_proto", reason="the engine protocol's package is not installed: pip install '.[smg]'")

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.e2e.gateway.engine_calls import PROMPT, answers, refused

pytestmark = pytest.mark.asyncio(loop_scope="package")


def asked(max_tokens: int = 12, /, *, params: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return a greedy request."""
    sampling = pb.SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **(params or {})})
    return pb.GenerateRequest(
        **{"tokenized": pb.TokenizedInput(input_ids=PROMPT), "sampling_params": sampling} | fields
    )


def ids_of(digest: str, max_tokens: int = 12, sampling: SamplingParams | None = None) -> list[int]:
    """Return the engine's ids."""
    stopping = StoppingParams(max_tokens=max_tokens)
    return list(expected_ids(MODEL, PROMPT, adapter_digest=digest, sampling=sampling, stopping=stopping))


async def test_whole_answers_have_the_ids_of_the_adapter(vllm_stub: Any, cluster: Cluster) -> None:
    (whole,) = await answers(vllm_stub, asked(request_id="v"))
    assert list(whole.output_ids) == ids_of(cluster.digests["a"])
    assert (whole.finish_reason, whole.prompt_tokens, whole.completion_tokens) == ("length", len(PROMPT), 12)
    text = "".join(chr(token) for token in PROMPT[:2])
    (of_text,) = await answers(vllm_stub, asked(tokenized=None, text=text))
    (of_ids,) = await answers(vllm_stub, asked(tokenized=pb.TokenizedInput(input_ids=PROMPT[:2])))
    (cut,) = await answers(
        vllm_stub,
        asked(tokenized=pb.TokenizedInput(input_ids=[7, *PROMPT[:2]]), params={"truncate_prompt_tokens": 2}),
    )
    assert list(of_text.output_ids) == list(of_ids.output_ids) == list(cut.output_ids)
    sampling = SamplingParams(temperature=0.7, seed=5)
    (drawn,) = await answers(vllm_stub, asked(params={"temperature": 0.7, "seed": 5}))
    assert list(drawn.output_ids) == ids_of(cluster.digests["a"], sampling=sampling)


async def test_a_stream_has_each_id_once_and_ends_with_the_whole_answers(vllm_stub: Any) -> None:
    params = {"temperature": 0.5, "top_k": 7, "n": 2, "logprobs": 2, "prompt_logprobs": 1}
    ids: dict[int, list[int]] = {0: [], 1: []}
    whole: dict[int, list[int]] = {}
    async for message in vllm_stub.Generate(asked(20, params=params, stream=True)):
        if message.WhichOneof("response") == "complete":
            done = message.complete
            whole[done.index] = list(done.output_ids)
            assert list(done.output_logprobs.token_ids) == whole[done.index]
            continue
        chunk = message.chunk
        first = not ids[chunk.index]
        ids[chunk.index] += chunk.token_ids
        assert (chunk.prompt_tokens, chunk.completion_tokens) == (len(PROMPT), len(ids[chunk.index]))
        assert all(len(top.values) == 2 for top in chunk.output_logprobs.top_logprobs)
        assert list(chunk.input_logprobs.token_ids) == (PROMPT if first else [])
    assert ids == whole
    assert [len(one) for one in whole.values()] == [20, 20]


async def test_stops_and_formats(vllm_stub: Any, cluster: Cluster) -> None:
    ids = ids_of(cluster.digests["a"])
    (whole,) = await answers(vllm_stub, asked(params={"stop_token_ids": [ids[2]]}))
    assert (list(whole.output_ids), whole.matched_token_id) == (ids[:3], ids[2])
    formats: dict[str, Any] = {
        "json_schema": '{"type": "integer", "minimum": 7, "maximum": 7}',
        "regex": "[7]",
        "grammar": 'root ::= "7"',
        "choice": pb.ChoiceConstraint(choices=["7"]),
    }
    for field, given in formats.items():
        (whole,) = await answers(vllm_stub, asked(5, params={field: given}))
        assert (whole.output_ids[0], whole.finish_reason) == (ord("7"), "stop"), field
    (lark,) = await answers(vllm_stub, asked(5, params={"grammar": 'start: "7"'}))
    assert lark.output_ids[0] == ord("7")
    (some,) = await answers(vllm_stub, asked(3, params={"json_object": True}))
    assert some.output_ids[0] == ord("{")


async def test_embeddings(vllm_stub: Any, cluster: Cluster) -> None:
    answer = await vllm_stub.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT)))
    raw = expected_vector(MODEL, PROMPT, Encode(task="embed"), adapter_digest=cluster.digests["a"])
    length = sum(value * value for value in raw) ** 0.5
    assert list(answer.embedding) == pytest.approx([value / length for value in raw], abs=1e-6)
    assert (answer.embedding_dim, answer.prompt_tokens) == (len(raw), len(PROMPT))
    assert (await refused(vllm_stub.Embed(pb.EmbedRequest())))[1] == "tokenized.input_ids"


async def test_abort_ends_requests_of_the_tenant_alone(
    vllm_stub: Any, cluster: Cluster, eventually: Eventually
) -> None:
    call = vllm_stub.Generate(asked(20_000, stream=True, request_id="long"))
    assert (await anext(aiter(call))).chunk.token_ids
    other = (("x-loraplex-tenant", "globex"),)
    await vllm_stub.Abort(pb.AbortRequest(request_ids=["long"]), metadata=other)
    assert (await vllm_stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests == 1
    await vllm_stub.Abort(pb.AbortRequest(request_ids=["nobody's", "long"]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [chunk async for chunk in call]
    assert caught.value.code() is grpc.StatusCode.ABORTED
    await asyncio.wait_for(eventually(cluster.idle), 60)
    assert await refused(vllm_stub.Abort(pb.AbortRequest())) == (grpc.StatusCode.INVALID_ARGUMENT, "request_ids")


async def test_reports(vllm_stub: Any) -> None:
    assert (await vllm_stub.HealthCheck(pb.HealthCheckRequest())).healthy
    model = await vllm_stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.vocab_size, model.is_generation) == ("a", 32_000, True)
    assert not model.supports_vision
    server = await vllm_stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.server_type, server.active_requests, server.max_num_seqs > 0) == ("vllm-grpc", 0, True)
    (load,) = (await vllm_stub.GetLoads(pb.GetLoadsRequest(include=["core"]))).loads
    assert (load.num_running_reqs, load.max_running_requests > 0) == (0, True)
    assert (await refused(vllm_stub.GetLoads(pb.GetLoadsRequest(include=["lora"]))))[1] == "include"
    assert (await refused(vllm_stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))))[1] == "dp_rank"
    call = vllm_stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    first = await call.read()
    assert (first.sequence_number, first.events[0].WhichOneof("data")) == (1, "cleared")
    call.cancel()
    for method, message in (
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ):
        assert await refused(getattr(vllm_stub, method)(message)) == (grpc.StatusCode.UNIMPLEMENTED, method)


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (asked(tokenized=None), "INVALID_ARGUMENT", "tokenized.input_ids"),
        (asked(params={"temperature": -1.0}), "INVALID_ARGUMENT", "sampling_params.temperature"),
        (asked(params={"n": 99}), "INVALID_ARGUMENT", "sampling_params.n"),
        (asked(params={"min_tokens": 99}), "INVALID_ARGUMENT", "sampling_params.min_tokens"),
        (asked(params={"logit_bias": {-1: 1.0}}), "INVALID_ARGUMENT", "sampling_params.logit_bias"),
        (asked(params={"seed": -1}), "INVALID_ARGUMENT", "sampling_params.seed"),
        (asked(params={"stop": [""]}), "INVALID_ARGUMENT", "sampling_params.stop"),
        (asked(params={"logprobs": -1}), "INVALID_ARGUMENT", "sampling_params.logprobs"),
        (asked(params={"logprobs": 21}), "INVALID_ARGUMENT", "sampling_params.logprobs"),
        (asked(params={"prompt_logprobs": 21}), "INVALID_ARGUMENT", "sampling_params.prompt_logprobs"),
        (asked(60_000, params={"logprobs": 20}), "INVALID_ARGUMENT", "sampling_params.logprobs"),
        (asked(params={"truncate_prompt_tokens": 0}), "INVALID_ARGUMENT", "sampling_params.truncate_prompt_tokens"),
        (asked(params={"regex": "("}), "INVALID_ARGUMENT", "sampling_params.regex"),
        (asked(params={"grammar": "root ::= ("}), "INVALID_ARGUMENT", "sampling_params.grammar"),
        (asked(params={"json_schema": '{"not": {}}'}), "INVALID_ARGUMENT", "sampling_params.json_schema.not"),
        (asked(params={"choice": {"choices": [""]}}), "INVALID_ARGUMENT", "sampling_params.choice.choices"),
        (asked(params={"structural_tag": "{}"}), "UNIMPLEMENTED", "sampling_params.structural_tag"),
        (asked(10**9), "INVALID_ARGUMENT", "sampling_params.max_tokens"),
        (asked(data_parallel_rank=1), "INVALID_ARGUMENT", "data_parallel_rank"),
        (asked(request_id="a b"), "INVALID_ARGUMENT", "request_id"),
        (asked(mm_inputs={"mm_hashes": ["x"]}), "UNIMPLEMENTED", "mm_inputs"),
        (asked(extra_mm_inputs=[{"mm_hashes": ["x"]}]), "UNIMPLEMENTED", "extra_mm_inputs"),
        (asked(media_refs={"items": [{"url": "x"}]}), "UNIMPLEMENTED", "media_refs"),
        (asked(kv_transfer_params={"remote_host": "x"}), "UNIMPLEMENTED", "kv_transfer_params"),
        (asked(kv_transfer_params_json="{}"), "UNIMPLEMENTED", "kv_transfer_params_json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_not_served_is_refused_by_its_name(vllm_stub: Any, request_: Any, code: str, field: str) -> None:
    status, named = await refused(answers(vllm_stub, request_))
    assert (status, named.partition("[")[0]) == (grpc.StatusCode[code], field)


async def test_pickers_find_queue_cache_and_adapters(vllm_stub: Any, cluster: Cluster, eventually: Eventually) -> None:
    call = vllm_stub.Generate(asked(20_000, stream=True))
    assert (await anext(aiter(call))).chunk.token_ids
    name = f"tenants/{TENANT}/adapters/a"

    address = (await cluster.local.processes["router-1"].wait_ready())["metrics"]

    async def shown() -> bool:
        found = await asyncio.to_thread(scraped, address)
        info = re.search(r"vllm:lora_requests_info\{(.*)\} [0-9.e+]+\n", found)
        assert info is not None
        assert re.search(r'max_lora="[1-9][0-9]*"', info[1])
        assert name in str(re.search(r'running_lora_adapters="([^"]*)"', info[1]))
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert re.search(rf'vllm:{gauge}{{model_name="hash"}} [0-9.e-]+\n', found), gauge
        return bool(re.search(rf'vllm:lora_adapter_loaded{{adapter_name="{name}",level="gpu"}} [12]\.0\n', found))

    await asyncio.wait_for(eventually(shown), 60)
    call.cancel()
    await asyncio.wait_for(eventually(cluster.idle), 60)


def scraped(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        return str(response.read().decode())
