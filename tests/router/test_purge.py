"""Two routers of a cell and its Redis: one purges a tenant at both, and looks until nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.messages import AdapterRef, Job
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import Placement
from loraplex.router.app import RelayAccess
from loraplex.router.catalog.adapters import AdapterConfigs
from loraplex.router.catalog.models import Living, ModelCell
from loraplex.router.catalog.store_client import StoreClient
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.relay import WorkerForgets
from loraplex.router.generation.admission import GrammarProofs
from loraplex.router.generation.rollouts import Rollouts
from loraplex.router.purge import CellPurge, RouterData
from loraplex.router.quotas.quotas import Quotas
from loraplex.router.text.tokenizer import PromptTokenizer
from loraplex.runtime.rpc.errors import NotFound, PermissionDenied
from tests.broker.test_liveness import worker
from tests.router.recording_link import KEYS, RecordingLink, job, read

GRANTED = AdapterRef("tenants/acme/adapters/a/revisions/sha256:0", "sha256:0", 4, 100)


class Router:
    """A router, as far as tenants' data go: its dispatcher, and its relay's server at a port of its own."""

    def __init__(self, queue: JobQueue, quotas: Quotas) -> None:
        self.dispatcher = Dispatcher(lambda *_: queue, lambda *_: Placement())
        self.store, self.encoder, self.proofs = StoreClient("127.0.0.1:1"), PromptTokenizer(), GrammarProofs()
        configs = AdapterConfigs(self.store)
        self.data = RouterData(self.dispatcher, self.store, configs, self.encoder, self.proofs, quotas, Rollouts())
        self.relay = RelayAccess(None, lambda *refused: None)
        self.recorded: list[dict[str, Any]] = []
        self.relay.serve_tenant_data(self.data, lambda event, **values: self.recorded.append(values))
        self.address = f"127.0.0.1:{self.relay.bind('127.0.0.1', 0)}"
        self.calls: dict[str, asyncio.Task[None]] = {}

    async def call(self, one: Job) -> None:
        """Dispatch a job, and wait for its end in the background, as its call does."""
        routed = await self.dispatcher.dispatch(replace(one, reply_to=self.address))

        async def wait() -> None:
            try:
                await read(routed)
            finally:
                self.dispatcher.release(routed)

        self.calls[one.job_id] = asyncio.create_task(wait())

    async def close(self) -> None:
        for task in self.calls.values():
            task.cancel()
        await asyncio.gather(*self.calls.values(), return_exceptions=True)
        await self.dispatcher.drain_tasks()
        await self.relay.server.stop(0)
        self.encoder.close()
        self.proofs.close()
        await self.store.close()


@pytest.fixture
async def routers(queue: JobQueue, quotas: Quotas) -> AsyncIterator[list[Router]]:
    """Two routers; the second one's server runs."""
    both = [Router(queue, quotas) for _ in range(2)]
    await both[1].relay.server.start()
    yield both
    for router in both:
        await router.close()


async def cell_purge(redis: Redis, queue: JobQueue, router: Router, *workers: Any) -> CellPurge:
    liveness = Liveness(redis, KEYS)

    async def living() -> Any:
        return Living([(model, cell, state) for state in workers])

    cell = ModelCell("main", queue, liveness)
    model: Any = SimpleNamespace(cells={"main": cell}, manifest=SimpleNamespace(name="tiny"))
    models: Any = SimpleNamespace(served=[model], living=living, reached=lambda model: [cell])
    forgets = WorkerForgets([], answer_s=0.01)
    return CellPurge(models, router.data, forgets, router.address, None, pass_s=0.01)


async def test_the_worker_of_a_purged_job_stops_it_before_its_next_token(routers: list[Router]) -> None:
    link, (router, _) = RecordingLink("w"), routers
    await router.call(job("acme/long prompt"))
    router.dispatcher.receive_claims(link, [("acme/long prompt", 1)])
    await router.data.forget("acme")
    assert link.sent == [("cancel", "acme/long prompt", 1)]


async def test_calls_end_at_all_routers_with_the_reason_and_others_go_on(
    redis: Redis, queue: JobQueue, routers: list[Router]
) -> None:
    first, second = routers
    for router in routers:
        await Liveness(redis, KEYS).take_census(router.address)
        await router.call(job(f"acme/{router.address}"))
        await router.call(replace(job(f"globex/{router.address}"), tenant="globex", adapter=GRANTED))
        await router.call(replace(job(f"initech/{router.address}"), tenant="initech"))
    await queue.enqueue(replace(job("acme/orphan"), reply_to=first.address))  # that its router has lost
    places = await (await cell_purge(redis, queue, first)).run("acme")
    assert [place for place in places if place.left or place.error] == []
    jobs = {place.part: place.removed for place in places if place.place == "jobs"}
    assert jobs == {f"router {first.address}": 2, f"router {second.address}": 2}
    assert [place.removed > 0 for place in places if place.place == "waiting jobs"] == [True]
    for router in routers:
        acme, globex, initech = router.calls.values()
        with pytest.raises(PermissionDenied) as purged:
            await acme
        assert purged.value.reason == "TENANT_PURGED"
        with pytest.raises(NotFound):
            await globex
        assert not initech.done()
    assert await queue.count_waiting() == 2
    assert (first.recorded, second.recorded) == ([], [{"tenant": "acme", "removed": 2}])


async def test_a_router_and_a_worker_that_do_not_answer_are_named(
    redis: Redis, queue: JobQueue, routers: list[Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.router.purge.PURGE_S", 0.0)
    first, _ = routers
    await Liveness(redis, KEYS).take_census("127.0.0.1:1")
    places = await (await cell_purge(redis, queue, first, worker("w"))).run("acme")
    errors = {place.part: place.error for place in places if place.error}
    assert errors.keys() == {"router 127.0.0.1:1", "worker w"}
    assert "UNAVAILABLE" in errors["router 127.0.0.1:1"]
    assert "no link" in errors["worker w"]
