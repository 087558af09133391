"""The base models that a router serves, and their queues in its cells."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loraplex.contracts.artifacts.generation_config import UNSAID, GenerationConfig
from loraplex.contracts.artifacts.names import sha256_bytes, sha256_json
from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.messages import AdapterRef, Job, WorkerPhase, WorkerState
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import QueueLimits
from loraplex.router.catalog.cells import ANSWER_S, CellKey, CellServer, LiveWorkers
from loraplex.router.catalog.store_client import Manifest, RegisteredModel, StoreClient
from loraplex.router.text.chat import ChatTemplate
from loraplex.router.text.tokenizer import HashTokenizer, ModelTokenizer, panics_as_errors
from loraplex.runtime.rpc.children.pool import ChildDiedError, ChildPool
from loraplex.runtime.rpc.errors import CallError, InvalidField, Mismatch, NotFound, Unavailable
from loraplex.runtime.telemetry.logging import LogOnce

if TYPE_CHECKING:
    from loraplex.contracts.broker.seals import Seals

log = logging.getLogger(__name__)

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
        self._children = ChildPool("loraplex.router.text.file_tokenizer", "TOKENIZER_BUSY", children=1, wall_s=WALL_S)
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
                    tokenizer = await asyncio.to_thread(tokenizer_of, manifest.architecture, manifest.files)
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


def tokenizer_of(architecture: str, files: Mapping[str, bytes]) -> ModelTokenizer:
    """Make the tokenizer of a base model from its manifest. Raises ValueError on a broken file."""
    if architecture == "hash":
        return HashTokenizer()
    if "tokenizer.json" not in files:
        return ModelTokenizer()
    # Imported for such a model alone: the libraries of tokenizers and templates take a quarter of a router's start.
    from loraplex.router.text.file_tokenizer import FileTokenizer

    with panics_as_errors():
        return FileTokenizer(files)


_NO_MODEL = "a base model to be registered (loraplex models push)"
# Reasons of errors: the base model of a request was replaced; no live worker is large enough for a request.
BASE_REPLACED, NO_WORKER_FITS = "BASE_REPLACED", "NO_WORKER_FITS"


@contextmanager
def asking_redis() -> Iterator[None]:
    """Raise Unavailable where Redis does not answer."""
    try:
        yield
    except REDIS_DOWN as error:
        raise redis_is_silent() from error


def redis_is_silent(cells: Sequence[str] = ()) -> Unavailable:
    """Return the error of a call that needs an answer of Redis, or of that of these cells."""
    of_cells = f" of cell {', '.join(cells)}" if cells else ""
    return Unavailable(f"Redis{of_cells} does not answer", reason="QUEUE_DOWN")


@dataclass(frozen=True, slots=True)
class Living:
    """The live workers, with their models and cells, and the names of the cells whose Redis does not answer."""

    workers: Sequence[tuple[ServedModel, ModelCell, WorkerState]]
    silent: Sequence[str] = ()


@dataclass(frozen=True)
class ModelCell:
    """The queue of a model in one cell, and the workers there."""

    name: str
    queue: JobQueue
    liveness: Liveness


@dataclass(frozen=True)
class ServedModel:
    """A base model with its tokenizer, and its cells by name.

    `template` and `end_ids`, end tokens beside the manifest's, are those of a request's adapter.
    `generation_config` has what requests get that leave it unset; it is empty where the router does not use it.
    `unset_max_tokens` bounds answers whose requests set no max_tokens; 0: it does not.
    """

    manifest: Manifest
    tokenizer: ModelTokenizer
    cells: Mapping[str, ModelCell]
    generation_config: GenerationConfig = UNSAID
    unset_max_tokens: int = 0
    template: ChatTemplate = field(default_factory=ChatTemplate)
    end_ids: tuple[int, ...] = ()
    # The ids that a request's adapter counts from, if it is an activated one.
    invocation: tuple[int, ...] = ()

    def default_max_tokens(self, default: int) -> int:
        """Return the maximum number of tokens of an answer whose request sets none, before the context caps it."""
        own = self.generation_config.max_new_tokens or default
        return min(own, self.unset_max_tokens or own)


class Models:
    """Follows the store's registrations and the workers' liveness."""

    def __init__(
        self,
        store: StoreClient,
        cells: Sequence[CellServer],
        limits: QueueLimits,
        *,
        answer_s: float = ANSWER_S,
        clock: Callable[[], float] | None = None,
        seals: Seals | None = None,
    ) -> None:
        self._store = store
        self._cells = cells
        self._limits, self._seals = limits, seals
        clock = clock or time.monotonic
        self._served: dict[str, ServedModel] = {}
        # True once everything that is registered with the store has been read.
        self.listed = False
        self._tokenizers = ModelTokenizers(clock)
        # Revisions that are not live, by name and digest: while the store has them, or workers serve them.
        self._others: dict[tuple[str, str], ServedModel] = {}
        self._registered: set[tuple[str, str]] = set()
        self.live = LiveWorkers(clock, answer_s)
        # Address of this router's relay; empty until it listens.
        self._reply_to = ""
        self._log_once = LogOnce(log)
        # Tells which model the current call means where it names none; empty: the only one.
        self.default_model: Callable[[], str] = lambda: ""
        # Returns the error of the current call where its plans do not allow a model or an adapter.
        self.refusal: Callable[[str, AdapterRef | None], CallError | None] = lambda model, adapter: None
        # False: requests get nothing of what models' files say of sampling.
        self.use_generation_config = True
        # Maximum tokens of answers whose requests set none; 0: no maximum.
        self.unset_max_tokens = 0
        # True: requests of a model without a worker wait for one, which the scaler starts.
        self.scales_from_zero = False

    def get(self, name: str) -> ServedModel:
        """Return the live revision of the model of that name; without one of the caller's default, or the only one.

        Raises NotFound, InvalidField, PermissionDenied or Unavailable.
        """
        if name := name or self.default_model():
            if refusal := self.refusal(name, None):
                raise refusal
            if name not in self._served and not self.listed:
                raise Unavailable("the registered base models are still being read", reason="NO_MODEL")
            if name not in self._served:
                raise NotFound("model", name)
            return self._served[name]
        if not self._served:
            raise Unavailable("no base model is registered yet", reason="NO_MODEL")
        names = [model.manifest.name for model in self.allowed] or sorted(self._served)
        if len(names) > 1:
            raise InvalidField(
                "model", f"name one of {', '.join(names)} (or have an operator set default_model in a plan)"
            )
        return self.get(names[0])

    def queue_of(self, name: str, cell: str) -> JobQueue:
        """Return the queue of a model that is served, or was, in a cell."""
        return self._served[name].cells[cell].queue

    @property
    def served(self) -> list[ServedModel]:
        """Return the served models' live revisions, by name."""
        return [self._served[name] for name in sorted(self._served)]

    @property
    def allowed(self) -> list[ServedModel]:
        """Return those of them that the plans of the current call allow."""
        return [model for model in self.served if self.refusal(model.manifest.name, None) is None]

    def revisions(self, name: str) -> list[ServedModel]:
        """Return the revisions of a served model that calls may use: the live one, then others that workers have."""
        others = [other for key, other in self._others.items() if key[0] == name and self._may_live(other)]
        return [self._served[name], *others]

    def workers(self, name: str) -> list[WorkerState]:
        """Return the model's live workers, at most LOOK_S stale."""
        return self.live.of(name) or []

    def serving(self, name: str, digest: str = "", cell: str = "") -> list[WorkerState]:
        """Return the live workers that take new jobs of the base model of that digest; empty: the registered one.

        Without a cell's name, those of all cells that answer.
        """
        digest = digest or self._served[name].manifest.digest
        workers = self.live.in_cell(name, cell) if cell else self.workers(name)
        return [s for s in workers if s.phase is WorkerPhase.SERVING and s.base_digest == digest]

    def expects_worker(self, name: str, digest: str = "") -> bool:
        """Tell whether requests of a base model wait for a worker: for one that was there a moment ago, or any."""
        return self.scales_from_zero or self.live.expects(name, digest or self._served[name].manifest.digest)

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
        live = self.live.of(name)
        if live is None or any(state.base_digest == digest for state in live):
            raise Unavailable(f"{name} was replaced, and its former revision is unknown here", reason=BASE_REPLACED)
        raise Mismatch("model", f"{name} has been replaced since", reason=BASE_REPLACED)

    def why_unservable(self, job: Job) -> CallError | None:
        """Return the error of a job that no live worker can take; None while one can, or while one may still come."""
        of_base = self.live.sizes(job.model, job.base_digest)
        if of_base is None:
            if job.base_digest == self._served[job.model].manifest.digest:
                return None
            message = f"{job.model} was replaced, and no worker serves its former revision"
            if job.resumed or job.done or any(job.emitted.values()):  # it can't go on elsewhere
                return Mismatch("model", message, reason=BASE_REPLACED)
            return Unavailable(f"{message}; call again for the live one", reason=BASE_REPLACED)
        if any(job.tokens <= max_tokens and job.rank <= max_rank for max_tokens, max_rank in of_base):
            return None
        message = f"no live worker takes {job.tokens} tokens of prompt and answer with an adapter of rank {job.rank}"
        return Unavailable(message, reason=NO_WORKER_FITS)

    async def living(self) -> Living:
        """Ask Redis for the live workers of all models. Raises Unavailable where no cell answers."""
        asked = [(model, cell) for model in self.served for cell in model.cells.values()]
        answers = await asyncio.gather(*(self._workers_in(cell) for _, cell in asked))
        pairs = list(zip(asked, answers, strict=True))
        silent = {cell.name for (_, cell), workers in pairs if workers is None}
        if asked and len(silent) == len(self._cells):
            raise redis_is_silent()
        return Living([(*place, state) for place, workers in pairs for state in workers or ()], sorted(silent))

    async def _workers_in(self, cell: ModelCell) -> list[WorkerState] | None:
        """Return the live workers of a cell, None where its Redis does not answer; the other cells go on."""
        if len(self._cells) > 1 and self.live.is_away(cell.name):
            return None
        try:
            return await cell.liveness.live_workers()
        except REDIS_DOWN:
            return None

    def waits_for(self) -> str:
        """Return what is missing before requests can be served; empty: nothing."""
        if self.live.redis_is_away:
            return "Redis to answer"
        if not self._served:
            refused = "; ".join(self._tokenizers.refusals)
            return f"other files of base model {refused}" if refused else _NO_MODEL
        if not any(map(self.expects_worker, self._served)):
            return "a worker that serves " + " or ".join(sorted(self._served))
        return ""

    def reached(self, model: ServedModel) -> list[ModelCell]:
        """Return the cells of a model but those that are away, which would only keep a caller waiting."""
        cells = list(model.cells.values())
        return [cell for cell in cells if len(cells) == 1 or not self.live.is_away(cell.name)]

    def announce(self, reply_to: str) -> None:
        """Register the address of the router's relay as live from now on, so that the jobs for it stay in the queue."""
        self._reply_to = reply_to

    async def look_at_workers(self) -> set[str] | None:
        """Ask Redis for the live workers; return their incarnations, or None while no worker may count as dead."""
        cells: dict[CellKey, Liveness] = {
            (model.manifest.name, name): cell.liveness for model in self.served for name, cell in model.cells.items()
        }
        living = await self.live.look(cells, self._reply_to)
        self._others = {
            key: other for key, other in self._others.items() if key in self._registered or self._may_live(other)
        }
        return living

    def _may_live(self, model: ServedModel) -> bool:
        workers = self.live.of(model.manifest.name)
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
        cells = {server.name: self._open_cell(manifest.name, server) for server in self._cells}
        config = manifest.generation_config if self.use_generation_config else UNSAID
        return ServedModel(manifest, tokenizer, cells, config, self.unset_max_tokens)

    def _open_cell(self, model: str, server: CellServer) -> ModelCell:
        keys = Keys(model, server.name)
        queue = JobQueue(server.redis, keys, limits=self._limits, seals=self._seals)
        return ModelCell(server.name, queue, Liveness(server.redis, keys))
