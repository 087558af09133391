"""The cluster of the benchmarks: a worker with the same engine, behind client, router and Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.local_cluster import serving_cluster
from bench.rounds import Timed
from bench.workload import Request
from loraplex.cli.local import ClusterSettings
from loraplex_client import AsyncClient, AsyncStoreClient, Piece

TENANT = "bench"


class ServedCluster:
    """A one-machine cluster with one worker, and a client in this process; serves while the context is open."""

    def __init__(self, model: Path, adapters: Sequence[Path], rows: int, dtype: str = "bfloat16") -> None:
        self._model = model
        self._adapters = adapters
        self._flags = ("--rows", str(rows), "--dtype", dtype)
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()

    def __enter__(self) -> Self:
        """Start the cluster; returns when it serves."""
        try:
            self._runner.run(self._start())
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Drain and stop everything."""
        try:
            self._runner.run(self._stack.aclose())
        finally:
            self._runner.close()

    def run(self, requests: Sequence[Request]) -> Timed:
        """Answer the requests, which all arrive at once as separate streams, and time them."""
        return self._runner.run(self._run(requests))

    def first_token_s(self, request: Request) -> float:
        """Return the seconds from a lone request to its first token, as the client sees it."""
        return self._runner.run(self._first_token_s(request))

    async def _start(self) -> None:
        async with AsyncExitStack() as starting:
            settings = ClusterSettings(str(self._model), port=0, store_port=0, worker_flags=self._flags)
            cluster = await starting.enter_async_context(serving_cluster(settings))
            async with AsyncStoreClient(cluster.store, TENANT) as store:
                for directory in self._adapters:
                    await store.push(directory, directory.name)
            self._client = await starting.enter_async_context(AsyncClient(cluster.router, TENANT))
            self._stack = starting.pop_all()

    async def _run(self, requests: Sequence[Request]) -> Timed:
        start = time.perf_counter()
        answered = await asyncio.gather(*(self._answer(request) for request in requests))
        return Timed(sum(answered), time.perf_counter() - start)

    async def _first_token_s(self, request: Request) -> float:
        start = time.perf_counter()
        times = [time.perf_counter() - start async for piece in self._stream(request) if piece.token_ids]
        return times[0]

    def _stream(self, request: Request) -> AsyncIterator[Piece]:
        adapter = None if request.adapter is None else self._adapters[request.adapter].name
        return self._client.generate_stream(
            token_ids=request.prompt_ids,
            adapter_id=adapter,
            max_tokens=request.tokens,
            temperature=0.0,
            # Random weights may choose an end token, if the model has one. A structured answer ends with its schema.
            ignore_eos=request.json_schema is None,
            json_schema=request.json_schema,
        )

    async def _answer(self, request: Request) -> int:
        tokens = 0
        async for piece in self._stream(request):
            tokens += len(piece.token_ids)
        if request.json_schema is None and tokens != request.tokens:
            raise RuntimeError(f"the cluster answered {tokens} tokens of {request.tokens}")
        return tokens
