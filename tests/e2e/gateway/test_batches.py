"""Batches as OpenAI's own client makes them, run by a runner beside the gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from loraplex.batch_runner.line_call import seed_of
from loraplex.contracts.options import SamplingParams
from tests.e2e.conftest import Cluster
from tests.e2e.gateway.conftest import expected

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(60)]


def chat_line(custom_id: str, model: str, text: str, **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(*lines: Any) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    """The batch once it has ended."""
    while True:
        batch = await client.batches.retrieve(batch_id)
        if batch.status in {"completed", "failed", "expired", "cancelled"}:
            return batch
        await asyncio.sleep(0.05)


async def test_each_line_is_answered_once_by_its_own_adapter(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    lines = [chat_line(f"line {n}", "abc"[n % 3], f"Hi {n}", temperature=0) for n in range(30)]
    file = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    assert (file.filename, file.purpose, file.bytes) == ("in.jsonl", "batch", len(jsonl(*lines)))
    made = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"run": "7"}
    )
    assert (made.status, made.output_file_id, made.metadata) == ("validating", None, {"run": "7"})
    batch = await ended(client, made.id)
    assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (30, 30, 0)
    output = await client.files.content(batch.output_file_id)
    answers = [json.loads(line) for line in output.text.splitlines()]  # of texts with any characters
    assert [one["custom_id"] for one in answers] == [f"line {n}" for n in range(30)]
    for n, one in enumerate(answers):
        assert (one["error"], one["response"]["status_code"]) == (None, 200)
        body = one["response"]["body"]
        assert body["model"] == "abc"[n % 3]
        sampling = SamplingParams(temperature=0.0, seed=seed_of(made.id, n + 1))
        text = expected(f"user: Hi {n}\nassistant: ", cluster.digests["abc"[n % 3]], 8, sampling)
        assert body["choices"][0]["message"]["content"] == text
