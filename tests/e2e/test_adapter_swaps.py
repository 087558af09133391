"""A name's revisions change under load: what runs ends on the revision that it began with.

SWAPS=10000 (`make swaps`) runs the long form.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.options import StoppingParams
from loraplex_client import AsyncClient, AsyncStoreClient
from tests.hash_oracle import expected_ids

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
MODEL = "hash:?vocab=32000&seed=1&step_ms=4"
TENANT = "acme"
SEED = 4
SWAPS = int(os.environ.get("SWAPS", "100"))
CLIENTS = 24
NAMES = [f"name-{number}" for number in range(8)]
REVISIONS = 6
# Few and long: a block of the KV cache that one revision had from another would show.
PROMPTS = [f"prompt {number}: " + "the same words again and again " * 3 for number in range(4)]


@pytest.fixture
def revisions(tmp_path: Path) -> dict[str, list[Path]]:
    """The directories of each name's revisions."""
    directories: dict[str, list[Path]] = {name: [] for name in NAMES}
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    for name in NAMES:
        for number in range(REVISIONS):
            directory = tmp_path / name / str(number)
            directory.mkdir(parents=True)
            (directory / "adapter_config.json").write_text(json.dumps(config))
            (directory / "adapter_model.safetensors").write_bytes(f"{name}, revision {number}".encode())
            directories[name].append(directory)
    return directories


class Load:
    """Requests for names whose aliases move meanwhile, and what came of them."""

    def __init__(self, client: AsyncClient, store: AsyncStoreClient) -> None:
        self.client = client
        self.store = store
        self.chance = random.Random(SEED)
        self.digests: dict[str, list[str]] = {name: [] for name in NAMES}
        self.live: dict[str, str] = {}
        self.swapped: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.seen: set[str] = set()

    async def push(self, name: str, directories: list[Path]) -> None:
        for directory in directories:
            pushed = await self.store.push(directory, name)
            self.digests[name].append(pushed.revision.digest)
            self.live[name] = pushed.revision.digest

    async def swap(self) -> None:
        name = self.chance.choice(NAMES)
        others = [digest for digest in self.digests[name] if digest != self.live[name]]
        self.live[name] = self.chance.choice(others)
        await self.store.set_alias(name, "live", self.live[name])
        self.swapped[name] += 1

    async def ask(self, name: str) -> str:
        """Returns the digest of the revision that answered."""
        prompt, length, before = self.chance.choice(PROMPTS), self.chance.randrange(4, 24), self.swapped[name]
        answer = await self.client.generate(prompt, adapter_id=name, max_tokens=length)
        digest = answer.adapter_revision.rpartition("/")[2]
        prompt_ids, stopping = list(prompt.encode()), StoppingParams(max_tokens=length)
        truth = expected_ids(MODEL, prompt_ids, adapter_digest=digest, stopping=stopping)
        whole = digest in self.digests[name] and list(answer.token_ids) == list(truth)
        self.outcomes["of one revision" if whole else "mixed"] += 1
        self.outcomes["swapped meanwhile"] += self.swapped[name] > before
        self.seen.add(digest)
        return digest


async def test_swaps_of_names_under_load(
    start_cluster: StartCluster, revisions: dict[str, list[Path]], eventually: Eventually
) -> None:
    print(f"seed {SEED}")
    # Fewer slots than names: the worker's cache swaps as well.
    flags = ("--adapter-slots", "6", "--rows", "16")
    async with (
        start_cluster(MODEL, {}, worker_flags=flags) as cluster,
        AsyncStoreClient(cluster.local.store, TENANT) as store,
    ):
        load = Load(cluster.client, store)
        for name in NAMES:
            await load.push(name, revisions[name])
        swaps = iter(range(SWAPS))

        async def swap_and_ask() -> None:
            for _ in swaps:
                await asyncio.gather(load.swap(), load.ask(load.chance.choice(NAMES)))

        await asyncio.gather(*(swap_and_ask() for _ in range(CLIENTS)))
        outcomes = load.outcomes
        print(outcomes, f"{len(load.seen)} of {REVISIONS * len(NAMES)} revisions answered")
        assert load.swapped.total() == SWAPS
        assert (outcomes["of one revision"], outcomes["mixed"]) == (SWAPS, 0)
        assert outcomes["swapped meanwhile"] > SWAPS // 4
        # A router keeps names for a second, in which a fast machine has made all of these swaps.
        while len(load.seen) <= len(NAMES):
            await asyncio.gather(load.swap(), load.ask(load.chance.choice(NAMES)))

        # Two swaps of one name may have overtaken each other: what it means now, the store tells.
        meant = {name: (await store.get(name))[1].digest for name in NAMES}

        async def all_follow() -> bool:
            return {name: await load.ask(name) for name in NAMES} == meant

        await eventually(all_follow)
        assert outcomes["mixed"] == 0
        await eventually(cluster.idle)
