"""Documents of one Rerank beside as many calls of one: `python -m bench.rerank [--documents N] [--model DIR]`.

A cluster of one router and one worker on the CPU. Each way has a query of its own, so that no way finds the query of
another in the prefix cache, and is run three times; the median is printed: documents a second, and the share of the
prompts' tokens that the cache had.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.local_cluster import serving_cluster
from loraplex.cli.local import ClusterSettings
from loraplex_client import AsyncClient, Ranking

ROOT = Path(__file__).parents[1]
# Answers that are tokens of the shipped model.
ANSWERS: Any = {"yes": "A", "no": "no"}
ROUNDS = 3

Way = Callable[[AsyncClient, str, list[str]], Awaitable[list[Ranking]]]


async def one_call(client: AsyncClient, query: str, documents: list[str]) -> list[Ranking]:
    """Rerank all documents in one call."""
    return [await client.rerank(query, documents, **ANSWERS)]


async def one_after_the_other(client: AsyncClient, query: str, documents: list[str]) -> list[Ranking]:
    """Rerank each document in a call of its own, each after the one before."""
    return [await client.rerank(query, [document], **ANSWERS) for document in documents]


async def all_at_once(client: AsyncClient, query: str, documents: list[str]) -> list[Ranking]:
    """Rerank each document in a call of its own, all at once."""
    return list(await asyncio.gather(*(client.rerank(query, [document], **ANSWERS) for document in documents)))


WAYS: dict[str, Way] = {
    "one call": one_call,
    "single calls, one after the other": one_after_the_other,
    "single calls, all at once": all_at_once,
}


async def measure(model: str, count: int) -> None:
    """Measure all ways in turn, and print a line of each."""
    documents = [f"{number}: {number * 7919 % 1000} ways lead to the capital of a country." for number in range(count)]
    with tempfile.TemporaryDirectory(prefix="loraplex-rerank-") as directory:
        settings = ClusterSettings(model, port=0, store_port=0, data_dir=Path(directory))
        async with serving_cluster(settings) as cluster, AsyncClient(cluster.router) as client:
            await one_call(client, "warm-up", documents)
            rates: dict[str, list[float]] = {name: [] for name in WAYS}
            shares = dict.fromkeys(WAYS, 0.0)
            for number in range(ROUNDS):
                for at, (name, way) in enumerate(WAYS.items()):
                    query = f"{number}{at}: Which country has its capital there? " * 6
                    began = time.perf_counter()
                    rankings = await way(client, query, documents)
                    rates[name].append(count / (time.perf_counter() - began))
                    usages = [one.usage for one in rankings]
                    tokens = sum(one.prompt_tokens for one in usages)
                    shares[name] = sum(one.cached_tokens for one in usages) / tokens
    for name, found in rates.items():
        print(f"{name}: {statistics.median(found):.0f} documents/s, {shares[name]:.0%} of {tokens} tokens cached")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.rerank", description=__doc__)
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--model", default=str(ROOT / "examples/model"))
    given = parser.parse_args()
    sys.exit(asyncio.run(measure(given.model, given.documents)))
