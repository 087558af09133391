"""Programs written for LoRAX's Python client, with their import and address changed, against the hash model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex_client.lorax import AsyncClient, Client
from loraplex_client.lorax.errors import NotFoundError, ValidationError
from loraplex_client.lorax.types import FinishReason
from tests.hash_oracle import expected_ids

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
END_AFTER = 30
MODEL = f"hash:?vocab=32000&seed=1&end_after={END_AFTER}"
HEADERS = {"X-Loraplex-Tenant": "acme", "Authorization": "Bearer of nothing"}
PROMPT = "What is Deep Learning?"
# Parameters that are refused, by LoRAX's names, which the errors have too.
WRONG: tuple[dict[str, Any], ...] = (
    {"watermark": True},
    {"truncate": 0},
    {"adapter_source": "moon"},
    {"top_p": 7.0},
    {"max_new_tokens": -1},
    {"max_new_tokens": 1_000_000},
    {"stop_sequences": [""]},
    {"best_of": 1000},
    {"return_k_alternatives": 1000},
    {"response_format": {"type": "json_object", "schema": {"type": "unknown"}}},
)


def truth(digest: str, max_tokens: int, sampling: SamplingParams | None = None, prompt: str = PROMPT) -> list[int]:
    ids, stopping = list(prompt.encode()), StoppingParams(max_tokens=max_tokens)
    return list(expected_ids(MODEL, ids, adapter_digest=digest, sampling=sampling, stopping=stopping))


def text_of(ids: list[int]) -> str:
    return "".join(chr(token) if token < 256 else f"<{token}>" for token in ids)


def blocking_program(address: str, digest: str) -> None:
    """The calls of LoRAX's own examples."""
    client = Client(f"http://{address}", headers=HEADERS, timeout=30)
    response = client.generate(PROMPT, adapter_id="a", adapter_source="hub", max_new_tokens=17)
    ids = truth(digest, 17)
    assert response.generated_text == text_of(ids)
    assert response.details is not None
    assert response.details.finish_reason == "length"
    assert response.details.finish_reason is FinishReason.Length
    assert (response.details.prompt_tokens, response.details.generated_tokens) == (len(PROMPT), 17)
    assert [token.id for token in response.details.tokens] == ids
    assert "".join(token.text for token in response.details.tokens) == text_of(ids)
    assert all(token.logprob < 0 and not token.special for token in response.details.tokens)

    text, last = "", None
    for last in client.generate_stream(PROMPT, "a", max_new_tokens=17):
        if not last.token.special:
            text += last.token.text
    assert text == text_of(ids)
    assert last is not None
    assert last.generated_text == text
    assert last.details is not None
    assert last.details.generated_tokens == 17

    # Without a limit of its own a call gets 20 tokens, of the base model without an adapter.
    assert client.generate(PROMPT).generated_text == text_of(truth("", 20))
    full = client.generate(PROMPT, return_full_text=True, details=False)
    assert (full.generated_text, full.details) == (PROMPT + text_of(truth("", 20)), None)


async def async_program(address: str, digest: str) -> None:
    """The end of a text, stop sequences, sampling."""
    client = AsyncClient(f"http://{address}/", headers=HEADERS)
    ids = truth(digest, 100)
    assert len(ids) == END_AFTER
    response = await client.generate(PROMPT, adapter_id="a", max_new_tokens=100, return_k_alternatives=2)
    assert response.generated_text == text_of(ids[:-1])
    assert response.details is not None
    assert response.details.finish_reason == "eos_token"
    assert [token.special for token in response.details.tokens] == [False] * (END_AFTER - 1) + [True]
    alternatives = response.details.tokens[0].alternative_tokens
    assert alternatives is not None
    assert [token.id for token in alternatives] == [ids[0], ids[0] + 1]

    stop = f"<{ids[9]}><{ids[10]}>"
    streamed = [
        response
        async for response in client.generate_stream(
            PROMPT, adapter_id="a", max_new_tokens=100, stop_sequences=["never", stop]
        )
    ]
    # LoRAX's answers end with the stop sequence.
    assert "".join(response.token.text for response in streamed if not response.token.special) == text_of(ids[:11])
    assert streamed[-1].generated_text == text_of(ids[:11])
    assert streamed[-1].details is not None
    assert streamed[-1].details.finish_reason is FinishReason.StopSequence
    assert [response.generated_text for response in streamed[:-1]] == [None] * 9

    for parameters, sampling in (
        ({"do_sample": True, "seed": 7}, SamplingParams(temperature=1.0, seed=7)),
        ({"temperature": 0.5, "seed": 7, "top_k": 3}, SamplingParams(temperature=0.5, top_k=3, seed=7)),
        ({"temperature": 1.0, "seed": 7}, None),
    ):
        response = await client.generate(PROMPT, adapter_id="a", max_new_tokens=10, **parameters)
        assert response.generated_text == text_of(truth(digest, 10, sampling))

    # The model reads the last tokens alone; the full text has the whole prompt.
    cut = await client.generate(PROMPT, adapter_id="a", truncate=9, return_full_text=True)
    assert cut.details is not None
    assert cut.details.prompt_tokens == 9
    assert cut.generated_text == PROMPT + text_of(truth(digest, 20, prompt=PROMPT[-9:]))
    with pytest.raises(NotFoundError):
        await client.generate(PROMPT, adapter_id="nobody")
    for bad in WRONG:
        for call in (client.generate(PROMPT, **bad), anext(client.generate_stream(PROMPT, **bad))):
            with pytest.raises(ValidationError) as caught:
                await call
            assert caught.value.field.removesuffix(".schema.type") == next(iter(bad))
            assert str(caught.value).startswith(f"{caught.value.field}: ")
    with pytest.raises(ValidationError, match="base_url"):
        AsyncClient("https://example.org")


async def test_programs_written_for_lorax_run(start_cluster: StartCluster, hash_adapters: Mapping[str, Path]) -> None:
    async with start_cluster(MODEL, hash_adapters) as cluster:
        address, digest = cluster.local.router, cluster.digests["a"]
        await asyncio.to_thread(blocking_program, address, digest)
        # A new event loop for every question, as programs do.
        for _ in range(2):
            await asyncio.to_thread(asyncio.run, async_program(address, digest))
