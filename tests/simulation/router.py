"""A router: the real models, dispatcher, relay service and generation, over a simulated queue, store and network."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from loraplex.admin.v1 import accounts_pb2, keys_pb2
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.broker.cells import DrainedCells
from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.messages import AdapterRef
from loraplex.contracts.broker.terms import QueueLimits
from loraplex.relay.v1 import relay_pb2_grpc
from loraplex.router.app import HAND_OVER_S, look_at_workers
from loraplex.router.catalog.adapters import AdapterConfigs
from loraplex.router.catalog.cells import LOOK_S, CellServer
from loraplex.router.catalog.models import Models
from loraplex.router.catalog.store_client import KEYS_LOOK_S, KeyCopy, Manifest, RegisteredModel, ResolvedAdapter
from loraplex.router.dispatch.cells import Cells
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.links import DispatchTiming, Frame, RelayReach, WorkerLink
from loraplex.router.dispatch.outbox import Placer
from loraplex.router.dispatch.relay import RelayService
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.generation.admission import Admission, GrammarProofs
from loraplex.router.generation.generation import STALLED_LOOK_S, Generation
from loraplex.router.generation.resume import ResumeEpochs, ResumeKeys, ResumeTokens
from loraplex.router.generation.unary_calls import ContinuationScore, UnaryCalls
from loraplex.router.purge import RouterData
from loraplex.router.quotas.quotas import Quotas
from loraplex.router.request import EncodeRequest, Message, Received, Request, Summary
from loraplex.router.text.tokenizer import PromptTokenizer
from loraplex.runtime.rpc.errors import NotFound, Unavailable
from loraplex.runtime.rpc.principal import Role, calling_key
from loraplex.runtime.rpc.tasks import every
from loraplex.runtime.tenancy.api_keys import HashedKey, KeyDirectory
from tests.plans_file import plans_in
from tests.simulation.channels import Registrar
from tests.simulation.loop import Node
from tests.simulation.network import Network
from tests.simulation.options import CHECKS, CHECKS_CONFIG
from tests.simulation.queue import SimulatedLedger, SimulatedUsage
from tests.simulation.redis import SimulatedRedis
from tests.simulation.texts import Encoded

# An adapter's load as tokens, as the default settings have it.
MIB_TOKENS = 10.0
# Maximum time in seconds from a stop to the end of the process.
STOP_S = 2 * HAND_OVER_S
Accepted = Callable[[WorkerLink, Frame, int], None]


@dataclass(frozen=True)
class Scored:
    """The one message of a Score call."""

    scores: tuple[ContinuationScore, ...]
    summary: Summary


class BrokenError(Exception):
    """The broken stream of a router that is gone."""


# Number of accounts in a page of the store, and time in seconds that one takes.
_PAGE, _PAGE_S = 500, 0.5


class SimulatedStore:
    """A loraplex.router.catalog.store_client.StoreClient with one base model, and adapters by name."""

    def __init__(
        self, base: BaseModel, adapters: Mapping[str, AdapterRef], keys: Iterable[str], accounts: int = 0
    ) -> None:
        self._base = base
        self._adapters = {**adapters, "checks": CHECKS}
        # By name, at first so many of others.
        names = [f"other-{number}" for number in range(accounts)]
        self._accounts = {name: accounts_pb2.Account(name=name, day=1, day_tokens=1) for name in names}
        # Keeps its calls about accounts from being answered.
        self.away = False
        # API keys by id, those that a store cut off from its bucket since then has in their place, when keys were
        # revoked, and what was wrong with callers that were admitted.
        self.cut_off: tuple[float, Mapping[str, HashedKey]] | None = None
        self.revoked_at: dict[str, float] = {}
        self.faults: list[str] = []
        self.keys = {key: HashedKey(key, "", Role.TENANT_USER, frozenset(), None, False, ()) for key in sorted(keys)}

    def forget_tenant(self, tenant: str) -> int:
        """See StoreClient; it keeps no names."""
        return 0

    async def key_changes(self, epoch: str, after: int, used: Iterable[str]) -> keys_pb2.ListKeyChangesResponse:
        """See StoreClient; a store that is cut off says how old its keys are."""
        since, keys = self.cut_off or (time.monotonic(), self.keys)
        age = Duration()
        age.FromMilliseconds(math.ceil((time.monotonic() - since) * 1e3))
        changed = [
            keys_pb2.Key(key_id=key.key_id, role=key.role, revoke_time=Timestamp(seconds=1) if key.revoked else None)
            for key in keys.values()
            if key.revoked or not after
        ]
        hashed = [keys_pb2.HashedKey(key=key) for key in changed]
        return keys_pb2.ListKeyChangesResponse(epoch="one", latest=1, keys=hashed, age=age)

    async def save_accounts(self, accounts: Sequence[accounts_pb2.Account]) -> None:
        """See StoreClient; all accounts are of one day."""
        self._check_answers()
        for one in accounts:
            if one.day_tokens >= self._accounts.setdefault(one.name, one).day_tokens:
                self._accounts[one.name] = one

    async def account_pages(self) -> AsyncIterator[Sequence[accounts_pb2.Account]]:
        """See StoreClient. A page takes as long as many pages take in a large cluster."""
        names = sorted(self._accounts)
        for start in range(0, len(names), _PAGE):
            await asyncio.sleep(_PAGE_S)
            self._check_answers()
            yield [self._accounts[name] for name in names[start : start + _PAGE]]
        self._check_answers()

    def _check_answers(self) -> None:
        if self.away:
            raise Unavailable("the adapter store does not answer", reason="STORE_DOWN")

    def epoch_of(self, revision: str) -> int:
        """See StoreClient."""
        return 0

    async def models(self) -> dict[str, list[RegisteredModel]]:
        """See StoreClient."""
        return {self._base.name: [RegisteredModel(self._base.digest, self._base.tasks)]}

    async def manifest(self, name: str) -> Manifest:
        """See StoreClient."""
        base = self._base
        return Manifest(
            base.name,
            base.digest,
            base.architecture,
            base.context_length,
            base.vocab_size,
            {},
            tasks=base.tasks,
            labels=base.labels,
        )

    async def config_of(self, tenant: str, revision: str) -> bytes:
        """See StoreClient."""
        return CHECKS_CONFIG if revision == CHECKS.revision else b"{}"

    async def resolve(self, tenant: str, name: str) -> ResolvedAdapter:
        """See StoreClient; the name may be that of the one revision."""
        short = name.rpartition("/")[2].partition("@")[0]
        if short not in self._adapters:
            raise NotFound("adapter", name)
        return ResolvedAdapter(self._adapters[short], self._base.digest)


class WatchedDispatcher(Dispatcher):
    """A dispatcher that reports the frames that changed what a client will get, and their tokens."""

    accepted: Accepted

    def receive_frame(self, link: WorkerLink, frame: Frame) -> None:
        """See Dispatcher."""
        routed = next((routed for routed in self.jobs if routed.job.job_id == frame.job_id), None)
        before = _seen(routed)
        super().receive_frame(link, frame)
        after = _seen(routed)
        if after != before:
            self.accepted(link, frame, after[0] - before[0])


def _seen(routed: RoutedJob | None) -> tuple[int, tuple[bool, ...], bool]:
    if routed is None:
        return 0, (), False
    ended = tuple(choice.finish is not None for choice in routed.choices)
    return routed.emitted_tokens, ended, routed.failure is not None


class SimulatedRouter:
    """The machine of a router."""

    def __init__(
        self,
        name: str,
        store: SimulatedStore,
        cells: Sequence[SimulatedRedis],
        network: Network,
        accepted: Accepted,
        quotas: Path,
    ) -> None:
        self.name = name
        self.store = store
        self._store: Any = store
        # The first is the home of all that is no queue's.
        self._servers = cells
        self._redis = cells[0]
        self._network = network
        self._accepted = accepted
        self._quotas = quotas
        self.start()

    def start(self) -> None:
        """Start a new process."""
        self.node = Node(self.name)
        # Of the clients whose streams are open; in their order, which a set would not keep.
        self.calls: dict[asyncio.Queue[Any], None] = {}
        servers = [CellServer(one.cell.cell, one.client) for one in self._servers]
        self.models = Models(self._store, servers, QueueLimits())
        self.models.announce(self.name)
        self.reach = RelayReach()
        self.reach.address = self.name
        names = [server.name for server in servers]
        self.cells = Cells(names, self.reach.linked, DrainedCells(self._redis.client))
        placer = Placer(
            lambda *place: self.reach.linked(self.models.serving(*place)),
            lambda _: 1.0,
            MIB_TOKENS,
            calling_key_terms=lambda: self.plans.key_terms(calling_key()),
            homes_of=self.models.live.homes_of,
            fits_elsewhere=self.cells.fits_elsewhere,
        )
        self.dispatcher = WatchedDispatcher(
            self.models.queue_of,
            placer.place,
            timing=DispatchTiming(seal_s=self._redis.seal_s / 2),
            links=self.reach.links,
            cells=self.cells,
            why_unservable=self.models.why_unservable,
        )
        self.dispatcher.accepted = self._accepted
        relay: Any = Registrar(self._network.listen(self.name, self.node))
        self.relay = RelayService(self.dispatcher)
        relay_pb2_grpc.add_RelayServiceServicer_to_server(self.relay, relay)
        # Keys of callers, as the store has them at the start; a revocation comes later.
        self.keys = KeyDirectory(time.monotonic)
        self.keys.put(tuple(self._store.keys.values()))
        key_copy = KeyCopy(self._store, self.keys)
        self.keys.look_done()
        tokens = ResumeTokens(ResumeKeys("the key that all routers share"), ResumeEpochs(self._store, self.keys))
        encoder, proofs = PromptTokenizer(), GrammarProofs()
        configs = AdapterConfigs(self._store)
        admission = Admission(self.models, self._store, configs, self.name, self.reach, encoder, proofs)
        self.plans = plans_in(self._quotas)
        accounts: Any = self._store
        usage: Any = SimulatedUsage(self._redis) if self.plans.has_limits else None
        quotas = self.quotas = Quotas(SimulatedLedger(self._redis.client), self.plans, usage=usage, store=accounts)
        self.generation = Generation(admission, self.dispatcher, tokens, quotas, encoder)
        rollouts = self.generation.rollouts
        self.tenant_data = RouterData(self.dispatcher, self._store, configs, encoder, proofs, quotas, rollouts)
        self._unary_calls = UnaryCalls(self.generation, admission)
        for_ever = (
            every(LOOK_S, self.models.look_at_store),
            *([every(KEYS_LOOK_S, key_copy.look)] if self._store.keys else []),
            self._follow_workers(),
            self.dispatcher.redispatch_missing(),
            *([every(LOOK_S, self.cells.look_at_drained, passing=REDIS_DOWN)] if len(names) > 1 else []),
            every(STALLED_LOOK_S, self.generation.drop_stalled),
            quotas.follow(),
        )
        self._following = [self.node.start(work) for work in for_ever]

    async def _follow_workers(self) -> None:
        # loraplex.router.app, but for its health.
        while True:
            await look_at_workers(self.models, self.dispatcher, self.reach, self.cells)
            await asyncio.sleep(LOOK_S)

    async def messages(
        self, request: Request, token: str, received: Mapping[int, Received], deadline_s: float | None
    ) -> AsyncGenerator[Message]:
        """Return the messages of a Generate call, or with a token of a Resume call."""
        if token:
            return self.generation.resume(request, await self.generation.verify(request, token), received, deadline_s)
        return self.generation.run(request, deadline_s)

    async def scores(
        self, request: Request, continuations: Sequence[tuple[int, ...]], deadline_s: float | None
    ) -> AsyncGenerator[Scored]:
        """Yield the answer of a Score call."""
        scores, summary = await self._unary_calls.score(request, continuations, deadline_s)
        yield Scored(tuple(scores), summary)

    async def vectors(self, request: EncodeRequest, deadline_s: float | None) -> AsyncGenerator[Encoded]:
        """Yield the answer of an Embed or Classify call."""
        vectors, summary = await self._unary_calls.encode(request, deadline_s, lambda vector: vector)
        yield Encoded(tuple(vectors), summary)

    async def forget_tenant(self, tenant: str) -> None:
        """Remove a tenant's data here, and at the workers that have a link, as router.purge asks for it."""
        await self.tenant_data.forget(tenant)
        asked = (self.relay.forgets.ask(one, tenant) for one in sorted(self.reach.links.incarnations))
        await asyncio.gather(*asked)

    def failed(self) -> Sequence[asyncio.Task[None]]:
        """Return the tasks that must run for ever and ended."""
        return [task for task in self._following if task.done()]

    async def drain(self) -> None:
        """Hand back all calls and end what was begun, as loraplex.router.app does before its process ends."""
        self.generation.drain()
        await asyncio.sleep(HAND_OVER_S)
        await self.dispatcher.drain_tasks()
        await self.quotas.drain(HAND_OVER_S)

    def kill(self) -> None:
        """Kill the process, as SIGKILL does."""
        self.node.kill()
        self._network.lost(self.node)
        for redis in self._servers:
            redis.lost(self.node)
        for inbox in self.calls:
            inbox.put_nowait((asyncio.get_running_loop().time(), BrokenError()))
