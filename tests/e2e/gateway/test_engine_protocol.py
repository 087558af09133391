"""The engine protocol by its own stubs: every RPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from loraplex.contracts.options import Encode, StoppingParams
from tests.e2e.conftest import TENANT, Cluster
from tests.e2e.gateway.conftest import MODEL, Eventually
from tests.hash_oracle import expected_ids, expected_vector

pytest.importorskip("smg_grpc_proto", reason="the engine protocol's package is not installed: pip install '.[smg]'")

from smg_grpc_proto import sglang_scheduler_pb2 as pb

from tests.e2e.gateway.engine_calls import PROMPT, answers, asked, refused

pytestmark = pytest.mark.asyncio(loop_scope="package")


def ids_of(digest: str, max_tokens: int = 12) -> list[int]:
    """Return the engine's ids."""
    return list(expected_ids(MODEL, PROMPT, adapter_digest=digest, stopping=StoppingParams(max_tokens=max_tokens)))


async def test_an_answer_has_the_ids_of_its_adapter(stub: Any, cluster: Cluster) -> None:
    for lora_id, digest in (("", cluster.digests["a"]), (f"b@{cluster.digests['b']}", cluster.digests["b"])):
        (whole,) = await answers(stub, asked(lora_id=lora_id, request_id=f"r-{lora_id[:1]}"))
        assert list(whole.output_ids) == ids_of(digest)
        counts = (whole.finish_reason, whole.prompt_tokens, whole.completion_tokens)
        assert counts == ("length", len(PROMPT), 12)


async def test_a_stream_has_each_id_once_and_ends_with_the_whole_answer(stub: Any, cluster: Cluster) -> None:
    params = {"temperature": 0.5, "top_k": 7, "n": 2}
    request = asked(20, params=params, stream=True, request_id="s", return_logprob=True, top_logprobs_num=2)
    ids: dict[int, list[int]] = {0: [], 1: []}
    whole: dict[int, list[int]] = {}
    async for message in stub.Generate(request):
        assert message.request_id == "s"
        if message.WhichOneof("response") == "complete":
            done = message.complete
            whole[done.index] = list(done.output_ids)
            assert list(done.output_logprobs.token_ids) == whole[done.index]
            continue
        chunk = message.chunk
        ids[chunk.index] += chunk.token_ids
        assert (chunk.prompt_tokens, chunk.completion_tokens) == (len(PROMPT), len(ids[chunk.index]))
        assert list(chunk.output_logprobs.token_ids) == list(chunk.token_ids)
        assert all(len(top.values) == 2 for top in chunk.output_logprobs.top_logprobs)
    assert ids == whole
    assert [len(one) for one in whole.values()] == [20, 20]
    assert ids[0] != ids[1]


async def test_a_prompts_logprobs_begin_where_they_are_asked_for(stub: Any) -> None:
    for start in range(2):
        request = asked(1, return_logprob=True, logprob_start_len=start, top_logprobs_num=1)
        (whole,) = await answers(stub, request)
        given = whole.input_logprobs
        assert list(given.token_ids) == PROMPT[start:]
        assert [one.HasField("value") for one in given.token_logprobs] == [start > 0, True, True][: 3 - start]
        assert len(given.top_logprobs) == len(given.token_ids)


async def test_stop_strings_are_delivered_with_their_tokens(stub: Any, cluster: Cluster) -> None:
    ids = ids_of(cluster.digests["a"])
    text = "".join(chr(one) if one < 256 else f"<{one}>" for one in ids[:4])
    # Eight characters, which come from two tokens.
    stop = text[-8:]
    for streamed in (False, True):
        *_, message = [one async for one in stub.Generate(asked(params={"stop": ["never", stop]}, stream=streamed))]
        assert list(message.complete.output_ids) == ids[:4]
        assert (message.complete.finish_reason, message.complete.matched_stop_str) == ("stop", stop)
    (whole,) = await answers(stub, asked(params={"stop_token_ids": [ids[2]]}))
    assert list(whole.output_ids) == ids[:3]
    assert whole.matched_token_id == ids[2]


