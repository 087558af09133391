"""The base models that this router serves, and the workers that live for each: what its health depends on."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from redis.asyncio import Redis

from broker.connection import REDIS_DOWN
from broker.keys import Keys
from broker.liveness import TTL_MS, Census, Liveness
from broker.messages import WorkerPhase, WorkerState
from broker.queue import JobQueue
from broker.terms import QueueLimits
from router.catalog.store_client import Manifest, StoreClient
from router.dispatch.dispatcher import Dispatcher
from router.text.tokenizer import Text, text_of
from rpc.errors import CallError, InvalidField, NotFound, Unavailable

log = logging.getLogger(__name__)

WATCH_S = 0.5
# A Redis that does not answer in this time is hung; and is away when it has not answered for a worker's time to live.
ANSWER_S = 1.0
AWAY_S = TTL_MS / 1e3


@dataclass(frozen=True)
class ServedModel:
    """A base model with its text and its queue."""

    manifest: Manifest
    text: Text
    queue: JobQueue
    liveness: Liveness


class Models:
    """Follows the store's registrations and the workers' liveness."""

    def __init__(self, store: StoreClient, redis: Redis, cell: str, limits: QueueLimits) -> None:
        self._store = store
        self._redis = redis
        self._cell = cell
        self._limits = limits
        self._served: dict[str, ServedModel] = {}
        # Digests of models whose files are of no use.
        self._refused: set[str] = set()
        self._workers: dict[str, list[WorkerState]] = {}
        # What workers reach this router's relay at; empty until it listens.
        self._reply_to = ""
        # Which server and data each model's last census came from.
        self._servers: dict[str, str] = {}
        # Whether Redis did not answer when it was last asked, and when it last did.
        self._away, self._answered_at = False, time.monotonic()
        # After an outage of Redis nobody lapses until a full TTL has passed.
        self._no_lapse_before = 0.0
        self._told = ""

    def get(self, name: str) -> ServedModel:
        """The model of that name, or the only one. Raises NotFound, InvalidField or Unavailable."""
        if name:
            if name not in self._served:
                raise NotFound("model", name)
            return self._served[name]
        if not self._served:
            raise Unavailable("no base model is registered yet", reason="NO_MODEL")
        if len(self._served) > 1:
            raise InvalidField("model", f"name one of {', '.join(sorted(self._served))}")
        return next(iter(self._served.values()))

    def queue_of(self, name: str) -> JobQueue:
        """The queue of a model that is served, or was."""
        return self._served[name].queue

    @property
    def served(self) -> list[ServedModel]:
        """All of them, by name."""
        return [self._served[name] for name in sorted(self._served)]

    def workers(self, name: str) -> list[WorkerState]:
        """The model's live workers, at most WATCH_S stale."""
        return self._workers.get(name, [])

    def serving(self, name: str) -> list[WorkerState]:
        """Those of them that take new work, of the model that is registered now."""
        digest = self._served[name].manifest.digest
        return [s for s in self.workers(name) if s.phase is WorkerPhase.SERVING and s.base_digest == digest]

    async def living(self, model: ServedModel) -> list[WorkerState]:
        """The model's live workers now. Raises Unavailable."""
        try:
            return await model.liveness.living()
        except REDIS_DOWN as error:
            raise Unavailable("Redis does not answer", reason="QUEUE_DOWN") from error

    def waits_for(self) -> str:
        """What is missing before work can be served; empty: nothing."""
        if time.monotonic() - self._answered_at >= AWAY_S:
            return "Redis to answer"
        if not self._served:
            return "a base model to be registered (loraplex models push)"
        if not any(self.serving(name) for name in self._served):
            return "a worker that serves " + " or ".join(sorted(self._served))
        return ""

    def announce(self, reply_to: str) -> None:
        """The router lives at that address from now on: what waits for it is kept."""
        self._reply_to = reply_to

    async def follow_workers(self, dispatcher: Dispatcher) -> None:
        """One look at who lives; the dispatcher is told."""
        try:
            async with asyncio.timeout(ANSWER_S):
                for model in self.served:
                    self._count(model.manifest.name, await model.liveness.look(self._reply_to))
        except REDIS_DOWN as error:  # a timeout is one of them
            self._no_lapse_before = time.monotonic() + TTL_MS / 1e3
            if not self._away:
                log.warning("Redis does not answer: %s", str(error) or type(error).__name__)
            self._away = True
            return
        self._answered_at = time.monotonic()
        if self._away:
            log.info("Redis answers again")
        self._away = False
        if time.monotonic() >= self._no_lapse_before:
            states = [state for states in self._workers.values() for state in states]
            dispatcher.living({state.incarnation for state in states})

    def _count(self, name: str, census: Census) -> None:
        """Take a census. Another server, or one without its data, may not know who lives: nobody lapses for now."""
        if self._servers.get(name, census.server) != census.server:
            log.warning("Redis has restarted, failed over or lost its data: nobody lapses for %g s", TTL_MS / 1e3)
            self._no_lapse_before = time.monotonic() + TTL_MS / 1e3
        self._servers[name] = census.server
        workers = census.workers
        if time.monotonic() < self._no_lapse_before:
            seen = {state.incarnation for state in workers}
            workers = [*workers, *(state for state in self.workers(name) if state.incarnation not in seen)]
        self._workers[name] = workers

    async def follow_store(self) -> None:
        """Forever: serve what is registered."""
        while True:
            try:
                for name, digest in (await self._store.models()).items():
                    known = self._served.get(name)
                    if digest not in self._refused and (known is None or known.manifest.digest != digest):
                        await self._serve(name)
            except CallError as error:
                self._say(error.message)
            await asyncio.sleep(WATCH_S)

    async def _serve(self, name: str) -> None:
        manifest = await self._store.manifest(name)
        try:
            text = await asyncio.to_thread(text_of, manifest.architecture, manifest.vocab_size, manifest.files)
        except Exception as error:  # its files are a stranger's: whatever is wrong with them, the others go on
            log.warning("base model %s can't be served: %s: %s", name, type(error).__name__, error)
            self._refused.add(manifest.digest)
            return
        keys = Keys(name, self._cell)
        queue = JobQueue(self._redis, keys, limits=self._limits)
        self._served[name] = ServedModel(manifest, text, queue, Liveness(self._redis, keys))
        log.info("serves base model %s (%s)", name, manifest.digest)

    def _say(self, message: str) -> None:
        if message != self._told:
            log.warning("%s", message)
        self._told = message
