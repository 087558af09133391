"""Rehearses the chart's life with its pods as processes: `python -m tests.deploy.rehearsal [--streams N]`.

Under load every part is rolled out, scaled and killed, and Redis fails over.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from loraplex.contracts.options import StoppingParams
from loraplex_client import AsyncClient
from tests.deploy.kubernetes_tools import render
from tests.deploy.pods import Cluster
from tests.hash_oracle import expected_ids
from tests.valkey_cluster import ReplicatedCluster
from tests.valkey_sentinel import WatchedValkeys

# The model of the example `laptop`.
MODEL = "hash:?vocab=32000&step_ms=5&seed=1&end_after=0"
# Settings of a chart whose Redis is elsewhere, at the URL that a Secret has.
_OWN_REDIS = ("router.replicas=2", "redis.embedded=false", "redis.urlSecret.name=redis", "gateway.enabled=false")
# The workloads of which a pod is killed.
_KILLED = ("lx-router", "lx-worker-cpu", "lx-store", "lx-valkey")


class Streams:
    """Clients that ask one request after the other; every answer is compared with the hash model's."""

    def __init__(
        self,
        client: AsyncClient | str,
        count: int,
        tokens: int = 40,
        *,
        models: Sequence[str] = (MODEL,),
        name: str = "",
        adapter: str = "",
        digest: str = "",
    ) -> None:
        """Take a client or the routers' addresses, the models that may answer, their name, an adapter, its digest."""
        self._client = AsyncClient(client, "acme") if isinstance(client, str) else client
        self._stop = False
        self._tokens, self._models, self._name = tokens, models, name
        self._adapter, self._digest = adapter, digest
        # Ids of the requests that were answered.
        self.requests: set[str] = set()
        self.answers = self.continued = 0
        self._answered = asyncio.Event()
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(count)]

    async def _ask(self, number: int) -> None:
        turn = 0
        while not self._stop:
            turn += 1
            await self.ask(f"stream {number} turn {turn}")

    async def ask(self, prompt: str) -> None:
        """Ask once, and compare the answer."""
        answer = await self._client.generate(
            prompt, max_tokens=self._tokens, model=self._name or None, adapter_id=self._adapter or None
        )
        stopping = StoppingParams(max_tokens=self._tokens)
        truths = [
            list(expected_ids(model, list(prompt.encode()), stopping=stopping, adapter_digest=self._digest))
            for model in self._models
        ]
        assert list(answer.token_ids) in truths, (prompt, list(answer.token_ids), truths)
        self.answers += 1
        self.requests.add(answer.request_id)
        self._answered.set()
        self.continued += answer.continuations > 0

    async def during(self, change: Any) -> None:
        """Await a change of the cluster, and as many more answers as there are streams. Raises what a stream got."""
        done, _ = await asyncio.wait(
            {changing := asyncio.create_task(change), *self._tasks}, return_when="FIRST_COMPLETED"
        )
        for task in done:
            task.result()
        await changing
        target = self.answers + len(self._tasks)
        while self.answers < target:
            self._answered.clear()
            answered = asyncio.create_task(self._answered.wait())
            done, _ = await asyncio.wait({answered, *self._tasks}, return_when="FIRST_COMPLETED")
            for task in done - {answered}:
                task.result()
            answered.cancel()

    async def end(self) -> None:
        """Let the last answers end."""
        self._stop = True
        await asyncio.gather(*self._tasks)
        await self._client.close()


async def rehearse(directory: Path, streams: int, say: Callable[[str], None]) -> None:
    """Install the chart, and under load roll out every part, scale the workers, and kill parts. Raises on any fault."""
    sizes = ("router.replicas=2", "workers.cpu.replicas=2")
    cluster = Cluster(directory)
    try:
        await cluster.apply(render("laptop", sizes))
        say(f"installed: {sum(map(len, cluster.pods.values()))} pods are ready")
        await _change(
            cluster,
            Streams(cluster.routers, streams),
            say,
            {
                "a new version of every part": lambda: cluster.apply(render("laptop", (*sizes, "image.tag=next"))),
                "workers from 2 to 6": lambda: cluster.scale("lx-worker-cpu", 6),
                "workers from 6 to 2": lambda: cluster.scale("lx-worker-cpu", 2),
                **{f"{name} is killed": partial(cluster.kill, name) for name in _KILLED},
                "a node is lost, with one of each": partial(cluster.kill, *_KILLED),
            },
        )
    finally:
        await cluster.close()


async def rehearse_failover(directory: Path, streams: int, say: Callable[[str], None]) -> None:
    """Install the chart with a Valkey that a sentinel watches, whose primary is lost under load."""
    async with WatchedValkeys(directory / "v") as valkeys:
        await _lose(directory, streams, say, valkeys.url, {"Sentinel fails over": valkeys.lose_primary})


async def rehearse_cluster(directory: Path, streams: int, say: Callable[[str], None]) -> None:
    """Install the chart with a Redis Cluster, each of whose primaries is lost under load, one after the other."""
    async with ReplicatedCluster(directory / "v") as valkeys:
        losses = {f"the Cluster's shard {one} fails over": partial(valkeys.lose_primary, one) for one in range(3)}
        await _lose(directory, streams, say, valkeys.url, losses)


async def _lose(
    directory: Path, streams: int, say: Callable[[str], None], url: str, losses: Mapping[str, Callable[[], Any]]
) -> None:
    cluster = Cluster(directory, {"redis": {"router": url.encode(), "worker": url.encode()}})
    try:
        await cluster.apply(render("laptop", _OWN_REDIS))
        await _change(cluster, Streams(cluster.routers, streams), say, losses)
    finally:
        await cluster.close()


async def _change(
    cluster: Cluster, load: Streams, say: Callable[[str], None], changes: Mapping[str, Callable[[], Any]]
) -> None:
    for what, change in changes.items():
        await load.during(change())
        say(f"{what}: {load.answers} answers, of which {load.continued} continued elsewhere; 0 failed")
    await load.end()
    assert {code for _, code in cluster.ended} <= {0}, cluster.ended


def main() -> None:
    """Rehearse with the command line's arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.deploy.rehearsal", description=__doc__)
    parser.add_argument("--streams", type=int, default=200, help="requests that run at any time")
    streams = parser.parse_args().streams
    for part in (rehearse, rehearse_failover, rehearse_cluster):
        with tempfile.TemporaryDirectory(prefix="lx-") as directory:
            asyncio.run(part(Path(directory), streams, lambda line: print(line, flush=True)))


if __name__ == "__main__":
    main()
