"""Drafts of a real model's tokens through the whole cluster: no other token, and counts that every surface tells."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from examples import structured
from loraplex_client import AsyncClient, Generation, SpeculativeDecoding
from tests.e2e.conftest import TENANT, Cluster

pytestmark = pytest.mark.model
StartCluster = Callable[..., AbstractAsyncContextManager[Cluster]]
EXAMPLES = Path(structured.__file__).parent
MOST = 6
FLAGS = (
    *("--dtype", "float32", "--threads", "1", "--rows", "8", "--kv-blocks", "256"),
    *("--speculative-config", f'{{"method": "suffix", "num_speculative_tokens": {MOST}}}'),
)
OPTIONS: dict[str, Any] = {
    **{"token_ids": [3 + at * 7 % 50 for at in range(40)], "max_tokens": 400, "ignore_eos": True},
    **{"temperature": 0.3, "seed": 5, "n": 2, "logprobs": 1},
}


async def test_drafts_are_counted_everywhere_and_change_nothing(start_cluster: StartCluster) -> None:
    async with start_cluster(
        str(EXAMPLES / "model"), {"shout": EXAMPLES / "adapters" / "acme" / "shout"}, worker_flags=FLAGS, http=True
    ) as cluster:
        async with AsyncClient(cluster.local.router, TENANT, resume_attempts=100) as client:
            plain = await client.generate(**OPTIONS, speculation="off")
            assert plain.speculative_decoding is None
            for answer in (await client.generate(**OPTIONS), await disturbed(cluster, client)):
                assert answer.choices == plain.choices
                check(answer.speculative_decoding)
        await check_http(cluster)


def check(counts: SpeculativeDecoding | None) -> None:
    assert counts is not None
    assert 0 < counts.steps <= counts.draft_tokens <= MOST * counts.steps
    assert 0 < counts.accepted_tokens <= counts.draft_tokens
    assert counts.mean_acceptance_length == 1 + counts.accepted_tokens / counts.steps


async def disturbed(cluster: Cluster, client: AsyncClient) -> Generation:
    """Return an answer whose worker is killed, and later its router."""
    stream = client.generate_stream(**OPTIONS)
    async for piece in stream:
        if piece.offset > 50:
            break
    cluster.local.kill("worker-1", signal.SIGKILL)
    await cluster.local.start_worker()
    async for piece in stream:
        if piece.offset > 200:
            break
    cluster.local.kill("router-1", signal.SIGKILL)
    await cluster.local.restart("router-1")
    answer = await stream.result()
    assert answer.continuations
    return answer


async def check_http(cluster: Cluster) -> None:
    """A stream tells the counts with its usage, prompts of one request their sum; a request may refuse drafts."""
    body = {"model": "shout", "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    headers = {"x-loraplex-tenant": TENANT}
    async with httpx2.AsyncClient(base_url=f"http://{cluster.local.http}/v1", headers=headers, timeout=60.0) as http:
        whole = (await http.post("/completions", json={**body, "prompt": ["one", "two"]})).json()
        counts = whole["metrics"]["speculative_decoding"]
        steps, drafted = counts["num_spec_steps"], counts["num_draft_tokens"]
        accepted = counts["num_accepted_draft_tokens"]
        assert 0 < accepted <= drafted <= MOST * steps
        assert counts["mean_acceptance_length"] == 1 + accepted / steps
        assert counts["draft_acceptance_rate"] == accepted / drafted
        messages = {"messages": [{"role": "user", "content": "Hi"}]}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        events = (await http.post("/chat/completions", json={**body, **messages, **streamed})).text
        *_, first, last, _ = events.split("\n\n")[:-1]
        assert '"speculative_decoding"' in last
        assert '"speculative_decoding"' not in first
        off = (await http.post("/chat/completions", json={**body, **messages, "speculation": "off"})).json()
        assert "metrics" not in off
        bad = await http.post("/chat/completions", json={**body, **messages, "speculation": "never"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "speculation")
