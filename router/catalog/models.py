"""The base models that a router serves and the live workers of each, which its health depends on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redis.asyncio import Redis

from artifacts.generation_config import UNSAID, GenerationConfig
from artifacts.names import sha256_bytes, sha256_json
from broker.connection import REDIS_DOWN
from broker.keys import Keys
from broker.liveness import Census, Liveness
from broker.messages import Job, WorkerPhase, WorkerState
from broker.queue import JobQueue
from broker.terms import ADAPTER_DIGITS, WORKER_TTL_MS, QueueLimits
from router.catalog.store_client import Manifest, RegisteredModel, StoreClient
from router.text.tokenizer import ModelTokenizer, panics_as_errors, tokenizer_of
from rpc.children.pool import ChildDiedError, ChildPool
from rpc.errors import CallError, InvalidField, Mismatch, NotFound, Unavailable
from telemetry.logging import LogOnce

if TYPE_CHECKING:
    from broker.seals import Seals

log = logging.getLogger(__name__)

# Interval in seconds between looks at the workers, and at the store.
LOOK_S = 0.5
# Time in seconds without an answer after which the router's health says that Redis is away: a worker's time to live.
AWAY_S = WORKER_TTL_MS / 1e3
# Timeout in seconds for a model's census: one that hangs ends AWAY_S after the last answer. A census over a new
# connection takes several round trips, and one that is given up closes its connection: a short timeout would go on for
# as long as Redis is slow.
ANSWER_S = AWAY_S - LOOK_S
# Time in seconds after an outage or a loss of data during which no worker counts as dead: all must beat again first.
NO_LAPSE_S = WORKER_TTL_MS / 1e3


class LiveWorkers:
    """The live workers, at most one look's interval stale."""

    def __init__(
        self,
        clock: Callable[[], float],
        answer_s: float = ANSWER_S,
        set_aside: Callable[[str], None] = lambda key: None,
    ) -> None:
        self._clock = clock
        self._answer_s = answer_s
        # Called with the name of each key that a census has set aside.
        self._set_aside = set_aside
        self._workers: dict[str, list[WorkerState]] = {}
        # Number of homes of the adapters with several, by model (broker.liveness.Census).
        self._homes: dict[str, Mapping[str, int]] = {}
        # Sizes of the workers that take new jobs: maximum tokens and rank, by model and base digest.
        self._sizes: dict[str, dict[str, set[tuple[int, int]]]] = {}
        # Server and data that each model's last census came from.
        self._servers: dict[str, str] = {}
        # True after a failed look; and the time of the last one that succeeded.
        self._failed, self._answered_at = False, clock()
        # Time until which no worker counts as dead.
        self._no_lapse_before = 0.0

    def of(self, model: str) -> list[WorkerState] | None:
        """Return a model's live workers; None before its first census."""
        return self._workers.get(model)

    def homes_of(self, model: str, digest: str) -> int:
        """Return how many homes an adapter has: workers that its jobs prefer."""
        return self._homes.get(model, {}).get(digest[-ADAPTER_DIGITS:], 1)

    def sizes(self, model: str, base_digest: str) -> set[tuple[int, int]] | None:
        """Return the sizes of the workers that take new jobs of a base model; None: there is no such worker."""
        return self._sizes.get(model, {}).get(base_digest)

    @property
    def redis_is_away(self) -> bool:
        """Tell whether Redis has answered no census for AWAY_S."""
        return self._clock() - self._answered_at >= AWAY_S

    async def look(self, models: Mapping[str, Liveness], reply_to: str) -> set[str] | None:
        """Take a census of each model; return the live incarnations, or None while no worker may count as dead.

        `reply_to`: the address of this router's relay, which is registered as live.
        """
        failures = await asyncio.gather(*(self._ask(name, liveness, reply_to) for name, liveness in models.items()))
        if "" in failures or not models:
            self._answered_at = self._clock()
        if failure := next(filter(None, failures), ""):
            self._no_lapse_before = self._clock() + NO_LAPSE_S
            if not self._failed:
                log.warning("Redis does not answer: %s", failure)
        elif self._failed:
            log.info("Redis answers again")
        self._failed = bool(failure)
        if self._clock() < self._no_lapse_before:
            return None
        return {state.incarnation for states in self._workers.values() for state in states}

    async def _ask(self, model: str, liveness: Liveness, reply_to: str) -> str:
        """Take the census of a model; return why that failed, or nothing."""
        try:
            async with asyncio.timeout(self._answer_s):
                self._count(model, await liveness.take_census(reply_to, self._busy(model)))
        except REDIS_DOWN as error:  # a timeout is one of them
            return str(error) or type(error).__name__
        return ""

    def _busy(self, model: str) -> float | None:
        """Return to how many workers' rows the used rows of all add up; None before the first census."""
        states = self._workers.get(model)
        if states is None:
            return None
        return sum((state.rows_running + state.rows_waiting) / max(1, state.rows_limit) for state in states)

    def _count(self, model: str, census: Census) -> None:
        """Take a census. Another server, or one that has lost its data, knows no worker yet: none counts as dead."""
        if self._servers.get(model, census.server) != census.server:
            log.warning("Redis restarted, failed over or lost its data: no worker counts as dead for %g s", NO_LAPSE_S)
            self._no_lapse_before = self._clock() + NO_LAPSE_S
        self._servers[model] = census.server
        for key in census.set_aside:
            self._set_aside(key)
        self._homes[model] = census.homes
        workers = census.workers
        if self._clock() < self._no_lapse_before:
            seen = {state.incarnation for state in workers}
            workers = [*workers, *(state for state in self._workers.get(model, ()) if state.incarnation not in seen)]
        self._workers[model] = workers
        sizes = self._sizes[model] = dict[str, set[tuple[int, int]]]()
        for state in workers:
            if state.phase is WorkerPhase.SERVING:
                sizes.setdefault(state.base_digest, set()).add((state.max_tokens, state.max_rank))


