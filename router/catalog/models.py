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
from broker.liveness import Liveness
from broker.messages import Job
from broker.queue import JobQueue
from broker.terms import QueueLimits
from broker.worker_state import WorkerPhase, WorkerState
from router.catalog.live_workers import ANSWER_S, LOOK_S, LiveWorkers
from router.catalog.manifest import Manifest, RegisteredModel
from router.catalog.model_texts import ModelTexts
from router.catalog.store_client import StoreClient
from router.text.text import Text
from rpc.errors import CallError, InvalidField, Mismatch, NotFound, Unavailable

if TYPE_CHECKING:
    from broker.seals import Seals

log = logging.getLogger(__name__)

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
        set_aside: Callable[[str], None] = lambda key: None,
    ) -> None:
        self._store = store
        self._redis = redis
        self._cell = cell
        self._limits, self._seals = limits, seals
        clock = clock or time.monotonic
        self._served: dict[str, ServedModel] = {}
        # True once everything that is registered with the store has been read.
        self.listed = False
        self._texts = ModelTexts(clock)
        # Models that another one has replaced under their name, by digest, while workers serve them.
        self._replaced: dict[str, ServedModel] = {}
        self._live = LiveWorkers(clock, answer_s, set_aside)
        # Address of this router's relay; empty until it listens.
        self._reply_to = ""
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
        return self._live.of(name) or []

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
        live = self._live.of(name)
        if live is None or any(state.base_digest == digest for state in live):
            raise Unavailable(f"{name} was replaced, and this router does not know what it was", reason=BASE_REPLACED)
        raise Mismatch("model", f"{name} has been replaced since", reason=BASE_REPLACED)

    def why_unservable(self, job: Job) -> CallError | None:
        """Return the error of a job that no live worker can take; None while one can, or while one may still come."""
        of_base = self._live.sizes(job.model, job.base_digest)
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
        if self._live.redis_is_away:
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
        models = {model.manifest.name: model.liveness for model in self.served}
        living = await self._live.look(models, self._reply_to)
        self._replaced = {digest: one for digest, one in self._replaced.items() if self._may_live(one, digest)}
        return living

    def _may_live(self, model: ServedModel, digest: str) -> bool:
        workers = self._live.of(model.manifest.name)
        return workers is None or any(state.base_digest == digest for state in workers)

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
