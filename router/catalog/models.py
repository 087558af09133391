"""The base models that a router serves and the live workers of each, which its health depends on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redis.asyncio import Redis

from broker.connection import REDIS_DOWN
from broker.keys import Keys
from broker.liveness import TTL_MS, Census, Liveness
from broker.messages import Job, WorkerPhase, WorkerState
from broker.queue import JobQueue
from broker.terms import QueueLimits
from router.catalog.model_texts import ModelTexts
from router.catalog.store_client import Manifest, RegisteredModel, StoreClient
from router.text.text import Text
from rpc.errors import CallError, InvalidField, Mismatch, NotFound, Unavailable

if TYPE_CHECKING:
    from broker.seals import Seals

log = logging.getLogger(__name__)

# Interval in seconds between looks at the store and at the workers.
LOOK_S = 0.5
# Timeout in seconds for a look at the workers of all models: a Redis that takes longer hangs.
ANSWER_S = 1.0
# Time in seconds without an answer after which the router's health says that Redis is away: a worker's time to live.
AWAY_S = TTL_MS / 1e3
# Time in seconds after an outage or a loss of data during which no worker counts as dead: all must beat again first.
NO_LAPSE_S = TTL_MS / 1e3


_NO_MODEL = "a base model to be registered (loraplex models push)"
# Reasons of errors: the base model of a request was replaced; no live worker is large enough for a request.
BASE_REPLACED, NO_WORKER_FITS = "BASE_REPLACED", "NO_WORKER_FITS"


@dataclass(frozen=True)
class ServedModel:
    """A base model with its tokenizer and its queue."""

    manifest: Manifest
    text: Text
    queue: JobQueue
    liveness: Liveness


class Models:
    """Follows the store's registrations and the workers' liveness."""

    def __init__(
        self,
        store: StoreClient,
        redis: Redis,
        cell: str,
        limits: QueueLimits,
        *,
        answer_s: float = ANSWER_S,
        clock: Callable[[], float] | None = None,
        seals: Seals | None = None,
    ) -> None:
        self._store = store
        self._redis = redis
        self._cell = cell
        self._limits, self._seals = limits, seals
        self._answer_s = answer_s
        self._clock = clock or time.monotonic
        self._served: dict[str, ServedModel] = {}
        # Whether all that is registered with the store has been read once.
        self.listed = False
        self._texts = ModelTexts(self._clock)
        # Models that another one has replaced under their name, by digest, while workers serve them.
        self._replaced: dict[str, ServedModel] = {}
        self._workers: dict[str, list[WorkerState]] = {}
        # The sizes of the live workers that take new jobs: maximum tokens and rank, by model and base digest.
        self._sizes: dict[str, dict[str, set[tuple[int, int]]]] = {}
        # Address of this router's relay; empty until it listens.
        self._reply_to = ""
        # Server and data that each model's last census came from.
        self._servers: dict[str, str] = {}
        # Whether the last look failed, and when one last succeeded.
        self._away, self._answered_at = False, self._clock()
        # Until when no worker counts as dead.
        self._no_lapse_before = 0.0
        # Error of the store that was logged last.
        self._last_logged = ""

    def get(self, name: str) -> ServedModel:
        """Return the model of that name, or the only one. Raises NotFound, InvalidField or Unavailable."""
        if name:
            if name not in self._served and not self.listed:
                raise Unavailable("the registered base models are still being read", reason="NO_MODEL")
            if name not in self._served:
                raise NotFound("model", name)
            return self._served[name]
        if not self._served:
            raise Unavailable("no base model is registered yet", reason="NO_MODEL")
        if len(self._served) > 1:
            raise InvalidField("model", f"name one of {', '.join(sorted(self._served))}")
        return next(iter(self._served.values()))

    def queue_of(self, name: str) -> JobQueue:
        """Return the queue of a model that is served, or was."""
        return self._served[name].queue

    @property
    def served(self) -> list[ServedModel]:
        """Return the served models, by name."""
        return [self._served[name] for name in sorted(self._served)]

    def workers(self, name: str) -> list[WorkerState]:
        """Return the model's live workers, at most LOOK_S stale."""
        return self._workers.get(name, [])

    def serving(self, name: str, digest: str = "") -> list[WorkerState]:
        """Return the live workers that take new jobs of the base model of that digest; empty: the registered one."""
        digest = digest or self._served[name].manifest.digest
        return [s for s in self.workers(name) if s.phase is WorkerPhase.SERVING and s.base_digest == digest]

    def with_digest(self, name: str, digest: str) -> ServedModel:
        """Return the model of a job, by name and digest; one that was replaced is known while its workers live.

        Raises Mismatch once none does, Unavailable where only another router knows the model or the replaced one.
        """
        if name not in self._served:
            raise Unavailable(f"this router does not know base model {name} yet", reason="NO_MODEL")
        model = self._served[name]
        if model.manifest.digest == digest:
            return model
        if digest in self._replaced:
            return self._replaced[digest]
        if name not in self._workers or any(state.base_digest == digest for state in self._workers[name]):
            raise Unavailable(f"{name} was replaced, and this router does not know what it was", reason=BASE_REPLACED)
        raise Mismatch("model", f"{name} has been replaced since", reason=BASE_REPLACED)

    def why_unservable(self, job: Job) -> CallError | None:
        """Return the error of a job that no live worker can take; None while one can, or while one may still come."""
        of_base = self._sizes.get(job.model, {}).get(job.base_digest)
        if of_base is None:
            if job.base_digest == self._served[job.model].manifest.digest:
                return None
            message = f"{job.model} was replaced, and no worker serves what it was"
            if job.resumed or job.done or any(job.emitted.values()):  # it can't go on elsewhere
                return Mismatch("model", message, reason=BASE_REPLACED)
            return Unavailable(f"{message}; call again for what it is now", reason=BASE_REPLACED)
        if any(job.tokens <= max_tokens and job.rank <= max_rank for max_tokens, max_rank in of_base):
            return None
        message = f"no live worker takes {job.tokens} tokens of prompt and answer with an adapter of rank {job.rank}"
        return Unavailable(message, reason=NO_WORKER_FITS)

    async def living(self, model: ServedModel) -> list[WorkerState]:
        """Ask Redis for the model's live workers. Raises Unavailable."""
        try:
            return await model.liveness.live_workers()
        except REDIS_DOWN as error:
            raise Unavailable("Redis does not answer", reason="QUEUE_DOWN") from error

    def waits_for(self) -> str:
        """Return what is missing before requests can be served; empty: nothing."""
        if self._clock() - self._answered_at >= AWAY_S:
            return "Redis to answer"
        if not self._served:
            refused = "; ".join(self._texts.refusals)
            return f"other files of base model {refused}" if refused else _NO_MODEL
        if not any(self.serving(name) for name in self._served):
            return "a worker that serves " + " or ".join(sorted(self._served))
        return ""

    def announce(self, reply_to: str) -> None:
        """Register the address of the router's relay as live from now on, so that the jobs for it stay in the queue."""
        self._reply_to = reply_to

    async def look_at_workers(self) -> set[str] | None:
        """Ask Redis for the live workers; return their incarnations, or None while no worker may count as dead."""
        try:
            async with asyncio.timeout(self._answer_s):
                for model in self.served:
                    self._count(model.manifest.name, await model.liveness.take_census(self._reply_to))
        except REDIS_DOWN as error:  # a timeout is one of them
            self._no_lapse_before = self._clock() + NO_LAPSE_S
            if not self._away:
                log.warning("Redis does not answer: %s", str(error) or type(error).__name__)
            self._away = True
            return None
        self._answered_at = self._clock()
        if self._away:
            log.info("Redis answers again")
        self._away = False
        if self._clock() < self._no_lapse_before:
            return None
        return {state.incarnation for states in self._workers.values() for state in states}

    def _count(self, name: str, census: Census) -> None:
        """Take a census. Another server, or one that has lost its data, knows no worker yet: none counts as dead."""
        if self._servers.get(name, census.server) != census.server:
            log.warning("Redis restarted, failed over or lost its data: no worker counts as dead for %g s", NO_LAPSE_S)
            self._no_lapse_before = self._clock() + NO_LAPSE_S
        self._servers[name] = census.server
        workers = census.workers
        if self._clock() < self._no_lapse_before:
            seen = {state.incarnation for state in workers}
            workers = [*workers, *(state for state in self.workers(name) if state.incarnation not in seen)]
        self._workers[name] = workers
        sizes = self._sizes[name] = dict[str, set[tuple[int, int]]]()
        for state in workers:
            if state.phase is WorkerPhase.SERVING:
                sizes.setdefault(state.base_digest, set()).add((state.max_tokens, state.max_rank))
        live = {state.base_digest for state in workers}
        replaced = self._replaced.items()
        self._replaced = {digest: model for digest, model in replaced if model.manifest.name != name or digest in live}

    async def follow_store(self) -> None:
        """Serve the models that are registered with the store; never returns."""
        while True:
            try:
                for name, listed in (await self._store.models()).items():
                    if not self._texts.is_refused(listed.digest) and not self._has(name, listed):
                        await self._serve(name)
                self.listed = True
            except CallError as error:
                self._log_once(error.message)
            await asyncio.sleep(LOOK_S)

    def _has(self, name: str, listed: RegisteredModel) -> bool:
        served = self._served.get(name)
        if served is None:
            return False
        return (served.manifest.digest, served.manifest.tasks) == (listed.digest, listed.tasks)

    async def _serve(self, name: str) -> None:
        manifest = await self._store.manifest(name)
        text = await self._texts.load(manifest)
        if text is None:
            return
        if (replaced := self._served.get(name)) is not None:
            self._replaced[replaced.manifest.digest] = replaced
        self._replaced.pop(manifest.digest, None)
        keys = Keys(name, self._cell)
        queue = JobQueue(self._redis, keys, limits=self._limits, seals=self._seals)
        self._served[name] = ServedModel(manifest, text, queue, Liveness(self._redis, keys))
        log.info("serves base model %s (%s)", name, manifest.digest)

    def _log_once(self, message: str) -> None:
        if message != self._last_logged:
            log.warning("%s", message)
        self._last_logged = message