# Timeout in seconds for a child, which may take 20 s of processor time.
WALL_S = 120.0
# Interval in seconds between looks whether other files were registered for a model whose files were refused.
LOOK_AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class _Refusal:
    name: str
    files: str
    why: str
    look_again_at: float


class ModelTokenizers:
    """The tokenizers of a router's base models."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._children = ChildPool("router.text.file_tokenizer", "TOKENIZER_BUSY", children=1, wall_s=WALL_S)
        # By the digest of the base model.
        self._refused: dict[str, _Refusal] = {}

    @property
    def refusals(self) -> list[str]:
        """Return the models that cannot be served, and why."""
        return [f"{refusal.name} ({refusal.why})" for refusal in self._refused.values()]

    def is_refused(self, digest: str) -> bool:
        """Tell whether a model's files were refused a moment ago."""
        return digest in self._refused and self._clock() < self._refused[digest].look_again_at

    async def load(self, manifest: Manifest) -> ModelTokenizer | None:
        """Return a model's tokenizer; None where its files cannot be used, which is logged once.

        Raises Unavailable on a machine without time for it.
        """
        files = sha256_json({name: sha256_bytes(data) for name, data in manifest.files.items()})
        former = self._refused.get(manifest.digest)
        if former is None or former.files != files:
            why = await self._why_unusable(manifest.files)
            if not why:
                try:
                    tokenizer = await asyncio.to_thread(_load, manifest)
                    self._refused.pop(manifest.digest, None)
                    return tokenizer
                except Exception as error:  # anybody may have written the files: the other models go on
                    why = f"{type(error).__name__}: {error}"
            log.warning("base model %s can't be served, its tokenizer files %s", manifest.name, why)
        else:
            why = former.why
        self._refused[manifest.digest] = _Refusal(manifest.name, files, why, self._clock() + LOOK_AGAIN_S)
        return None

    async def _why_unusable(self, files: Mapping[str, bytes]) -> str:
        if "tokenizer.json" not in files:
            return ""
        try:
            texts = {name: data.decode() for name, data in files.items()}
        except UnicodeDecodeError:
            return "are not UTF-8"
        try:
            return str((await self._children.ask("", {"files": texts})).get("error", ""))
        except ChildDiedError as error:
            return f"ended the process that tried them out: it {error}"


