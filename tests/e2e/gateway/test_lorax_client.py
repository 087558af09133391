"""The real lorax-client against the gateway: answers, streams, schemas, merged adapters, errors, cancels."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from loraplex.runtime.rpc.settings import is_installed
from tests.e2e.conftest import Cluster
from tests.e2e.gateway.conftest import HEADERS, Eventually, expected

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.skipif(not is_installed("lorax"), reason="lorax-client is not installed: make lorax"),
]
PROMPT = "What is Deep Learning?"
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def client(cluster: Cluster) -> Any:
    """Make the asyncio client."""
    from lorax import AsyncClient

    return AsyncClient(f"http://{cluster.local.http}", headers=HEADERS, timeout=60)


def blocking_program(address: str) -> tuple[Any, list[Any]]:
    """The calls of its README: an answer, and a stream's messages."""
    from lorax import Client

    client = Client(f"http://{address}", headers=HEADERS)
    return (
        client.generate(PROMPT, adapter_id="a", max_new_tokens=17, return_k_alternatives=2),
        list(client.generate_stream(PROMPT, adapter_id="a", max_new_tokens=17)),
    )


async def test_answers_and_streams(client: Any, cluster: Cluster) -> None:
    text = expected(PROMPT, cluster.digests["a"], 17)
    answer, streamed = await asyncio.to_thread(blocking_program, cluster.local.http)
    assert answer.generated_text == text
    details = answer.details
    assert (details.finish_reason, details.prompt_tokens, details.generated_tokens) == ("length", len(PROMPT), 17)
    assert "".join(token.text for token in details.tokens) == text
    assert [len(token.alternative_tokens) for token in details.tokens] == [2] * 17
    stop = text[20:30]
    stopped = [one async for one in client.generate_stream(PROMPT, adapter_id="a", stop_sequences=[stop])]
    for messages, whole, reason in ((streamed, text, "length"), (stopped, text[:30], "stop_sequence")):
        assert "".join(message.token.text for message in messages if not message.token.special) == whole
        assert [message.generated_text for message in messages] == [None] * (len(messages) - 1) + [whole]
        assert messages[-1].details.finish_reason == reason
    full = await client.generate(PROMPT, return_full_text=True, details=False)
    assert (full.generated_text, full.details) == (PROMPT + expected(PROMPT, "", 20), None)


async def test_schemas_and_merged_adapters(client: Any, cluster: Cluster) -> None:
    from lorax.types import MergedAdapters

    form = {"type": "json_object", "schema": SCHEMA}
    answer = await client.generate(PROMPT, adapter_id="a", response_format=form, max_new_tokens=200)
    assert list(json.loads(answer.generated_text)) == ["city"]
    merged = MergedAdapters(ids=["a", "b"], weights=[0.5, -0.5], merge_strategy="linear", density=1.0)
    summed = await cluster.client.generate(PROMPT, adapters={"a": 0.5, "b": -0.5}, max_tokens=9)
    assert (await client.generate(PROMPT, merged_adapters=merged, max_new_tokens=9)).generated_text == summed.text


async def test_errors(client: Any) -> None:
    from lorax import errors

    for given, kind, message in (
        ({"adapter_id": "nobody"}, errors.NotFoundError, "adapter not found: nobody"),
        ({"watermark": True}, errors.ValidationError, "watermark: not served"),
        ({"max_new_tokens": 10**9}, errors.ValidationError, "max_new_tokens"),
    ):
        with pytest.raises(kind, match=message):
            await client.generate(PROMPT, **given)
        with pytest.raises(kind, match=message):
            await anext(client.generate_stream(PROMPT, **given))


async def test_a_client_that_leaves_cancels_its_work(client: Any, cluster: Cluster, eventually: Eventually) -> None:
    stream = client.generate_stream(PROMPT, max_new_tokens=20_000)
    assert await anext(stream)
    await stream.aclose()
    waiting = asyncio.create_task(client.generate(PROMPT, max_new_tokens=20_000))
    await eventually(lambda: is_busy(cluster))
    waiting.cancel()
    await eventually(cluster.idle)


async def is_busy(cluster: Cluster) -> bool:
    return any(worker.rows_running for worker in await cluster.workers())