async def test_answers_keep_to_formats(stub: Any) -> None:
    formats = {
        "json_schema": '{"type": "integer", "minimum": 7, "maximum": 7}',
        "regex": "[7]",
        "ebnf_grammar": 'root ::= digit\ndigit ::= "7"' + " " * 2000,
    }
    for field, given in formats.items():
        (whole,) = await answers(stub, asked(5, params={field: given}))
        assert whole.output_ids[0] == ord("7"), field
        assert whole.finish_reason == "stop"


async def test_embeddings(stub: Any, cluster: Cluster) -> None:
    tokenized = pb.TokenizedInput(input_ids=PROMPT)
    answer = await stub.Embed(pb.EmbedRequest(tokenized=tokenized))
    raw = expected_vector(MODEL, PROMPT, Encode(task="embed"), adapter_digest=cluster.digests["a"])
    length = sum(value * value for value in raw) ** 0.5
    assert list(answer.embedding) == pytest.approx([value / length for value in raw], abs=1e-6)
    assert (answer.embedding_dim, answer.prompt_tokens) == (len(raw), len(PROMPT))
    refusals = {
        "tokenized.input_ids": pb.EmbedRequest(),
        "texts": pb.EmbedRequest(tokenized=tokenized, texts=["x"]),
        "is_cross_encoder": pb.EmbedRequest(tokenized=tokenized, is_cross_encoder=True),
        "token_type_ids": pb.EmbedRequest(tokenized=tokenized, token_type_ids=[0]),
        "mm_inputs": pb.EmbedRequest(tokenized=tokenized, mm_inputs={"image_urls": ["x"]}),
        "data_parallel_rank": pb.EmbedRequest(tokenized=tokenized, data_parallel_rank=2),
    }
    for field, request in refusals.items():
        assert (await refused(stub.Embed(request)))[1] == field


async def test_abort_ends_a_request_and_its_work(stub: Any, cluster: Cluster, eventually: Eventually) -> None:
    call = stub.Generate(asked(20_000, stream=True, request_id="endless"))
    assert (await anext(aiter(call))).chunk.token_ids
    assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests == 1
    # Only a call of the same tenant ends it.
    other = (("x-loraplex-tenant", "globex"),)
    assert not (await stub.Abort(pb.AbortRequest(request_id="endless"), metadata=other)).success
    assert (await stub.Abort(pb.AbortRequest(request_id="endless"))).success
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [chunk async for chunk in call]
    assert caught.value.code() is grpc.StatusCode.ABORTED
    await asyncio.wait_for(eventually(cluster.idle), 60)
    assert not (await stub.Abort(pb.AbortRequest(request_id="endless"))).success
    assert await refused(stub.Abort(pb.AbortRequest())) == (grpc.StatusCode.INVALID_ARGUMENT, "request_id")


async def test_a_client_that_leaves_ends_its_work(stub: Any, cluster: Cluster, eventually: Eventually) -> None:
    call = stub.Generate(asked(20_000, stream=True))
    assert (await call.read()).chunk.token_ids
    call.cancel()
    await asyncio.wait_for(eventually(cluster.idle), 60)


async def test_reports(stub: Any) -> None:
    assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
    model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.vocab_size, model.is_generation) == ("a", 32_000, True)
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.server_type, server.active_requests) == ("grpc", 0)
    loads = await stub.GetLoads(pb.GetLoadsRequest())
    (load,) = loads.loads
    assert (load.num_running_reqs, load.lora.slots_total > 0, load.max_running_requests > 0) == (0, True, True)
    core = await stub.GetLoads(pb.GetLoadsRequest(include=["core"], dp_rank=0))
    assert not core.loads[0].HasField("lora")
    assert (await refused(stub.GetLoads(pb.GetLoadsRequest(include=["all", "x"]))))[1] == "include"
    assert (await refused(stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))))[1] == "dp_rank"


