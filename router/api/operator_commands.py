"""Operators' commands about adapters: which workers they go to, and what is refused before it is sent."""

from __future__ import annotations

import time
from collections import deque

from redis.exceptions import OutOfMemoryError

from broker.commands import COMMAND_TTL_MS, Command, Verb
from broker.connection import REDIS_DOWN
from broker.messages import AdapterRequest, WorkerState
from router.catalog.adapters import check_fitness, check_rank
from router.catalog.models import Models, ServedModel
from router.catalog.store_client import ResolvedAdapter, StoreClient
from rpc.errors import Exhausted, InvalidField, Mismatch, NotFound, Unavailable

# Seconds after which an operator may try again to pin an adapter when Redis is out of memory.
FULL_RETRY_S = 5.0
# Maximum number of tenants that pin the same bytes: each has a record in Redis, which workers read when they start.
PIN_TENANTS = 64
# Maximum number of warms of one tenant within so many seconds, the time that a command waits for its worker.
WARMS = 64
_WARMS_S = COMMAND_TTL_MS / 1e3


class AdapterCommands:
    """Sends the commands of operators; an adapter's name becomes a revision here, as in a request."""

    def __init__(self, models: Models, store: StoreClient) -> None:
        self._models = models
        self._store = store
        self._warms = _WarmRate()

    async def send(self, verb: Verb, tenant: str, name: str, worker_id: str) -> None:
        """Send a command to one worker, or to all of the adapter's base; a pin on all holds for later workers too.

        Raises InvalidField, NotFound, Mismatch, Exhausted or Unavailable.
        """
        if not name:
            raise InvalidField("adapter", "name an adapter")
        resolved = await self._store.resolve(tenant, name)
        if verb is Verb.WARM:
            self._warms.take(tenant)
        request = AdapterRequest(resolved.ref, tenant)
        try:
            if verb is not Verb.UNPIN:
                await self._check(verb, resolved, request, worker_id)
            if not worker_id and verb is not Verb.WARM:
                # Before the look at live workers: a worker that starts meanwhile is seen, or reads the pin itself.
                for model in self._models_of(resolved):
                    pins = model.queue.pins
                    await (pins.pin(request) if verb is Verb.PIN else pins.unpin(request.adapter))
            for model, state in await self._workers(resolved, worker_id):
                if verb is Verb.UNPIN or resolved.ref.rank <= state.max_rank:
                    await model.queue.commands.send(state.incarnation, Command(verb, request))
        except OutOfMemoryError as error:
            message = "Redis is out of memory: it cannot keep the pin; raise its maxmemory, or try again"
            raise Exhausted("redis", message, retry_after_s=FULL_RETRY_S, reason="REDIS_FULL") from error
        except REDIS_DOWN as error:
            raise Unavailable("Redis does not answer", reason="QUEUE_DOWN") from error

    async def _check(self, verb: Verb, resolved: ResolvedAdapter, request: AdapterRequest, worker_id: str) -> None:
        workers = await self._workers(resolved, worker_id)
        for model, _ in workers:
            check_fitness(resolved, model.manifest)
        states = [state for _, state in workers]
        if verb is Verb.WARM and not states:
            raise Unavailable("no worker of the adapter's base model lives", reason="NO_WORKER")
        check_rank(resolved.ref, max((state.max_rank for state in states), default=None))
        if verb is Verb.PIN and states:
            most = max(state.slots_total for state in states) - 1
            for model in self._models_of(resolved):
                _check_slots(request, await model.queue.pins.list(), most)

    def _models_of(self, resolved: ResolvedAdapter) -> list[ServedModel]:
        found = [model for model in self._models.served if model.manifest.adapted_digest == resolved.base_digest]
        if not found:
            raise Mismatch(resolved.ref.revision, "made for a base model that is not served here", reason="WRONG_BASE")
        return found

    async def _workers(self, resolved: ResolvedAdapter, worker_id: str) -> list[tuple[ServedModel, WorkerState]]:
        """Return the live workers with the adapter's base; only the named one, if a name is given."""
        digests = {model.manifest.digest for model in self._models_of(resolved)}
        living = [(model, state) for model in self._models.served for state in await self._models.living(model)]
        if worker_id:
            living = [(model, state) for model, state in living if state.worker_id == worker_id]
            if not living:
                raise NotFound("worker", worker_id)
        found = [(model, state) for model, state in living if state.base_digest in digests]
        if worker_id and not found:
            raise Mismatch(
                resolved.ref.revision, f"made for another base model than worker {worker_id}'s", reason="WRONG_BASE"
            )
        return found


class _WarmRate:
    """Counts the warms of each tenant: a worker's queue of commands is short, and drops the oldest."""

    def __init__(self) -> None:
        self._sent: dict[str, deque[float]] = {}

    def take(self, tenant: str) -> None:
        """Count a warm. Raises Exhausted for one too many."""
        now = time.monotonic()
        self._sent = {name: sent for name, sent in self._sent.items() if now - sent[-1] < _WARMS_S}
        sent = self._sent.setdefault(tenant, deque(maxlen=WARMS))
        if len(sent) == WARMS and (left_s := sent[0] + _WARMS_S - now) > 0:
            message = f"{tenant} has warmed {WARMS} adapters within {_WARMS_S:g} s"
            raise Exhausted(f"tenants/{tenant}/warms", message, retry_after_s=left_s, reason="WARMS_FULL")
        sent.append(now)


def _check_slots(request: AdapterRequest, pinned: list[AdapterRequest], most: int) -> None:
    """Raise Mismatch where every worker would refuse a pin, or where the tenant would have more than it leaves.

    `most` is how many the largest worker keeps.
    """
    ref = request.adapter
    tenants = {pin.tenant for pin in pinned if pin.adapter.digest == ref.digest}
    if tenants:  # it is pinned already
        _check_tenants(request, tenants)
        return
    others = {pin.adapter.digest for pin in pinned}
    own = len({pin.adapter.digest for pin in pinned if pin.tenant == request.tenant})
    if len(others) < most <= len(others) + own:
        raise Mismatch(
            ref.revision,
            f"{request.tenant} has pinned {own} adapters, and {most - len(others)} more can be pinned, "
            "which are for others; unpin one",
            reason="SLOTS_SHARED",
        )
    if len(others) >= most:
        raise Mismatch(
            ref.revision,
            f"{len(others)} adapters are pinned on all workers, which keep at most {most}; unpin one",
            reason="SLOTS_PINNED",
        )


def _check_tenants(request: AdapterRequest, tenants: set[str]) -> None:
    """Raise Mismatch where as many other tenants as may have pinned an adapter, which stays pinned for them."""
    if request.tenant not in tenants and len(tenants) >= PIN_TENANTS:
        message = f"{len(tenants)} tenants have pinned it, which are as many as may; it is on all workers"
        raise Mismatch(request.adapter.revision, message, reason="PIN_SHARED")
