"""Vectors of texts: each is the hash of its adapter and its ids, and what is refused says which text and why."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

import loraplex_client as lx
from loraplex.contracts.options import Encode
from tests.e2e.answers.conftest import MODEL, Eventually
from tests.e2e.conftest import Cluster
from tests.hash_oracle import expected_vector

pytestmark = pytest.mark.asyncio(loop_scope="package")
TEXTS: list[Any] = ["one", ("a query", "a passage"), [1, 300, 9_000], "x" * 3_000]
IDS = [[*b"one"], [*b"a querya passage"], [1, 300, 9_000], [*b"x"] * 3_000]


def truth(digest: str, at: int, **encode: Any) -> tuple[float, ...]:
    asked = Encode(**encode, pair_tokens=9 if at == 1 else 0)
    return expected_vector(MODEL, IDS[at], asked, adapter_digest=digest)


async def test_every_text_gets_the_vector_of_its_adapter(cluster: Cluster, eventually: Eventually) -> None:
    for adapter, digest in (("", ""), *cluster.digests.items()):
        raw = await cluster.client.embed(TEXTS, adapter_id=adapter or None, normalize=False)
        assert list(raw.vectors) == [truth(digest, at, task="embed") for at in range(len(TEXTS))]
        assert raw.usage.prompt_tokens == sum(map(len, IDS))
        assert raw.adapter_revision.rpartition("/")[2] == digest
        labels = await cluster.client.classify(TEXTS, adapter_id=adapter or None)
        logits = [truth(digest, at, task="classify") for at in range(len(TEXTS))]
        assert [one.logits for one in labels.classifications] == logits
        assert len(labels.labels) == len(logits[0])
        for one in labels.classifications:
            assert one.label == labels.labels[one.logits.index(max(one.logits))]
            weights = [math.exp(logit) for logit in one.logits]
            assert one.probabilities == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-6)
    pooled = await cluster.client.embed(TEXTS[:2], pooling="cls", priority=5, request_id="mine")
    wanted = [truth("", at, task="embed", pooling="cls") for at in range(2)]
    for vector, values in zip(pooled.vectors, wanted, strict=True):
        assert vector == pytest.approx([value / math.hypot(*values) for value in values], rel=1e-6)
    assert pooled.request_id == "mine"
    of_both = await cluster.client.embed(["one"], adapters={"a": 0.5, "b": 0.5}, normalize=False)
    assert of_both.vectors[0] == truth(of_both.adapter_revision, 0, task="embed")
    assert [weight for _, weight in of_both.adapters] == [0.5, 0.5]
    await eventually(cluster.idle)


async def test_many_texts_of_many_calls_come_in_order(cluster: Cluster, eventually: Eventually) -> None:
    calls = [[f"{call} {number}" for number in range(100)] for call in range(6)]
    adapters = (None, "a", "b")
    found = await asyncio.gather(
        *(cluster.client.embed(texts, adapter_id=adapters[at % 3], normalize=False) for at, texts in enumerate(calls))
    )
    for at, (texts, vectors) in enumerate(zip(calls, found, strict=True)):
        digest = cluster.digests.get(adapters[at % 3] or "", "")
        ids = [[*text.encode()] for text in texts]
        assert list(vectors.vectors) == [
            expected_vector(MODEL, one, Encode("embed"), adapter_digest=digest) for one in ids
        ]
    await eventually(cluster.idle)


async def test_a_client_that_leaves_leaves_nothing_behind(cluster: Cluster, eventually: Eventually) -> None:
    call = asyncio.create_task(cluster.client.embed([f"{number}" * 200 for number in range(64)]))
    await asyncio.sleep(0.02)  # some of the texts run, others have no turn yet
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await eventually(cluster.idle)
    with pytest.raises(lx.DeadlineExceededError):
        async with lx.AsyncClient(cluster.local.router, "acme", timeout_s=0.001) as hurried:
            await hurried.embed(["x" * 30_000] * 64)
    await eventually(cluster.idle)


async def test_texts_that_are_too_long_are_cut_where_it_is_asked_for(cluster: Cluster) -> None:
    long, context = "ab" * 20_000, 32_768
    cut = await cluster.client.embed([long, (long, "c"), [7] * 40_000], truncate=True, normalize=False)
    ids_of = [[*long[:context].encode()], [*(long[: context - 1] + "c").encode()], [7] * context]
    for vector, ids, pair_tokens in zip(cut.vectors, ids_of, (0, 1, 0), strict=True):
        assert vector == expected_vector(MODEL, ids, Encode("embed", pair_tokens=pair_tokens))
    for text, field, size in (
        (long, "text", "40000 bytes of text"), ((long, "c"), "pair", "40001 bytes of text"),
        ([7] * 40_000, "token_ids", "40000 tokens"),
    ):  # fmt: skip
        with pytest.raises(lx.InvalidRequestError, match=f"is {context} tokens; {size} do not fit") as caught:
            await cluster.client.embed(["fits", text])
        assert (caught.value.field, caught.value.reason) == (f"inputs[1].{field}", "CONTEXT_EXCEEDED")


async def test_bad_texts_are_refused_by_their_field(cluster: Cluster) -> None:
    client = cluster.client
    cases: list[tuple[list[Any], dict[str, Any], type[lx.LoraplexError], str]] = [
        ([], {}, lx.InvalidRequestError, "inputs: 0 texts; give 1 to 64"),
        (["a", ""], {}, lx.InvalidRequestError, r"inputs\[1\].text: is empty"),
        ([("a", "")], {}, lx.InvalidRequestError, r"inputs\[0\].pair.second: is empty"),
        ([("", "a")], {}, lx.InvalidRequestError, r"inputs\[0\].pair.first: is empty"),
        ([[]], {}, lx.InvalidRequestError, r"inputs\[0\].token_ids: is empty"),
        ([[1, 32_000]], {}, lx.InvalidRequestError, r"inputs\[0\].token_ids: id 32000 is beyond the vocabulary"),
        (["a"], {"priority": 101}, lx.InvalidRequestError, "priority"),
        (["a"], {"request_id": "x" * 129}, lx.InvalidRequestError, "request_id"),
        (["a"], {"adapter_id": "nobody"}, lx.NotFoundError, "nobody"),
        (["a"], {"model": "other"}, lx.NotFoundError, "other"),
    ]
    for texts, options, error, names in cases:
        for call in (client.embed, client.classify):
            with pytest.raises(error, match=names):
                await call(texts, **options)
    with pytest.raises(lx.InvalidRequestError, match=r"^inputs\[70\].text: is empty") as caught:
        await client.classify(["a"] * 70 + [""])  # of the second call
    assert caught.value.field == "inputs[70].text"
    with pytest.raises(lx.InvalidRequestError, match="adapters: a sum of adapters has no labels"):
        await client.classify(["a"], adapters={"a": 1.0, "b": 1.0})