def _load(manifest: Manifest) -> ModelTokenizer:
    with panics_as_errors():
        return tokenizer_of(manifest.architecture, manifest.files)


_NO_MODEL = "a base model to be registered (loraplex models push)"
# Tokens of an answer where neither request nor model sets a maximum; fewer where the context ends before.
DEFAULT_MAX_TOKENS = 128
# Reasons of errors: the base model of a request was replaced; no live worker is large enough for a request.
BASE_REPLACED, NO_WORKER_FITS = "BASE_REPLACED", "NO_WORKER_FITS"


@contextmanager
def asking_redis() -> Iterator[None]:
    """Raise Unavailable where Redis does not answer."""
    try:
        yield
    except REDIS_DOWN as error:
        raise Unavailable("Redis does not answer", reason="QUEUE_DOWN") from error


@dataclass(frozen=True)
class ServedModel:
    """A base model with its tokenizer and its queue.

    `generation_config` has what requests get that leave it unset; it is empty where the router does not use it.
    """

    manifest: Manifest
    tokenizer: ModelTokenizer
    queue: JobQueue
    liveness: Liveness
    generation_config: GenerationConfig = UNSAID

    @property
    def default_max_tokens(self) -> int:
        """Return the maximum number of tokens of an answer whose request sets none, before the context caps it."""
        return self.generation_config.max_new_tokens or DEFAULT_MAX_TOKENS


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
        self._tokenizers = ModelTokenizers(clock)
        # Revisions that are not live, by name and digest: while the store has them, or workers serve them.
        self._others: dict[tuple[str, str], ServedModel] = {}
        self._registered: set[tuple[str, str]] = set()
        self._live = LiveWorkers(clock, answer_s, set_aside)
        # Address of this router's relay; empty until it listens.
        self._reply_to = ""
        self._log_once = LogOnce(log)
        # Tells which model the current call means where it names none; empty: the only one.
        self.default_model: Callable[[], str] = lambda: ""
        # False: requests get nothing of what models' files say of sampling.
        self.use_generation_config = True
        # True: requests of a model without a worker wait for one, which the scaler starts.
        self.scales_from_zero = False

    def get(self, name: str) -> ServedModel:
        """Return the live revision of the model of that name; without one of the caller's default, or the only one.

        Raises NotFound, InvalidField or Unavailable.
        """
        if name := name or self.default_model():
            if name not in self._served and not self.listed:
                raise Unavailable("the registered base models are still being read", reason="NO_MODEL")
            if name not in self._served:
                raise NotFound("model", name)
            return self._served[name]
        if not self._served:
            raise Unavailable("no base model is registered yet", reason="NO_MODEL")
        if len(self._served) > 1:
            raise InvalidField(
                "model",
                f"name one of {', '.join(sorted(self._served))} (or have an operator set default_model in a plan)",
            )
        return next(iter(self._served.values()))

    def queue_of(self, name: str) -> JobQueue:
        """Return the queue of a model that is served, or was."""
        return self._served[name].queue

    @property
    def served(self) -> list[ServedModel]:
        """Return the served models' live revisions, by name."""
        return [self._served[name] for name in sorted(self._served)]

    def revisions(self, name: str) -> list[ServedModel]:
        """Return the revisions of a served model that calls may use: the live one, then others that workers have."""
        others = [other for key, other in self._others.items() if key[0] == name and self._may_live(other)]
        return [self._served[name], *others]

    def workers(self, name: str) -> list[WorkerState]:
        """Return the model's live workers, at most LOOK_S stale."""
        return self._live.of(name) or []

    def homes_of(self, name: str, digest: str) -> int:
        """Return how many homes an adapter has: workers that its jobs prefer."""
        return self._live.homes_of(name, digest)

    def serving(self, name: str, digest: str = "") -> list[WorkerState]:
        """Return the live workers that take new jobs of the base model of that digest; empty: the registered one."""
        digest = digest or self._served[name].manifest.digest
        return [s for s in self.workers(name) if s.phase is WorkerPhase.SERVING and s.base_digest == digest]

    def with_digest(self, name: str, digest: str) -> ServedModel:
        """Return the revision of a job, by the model's name and digest.

        One that is not live is known while the store has it or its workers live. Raises Mismatch once neither does,
        Unavailable where only another router knows the model or the revision.
        """
        if name not in self._served:
            raise Unavailable(f"this router does not know base model {name} yet", reason="NO_MODEL")
        model = self._served[name]
        if model.manifest.digest == digest:
            return model
        if (name, digest) in self._others:
            return self._others[name, digest]
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

    async def living(self) -> list[tuple[ServedModel, WorkerState]]:
        """Ask Redis for the live workers of all models. Raises Unavailable."""
        with asking_redis():
            return [(model, state) for model in self.served for state in await model.liveness.live_workers()]

    def waits_for(self) -> str:
        """Return what is missing before requests can be served; empty: nothing."""
        if self._live.redis_is_away:
            return "Redis to answer"
        if not self._served:
            refused = "; ".join(self._tokenizers.refusals)
            return f"other files of base model {refused}" if refused else _NO_MODEL
        if not self.scales_from_zero and not any(self.serving(name) for name in self._served):
            return "a worker that serves " + " or ".join(sorted(self._served))
        return ""

    def announce(self, reply_to: str) -> None:
        """Register the address of the router's relay as live from now on, so that the jobs for it stay in the queue."""
        self._reply_to = reply_to

    async def look_at_workers(self) -> set[str] | None:
        """Ask Redis for the live workers; return their incarnations, or None while no worker may count as dead."""
        models = {model.manifest.name: model.liveness for model in self.served}
        living = await self._live.look(models, self._reply_to)
        self._others = {
            key: other for key, other in self._others.items() if key in self._registered or self._may_live(other)
        }
        return living

    def _may_live(self, model: ServedModel) -> bool:
        workers = self._live.of(model.manifest.name)
        return workers is None or any(state.base_digest == model.manifest.digest for state in workers)

    async def look_at_store(self) -> None:
        """Serve the models that are registered with the store."""
        try:
            models = await self._store.models()
            self._registered = {(name, listed.digest) for name, revisions in models.items() for listed in revisions}
            for name, revisions in models.items():
                for listed in sorted(revisions, key=lambda listed: not listed.live):
                    await self._follow(name, listed)
            self.listed = True
        except CallError as error:
            self._log_once(error.message)

    async def _follow(self, name: str, listed: RegisteredModel) -> None:
        """Serve a revision as the store lists it: its files are read once, so that a promotion waits for nothing."""
        key, live = (name, listed.digest), self._served.get(name)
        is_live = live is not None and live.manifest.digest == listed.digest
        known = live if is_live else self._others.get(key)
        if known is None or not listed.is_of(known.manifest):
            # By the plain name the live one: a store of the version before this one knows no other.
            asked = name if listed.live else f"{name}@{listed.digest}"
            known = None if self._tokenizers.is_refused(listed.digest) else await self._load(asked)
        if known is None:
            return
        if not listed.live:
            if not is_live:  # the live one comes first in the list, and has moved the former
                self._others[key] = known
            return
        if live is not None and not is_live:
            self._others[name, live.manifest.digest] = live
        self._others.pop(key, None)
        if known is not live:
            self._served[name] = known
            log.info("serves base model %s (%s)", name, listed.digest)
            if defaults := known.generation_config.text:
                log.info(
                    "requests for %s that leave them unset get the values of its generation_config.json: %s "
                    "(not with --generation-config none)",
                    *(name, defaults),
                )

    async def _load(self, name: str) -> ServedModel | None:
        """Load a live revision by its name, another as `NAME@DIGEST`; None where its files cannot be used."""
        manifest = await self._store.manifest(name)
        tokenizer = await self._tokenizers.load(manifest)
        if tokenizer is None:
            return None
        keys = Keys(manifest.name, self._cell)
        queue = JobQueue(self._redis, keys, limits=self._limits, seals=self._seals)
        config = manifest.generation_config if self.use_generation_config else UNSAID
        return ServedModel(manifest, tokenizer, queue, Liveness(self._redis, keys), config)
