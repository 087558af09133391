"""Long answers: no process of a cluster holds its event loop for long, so that others' requests go on."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from tests import loop_watch
from tests.e2e.conftest import Cluster, running_cluster, write_hash_adapters
from tests.e2e.gateway.conftest import HEADERS, MESSAGES

pytestmark = [pytest.mark.asyncio(loop_scope="module")]
# Prompt of a document, and an answer of as many numbers as 16 choices have with the most alternatives.
IDS = [number % 4_000 + 300 for number in range(30_000)]
ALTERNATIVES = {"max_tokens": 1_000, "ignore_eos": True}
# Maximum processor time in ms of a hold. `make holds` asks for 50 ms; here slow processors get five times as long, and
# work that grows with the square of an answer still takes seconds.
LIMIT_MS = 250.0
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "echo": ("/v1/completions", {"prompt": IDS, "max_tokens": 0, "echo": True, "logprobs": 5}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, **ALTERNATIVES}),
    "choices": ("/v1/completions", {"prompt": "ab", "n": 8, "logprobs": 5, **ALTERNATIVES}),
    "ids": ("/v1/completions", {"prompt": [[1] * 30_000] * 13, "max_tokens": 0}),
    "tokens": ("/tokenize", {"inputs": "ab c" * 7_000}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Cluster, Path]]:
    """A cluster whose processes measure how long they hold their event loops, and where they tell it."""
    directory = tmp_path_factory.mktemp("long")
    (holds := directory / "holds").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in loop_watch.environ(holds, os.environ).items():
            patch.setenv(name, value)
        model, adapters = "hash:?vocab=32000&step_ms=0", write_hash_adapters(directory / "adapters")
        async with running_cluster(directory / "cluster", model, adapters, http=True) as running:
            yield running, holds


@pytest.mark.parametrize("name", BODIES)
async def test_long_answers_hold_no_event_loop(watched: tuple[Cluster, Path], name: str) -> None:
    cluster, holds = watched
    loop_watch.forget(holds)
    path, body = BODIES[name]
    async with httpx2.AsyncClient(base_url=f"http://{cluster.local.http}", headers=HEADERS, timeout=60) as client:
        answer = await client.post(path, json=body if path == "/tokenize" else {"model": "a", **body})
    assert answer.status_code == 200, answer.text[:300]
    assert json.loads(answer.content)
    assert not loop_watch.long_holds(holds, LIMIT_MS)
