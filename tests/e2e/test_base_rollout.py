"""A new revision of a base model beside the live one, under load: staged, promoted, rolled back; no request fails."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from loraplex.cli.__main__ import app
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.options import StoppingParams
from loraplex_client import AsyncClient, AsyncStoreClient
from tests.e2e.conftest import TENANT
from tests.hash_oracle import expected_ids

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
OLD, NEW = (f"hash:?vocab=32000&seed={seed}&step_ms=20" for seed in (1, 2))
STREAMS, TOKENS = 24, 12


class Load:
    """Streams that are asked for one after the other; counts their answers by adapter and revision."""

    def __init__(self, client: AsyncClient, digests: Mapping[str, str]) -> None:
        self._client, self.digests = client, dict(digests)
        self._changed = asyncio.Condition()
        self.answers = Counter[tuple[str, str]]()
        self.adapters = ["", "", "a", "b"]
        self.stopping = False
        self.tasks = [asyncio.create_task(self._ask_on_and_on(number)) for number in range(STREAMS)]

    async def _ask_on_and_on(self, number: int) -> None:
        turn = 0
        while not self.stopping:
            turn += 1
            adapter = self.adapters[number % len(self.adapters)]
            prompt = f"client {number} turn {turn}"
            whole = await self._client.generate(prompt, adapter_id=adapter or None, max_tokens=TOKENS)
            truths = {
                model: expected_ids(
                    model,
                    list(prompt.encode()),
                    adapter_digest=self.digests.get(adapter, ""),
                    stopping=StoppingParams(max_tokens=TOKENS),
                )
                for model in (OLD, NEW)
            }
            (model,) = [model for model, truth in truths.items() if list(truth) == list(whole.token_ids)]
            async with self._changed:
                self.answers[adapter, model] += 1
                self._changed.notify_all()

    async def answered(self, adapter: str, model: str, count: int = STREAMS) -> None:
        """Wait for so many more answers of a revision. Raises what a client got instead of one."""
        target = self.answers[adapter, model] + count

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: self.answers[adapter, model] >= target)

        waiting = asyncio.create_task(wait())
        async with asyncio.timeout(60):
            done, _ = await asyncio.wait({waiting, *self.tasks}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        for task in done:
            task.result()


async def test_a_base_model_is_staged_promoted_and_rolled_back_under_load(
    start_cluster: StartCluster, hash_adapters: Mapping[str, Path]
) -> None:
    async with start_cluster(OLD, hash_adapters, worker_flags=("--rows", "128")) as cluster:
        local = cluster.local
        name, digests = read_base_model(OLD, "").name, {m: read_base_model(m, "").digest for m in (OLD, NEW)}

        async def run(*args: str) -> str:
            done = await asyncio.to_thread(CliRunner().invoke, app, ["models", *args, "--store", local.store])
            assert done.exit_code == 0, done.output
            return done.output

        async def states() -> dict[str, str]:
            async with AsyncStoreClient(local.store, TENANT) as store:
                models = await store.models(all_revisions=True)
            return {model.state: model.digest for model in models}

        to_router = ("--router", local.router)
        async with AsyncClient(local.router, TENANT) as client:
            load = Load(client, cluster.digests)
            await load.answered("", OLD)
            await run("push", NEW, "--stage")
            assert await states() == {"live": digests[OLD], "staged": digests[NEW]}
            promoting = asyncio.create_task(run("promote", name, *to_router))
            await load.answered("a", OLD)
            assert not promoting.done()  # no worker serves it
            local.settings = replace(local.settings, model=NEW)
            await local.processes[await local.start_worker()].wait_ready()
            assert f"0 of 1\npromoted {name} {digests[NEW]}" in await promoting
            assert await states() == {"live": digests[NEW], "former": digests[OLD]}
            # Adapters stay with the revision that they were uploaded for, beside calls without one.
            await asyncio.gather(load.answered("", NEW), load.answered("a", OLD), load.answered("b", OLD))
            await run("rollback", name, *to_router)
            assert await states() == {"live": digests[OLD], "former": digests[NEW]}
            await load.answered("", OLD)
            # Adapters for a revision that is not live come to its workers.
            async with AsyncStoreClient(local.store, TENANT) as store:
                base = f"{name}@{digests[NEW]}"
                load.digests["n"] = (await store.push(hash_adapters["c"], "n", base_model=base)).revision.digest
            load.adapters = ["", "", "n"]
            await asyncio.gather(load.answered("n", NEW), load.answered("", OLD))
            await run("promote", f"{name}@{digests[NEW]}", *to_router)
            await load.answered("", NEW)
            local.kill("worker-1", signal.SIGTERM)
            assert await local.processes["worker-1"].exited == 0
            await asyncio.gather(load.answered("", NEW), load.answered("n", NEW))
            assert {worker.base_digest for worker in await cluster.workers()} == {digests[NEW]}
            load.stopping = True
            await asyncio.gather(*load.tasks)
        print(dict(load.answers))