async def test_adapters_are_loaded_listed_and_unloaded_by_their_names(stub: Any, cluster: Cluster) -> None:
    (name, digest), path = ("tenants/acme/adapters/c", cluster.digests["c"]), f"tenants/{TENANT}/adapters/c"
    loaded = await stub.LoadLoRAAdapter(pb.LoadLoRAAdapterRequest(lora_name="c", lora_id="c", pinned=True))
    assert (loaded.success, list(loaded.loaded_lora_ids)) == (True, [f"{path}@{digest}"])
    (listed,) = (await stub.ListLoadedLoRAAdapters(pb.ListLoadedLoRAAdaptersRequest())).loaded_adapters
    assert (listed.lora_name, listed.lora_path, listed.pinned) == (name, f"{path}/revisions/{digest}", True)
    # The id of the list names the adapter in a request.
    (whole,) = await answers(stub, asked(lora_id=listed.lora_id))
    assert list(whole.output_ids) == ids_of(digest)
    unloaded = await stub.UnloadLoRAAdapter(pb.UnloadLoRAAdapterRequest(lora_name="c"))
    assert (unloaded.success, list(unloaded.loaded_lora_ids)) == (True, [])
    assert (await stub.LoadLoRAAdapter(pb.LoadLoRAAdapterRequest(lora_name="c"))).success
    for request, field in (
        (pb.LoadLoRAAdapterRequest(lora_path="/tmp/x"), "lora_name"),
        (pb.LoadLoRAAdapterRequest(lora_name="c", lora_path="/tmp/x"), "lora_path"),
        (pb.LoadLoRAAdapterRequest(lora_name="c", lora_id="7"), "lora_id"),
    ):
        assert await refused(stub.LoadLoRAAdapter(request)) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    nobody = pb.UnloadLoRAAdapterRequest(lora_name="nobody")
    assert (await refused(stub.UnloadLoRAAdapter(nobody)))[0] is grpc.StatusCode.NOT_FOUND


async def test_kv_events_tell_of_the_blocks_of_an_answer(stub: Any, cluster: Cluster) -> None:
    from smg_grpc_proto.generated import common_pb2

    prompt = list(range(1_000, 1_070))
    call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    first = await call.read()
    assert (first.sequence_number, first.snapshot.index, first.events[0].WhichOneof("data")) == (1, 0, "cleared")
    (whole,) = await answers(stub, asked(tokenized=pb.TokenizedInput(input_ids=prompt)))
    ids = [*prompt, *whole.output_ids]
    # The last id is no input: five of 16 ids are full.
    chain, batches = await asyncio.wait_for(followed(call, ids[:80]), 60)
    assert batches == list(range(batches[0], batches[0] + len(batches)))
    assert [list(block.token_ids) for _, block, _ in chain] == [ids[at : at + 16] for at in range(0, 80, 16)]
    name = f"tenants/{TENANT}/adapters/a@{cluster.digests['a']}"
    assert {(stored.lora_name, stored.cache_salt) for stored, _, _ in chain} == {(name, TENANT)}
    # Another subscriber is told of them at once.
    again = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    batch = await again.read()
    assert batch.snapshot.blocks >= 5
    hashes = {block.block_hash for event in batch.events for block in event.stored.blocks}
    assert {block.block_hash for _, block, _ in chain} <= hashes
    for one in (call, again):
        one.cancel()


async def followed(call: Any, ids: list[int]) -> tuple[list[tuple[Any, Any, int]], list[int]]:
    """Read until the blocks of these ids are stored, from the first on; return these, and the batches' numbers."""
    known: dict[tuple[int | None, tuple[int, ...]], tuple[Any, Any, int]] = {}
    numbers = []
    while True:
        batch = await call.read()
        numbers.append(batch.sequence_number)
        for stored in (event.stored for event in batch.events if event.WhichOneof("data") == "stored"):
            parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
            for block in stored.blocks:
                known[parent, tuple(block.token_ids)] = (stored, block, batch.sequence_number)
                parent = block.block_hash
        chain, parent = [], None
        for at in range(0, len(ids), 16):
            if (found := known.get((parent, tuple(ids[at : at + 16])))) is None:
                break
            chain.append(found)
            parent = found[1].block_hash
        else:
            return chain, numbers


async def test_methods_that_are_not_served_say_so(stub: Any) -> None:
    from smg_grpc_proto.generated import common_pb2

    for method, message in (
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ):
        assert await refused(getattr(stub, method)(message)) == (grpc.StatusCode.UNIMPLEMENTED, method)
    for method, code, message in (
        (
            "SubscribeKvEvents",
            grpc.StatusCode.OUT_OF_RANGE,
            common_pb2.SubscribeKvEventsRequest(start_sequence_number=7),
        ),
        # The hash model has no tokenizer's files.
        ("GetTokenizer", grpc.StatusCode.FAILED_PRECONDITION, common_pb2.GetTokenizerRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stub, method)(message).read()
        assert caught.value.code() is code
