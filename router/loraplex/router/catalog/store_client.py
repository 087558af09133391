"""The router's client of the adapter store: names become digests, manifests have the tokenizers, lists are copied."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any, Generic, Protocol, TypeVar

import grpc
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import adapters_pb2_grpc, releases_pb2, releases_pb2_grpc

from loraplex.admin.v1 import accounts_pb2, accounts_pb2_grpc, keys_pb2, keys_pb2_grpc, plans_pb2, plans_pb2_grpc
from loraplex.contracts.artifacts import ArtifactError, parse_object
from loraplex.contracts.artifacts.generation_config import UNSAID, GenerationConfig
from loraplex.contracts.artifacts.names import adapter_of
from loraplex.contracts.artifacts.outcomes import StepOutcomes
from loraplex.contracts.broker.commands import is_of_tenant
from loraplex.contracts.broker.messages import AdapterRef
from loraplex.runtime.rpc.errors import CallError, InvalidField, NotFound, Unavailable
from loraplex.runtime.rpc.principal import TENANT_KEY, Role
from loraplex.runtime.rpc.server import channel_options
from loraplex.runtime.rpc.shares import FairTurns
from loraplex.runtime.rpc.tasks import SharedCalls
from loraplex.runtime.rpc.tls import LiveChannel, TlsFiles
from loraplex.runtime.telemetry.logging import LogOnce
from loraplex.runtime.tenancy.api_keys import STALE_S, USED_AT_ONCE, HashedKey, HashedSecret, KeyDirectory

K = TypeVar("K")
T = TypeVar("T")

log = logging.getLogger(__name__)

_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """A base model as the store has it. `files` are the small files, by name.

    A quantized model may have the digest of its original, whose adapters are valid for it.
    """

    name: str
    digest: str
    architecture: str
    context_length: int
    vocab_size: int
    files: Mapping[str, bytes]
    original_digest: str = ""
    # The scheme of its weights; empty: not quantized.
    quantization: str = ""
    # Of generate, embed and classify those that it serves; the labels of its classifier, in the order of its logits.
    tasks: tuple[str, ...] = ("generate",)
    labels: tuple[str, ...] = ()
    # transformers' name of the task that its classifier solves; empty: one label of several.
    problem_type: str = ""
    generation_config: GenerationConfig = UNSAID

    @property
    def adapted_digest(self) -> str:
        """Return the digest that adapters are bound to."""
        return self.original_digest or self.digest


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A revision of a base model as the store lists it.

    `tasks` and `generation_config` change where it is registered again with others.
    """

    digest: str
    tasks: tuple[str, ...] = ("generate",)
    live: bool = True
    generation_config: GenerationConfig = UNSAID

    def is_of(self, manifest: Manifest) -> bool:
        """Tell whether a manifest of this digest, which was read before, is still what is registered."""
        return (self.tasks, self.generation_config) == (manifest.tasks, manifest.generation_config)


def registered_model(model: pb.BaseModel) -> RegisteredModel:
    """Return a revision of the store's list."""
    # A store of a version that knows no revisions lists one of each model, without a state.
    live = model.state in {"live", ""}
    return RegisteredModel(model.digest, tuple(model.tasks), live, _generation_config(model))


def read_manifest(model: pb.BaseModel, files: Mapping[str, bytes]) -> Manifest:
    """Return the manifest of a base model and its small files."""
    return Manifest(
        model.name,
        model.digest,
        model.architecture,
        model.context_length,
        model.vocab_size,
        files,
        model.original_digest,
        model.quantization,
        tasks=tuple(model.tasks),
        labels=tuple(model.labels),
        problem_type=_problem_type(files.get(_CONFIG, b"{}")),
        generation_config=_generation_config(model),
    )


def _generation_config(model: pb.BaseModel) -> GenerationConfig:
    return GenerationConfig.of({field.name: value for field, value in model.generation_config.ListFields()})


def _problem_type(config: bytes) -> str:
    try:
        return str(parse_object(config, _CONFIG).get("problem_type") or "")
    except ArtifactError:  # anybody may have written it
        return ""


# Interval in seconds between looks at what adapters have changed: a new upload is served this much later at most. While
# the store does not answer, a name is good for as long as the API keys are.
NAMES_LOOK_S = 1.0
# Timeout in seconds for a call, which a store that hangs does not answer.
CALL_S = 5.0
# Time in seconds for which a name that is not cached waits for a store that cannot be reached: one that restarts on a
# busy machine is back by then.
RESTART_S = 15.0
# Timeout in seconds for asking again for a name that is cached, and for sums that are sent again.
RENEWAL_S = 1.0
# Pause in seconds before a call that broke is made again; ASKS_AT_ONCE of them take few percent of a core then.
PAUSE_S = 0.2
# Timeout in seconds for the download of a manifest with its files.
DOWNLOAD_S = 60.0
# Maximum number of names that the store is asked for at once, in turns of the tenants: it answers a thousand a second.
ASKS_AT_ONCE = 64
# Maximum number of cached names; beyond it the name that was asked for longest ago is dropped.
NAMES_KEPT = 10_000
# Maximum number of accounts in a message of the store.
ACCOUNTS_AT_ONCE = 1_000
# Reconnect at least twice a second, so that a store that comes back is found soon.
_OPTIONS = [
    *channel_options(),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


def keep_newest(cache: dict[K, T], key: K, value: T, limit: int) -> None:
    """Put a value into a cache, which keeps the `limit` values that were put last."""
    cache.pop(key, None)
    cache[key] = value
    if len(cache) > limit:
        del cache[next(iter(cache))]


@dataclass(frozen=True, slots=True)
class Unfitness:
    """The limits that an adapter's certificate breaks, with both numbers, and whether it is refused for that."""

    text: str
    refused: bool


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """The revision that an adapter's name stands for now, and its base model.

    `breaches` are those of its certificates, `temperatures` those of its calibrations, by the quantization of the base.
    `epoch` is when the adapter was made, in nanoseconds since 1970.
    """

    ref: AdapterRef
    base_digest: str
    breaches: Mapping[str, Unfitness] = field(default_factory=dict)
    epoch: int = 0
    # The revision that is rolled out in the place of this one, which the name means.
    candidate: RolledOut | None = None
    temperatures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolledOut:
    """A revision that is rolled out, at a step of its release; shares are in 1/1000 of the requests."""

    resolved: ResolvedAdapter
    release: str
    step: int
    permille: int
    shadow_permille: int
    refusal_phrases: tuple[str, ...]
    # The secret key of the hash that splits requests; empty from a store that takes the caller for no router.
    split_key: str = ""


class StoreClient:
    """A channel to the adapter store, with a cache of names."""

    def __init__(self, address: str, tls: TlsFiles | None = None, away_s: float = STALE_S) -> None:
        self._address = address
        self._away_s = away_s
        self._channel = LiveChannel(address, tls, _OPTIONS)
        # Each with the time until which it was surely right; infinite where it still is, by the last look.
        self._names: dict[tuple[str, str], tuple[float, ResolvedAdapter]] = {}
        self._changes = StoreChanges("adapters", self._ask_changes)
        # The number of looks that were told of changes, and the time of the last one that was answered.
        self._news, self._looked_at = 0, -inf
        self._looking = SharedCalls[bool]()
        self._epochs: dict[str, int] = {}
        self._resolving = SharedCalls[ResolvedAdapter]()
        self._asking = FairTurns(ASKS_AT_ONCE)

    @property
    def _stub(self) -> adapters_pb2_grpc.AdapterServiceAsyncStub:
        return self._channel.stub(adapters_pb2_grpc.AdapterServiceStub)

    async def resolve(self, tenant: str, name: str) -> ResolvedAdapter:
        """Return the revision that a tenant's name means, at most NAMES_LOOK_S stale, or `away_s` without the store.

        Raises NotFound, InvalidField or Unavailable.
        """
        key, answers = (tenant, name), True
        if time.monotonic() - self._looked_at >= NAMES_LOOK_S:
            answers = await self._looking.run("", self._look)
        right_until, cached = self._names.get(key, (0.0, None))
        fresh = cached is not None and time.monotonic() - min(right_until, self._looked_at) < self._away_s
        if cached is not None and fresh and (right_until == inf or not answers):
            self._keep(key, right_until, cached)  # as the last one used
            return cached
        try:
            return await self._resolving.run(key, lambda: self._ask_in_turn(tenant, name, cached=fresh))
        except Unavailable:
            if cached is None or not fresh:
                raise
            return cached
        except CallError:  # the store answers that the name is nothing any more
            self._names.pop(key, None)
            raise

    async def _ask_in_turn(self, tenant: str, name: str, *, cached: bool) -> ResolvedAdapter:
        try:
            async with asyncio.timeout(RESTART_S):
                await self._asking.take(tenant)
        except TimeoutError:
            message = f"the adapter store at {self._address} has not got to this name within {RESTART_S:g} s"
            raise Unavailable(message, reason="STORE_DOWN") from None
        news, asked_at = self._news, time.monotonic()
        try:
            resolved, epoch = await self._ask(tenant, name, cached=cached)
        finally:
            self._asking.give(tenant)
        # A look that was answered meanwhile may have told of a change that this answer lacks, or be of another store.
        is_right = (news, epoch) == (self._news, self._changes.epoch)
        self._keep((tenant, name), inf if is_right else asked_at, resolved)
        return resolved

    async def _look(self) -> bool:
        """Ask which adapters have changed; return whether the store has answered."""
        asked_at, news = time.monotonic(), await self._changes.look()
        if news is None:
            return False
        (page, *_), anew = news
        if anew or page.names:
            self._news, changed = self._news + 1, set(page.names)
            for key, (right_until, resolved) in self._names.items():
                if right_until == inf and (anew or adapter_of(key[1]) in changed):
                    self._names[key] = self._looked_at, resolved
        self._looked_at = asked_at
        return True

    async def _ask_changes(self, epoch: str, after: int) -> pb.ListAdapterChangesResponse:
        request = pb.ListAdapterChangesRequest(epoch=epoch, after=after)
        with self._errors_of("adapter"):
            return await self._stub.ListAdapterChanges(request, timeout=RENEWAL_S)

    def _keep(self, key: tuple[str, str], right_until: float, resolved: ResolvedAdapter) -> None:
        """Keep a name and the epochs of its revisions, as the ones that were used last."""
        keep_newest(self._names, key, (right_until, resolved), NAMES_KEPT)
        for one in (resolved, *((resolved.candidate.resolved,) if resolved.candidate else ())):
            keep_newest(self._epochs, one.ref.revision, one.epoch, NAMES_KEPT)

    async def _ask(self, tenant: str, name: str, *, cached: bool) -> tuple[ResolvedAdapter, str]:
        """Return what a name means, and the epoch of the store's changes."""
        request, metadata = pb.GetAdapterRequest(name=name), ((TENANT_KEY, tenant),)

        async def ask(timeout_s: float) -> pb.GetAdapterResponse:
            return await self._stub.GetAdapter(request, timeout=timeout_s, metadata=metadata)

        with self._errors_of("adapter", name):
            answer = await (ask(RENEWAL_S) if cached else _until_answered(ask))
        epoch = answer.adapter.create_time.ToNanoseconds()
        resolved = self._resolved(answer.revision, epoch)
        if not answer.HasField("candidate"):
            return resolved, answer.epoch
        message = answer.candidate
        candidate = RolledOut(
            self._resolved(message.revision, epoch),
            message.release,
            message.step,
            message.permille,
            message.shadow_permille,
            tuple(message.refusal_phrases),
            message.split_key,
        )
        return replace(resolved, candidate=candidate), answer.epoch

    def _resolved(self, revision: pb.Revision, epoch: int) -> ResolvedAdapter:
        ref = AdapterRef(revision.name, revision.digest, revision.rank, revision.weight_bytes)
        breaches = {
            certificate.quantization: Unfitness(certificate.breach, certificate.verdict == pb.VERDICT_REFUSED)
            for certificate in revision.certificates
            if certificate.verdict in {pb.VERDICT_REFUSED, pb.VERDICT_WARNED}
        }
        temperatures = {one.quantization: one.temperature for one in revision.calibrations}
        return ResolvedAdapter(ref, revision.base_digest, breaches, epoch, temperatures=temperatures)

    def epoch_of(self, revision: str) -> int:
        """Return the epoch of a revision's adapter, as last resolved; 0: not known any more."""
        return self._epochs.get(revision, 0)

    def forget_tenant(self, tenant: str) -> int:
        """Forget the names that a tenant has asked for, and those of its adapters; returns how many there were."""
        names = [
            key
            for key, (_, resolved) in self._names.items()
            if key[0] == tenant or any(is_of_tenant(part.revision, tenant) for part in resolved.ref.summands)
        ]
        epochs = [revision for revision in self._epochs if is_of_tenant(revision, tenant)]
        for key in names:
            del self._names[key]
        for revision in epochs:
            del self._epochs[revision]
        return len(names) + len(epochs)

    async def config_of(self, tenant: str, revision: str) -> bytes:
        """Download a revision's configuration, without its weights. Raises NotFound or Unavailable."""
        request, metadata = pb.DownloadRevisionRequest(name=revision, config_only=True), ((TENANT_KEY, tenant),)

        async def ask(timeout_s: float) -> bytes:
            call = self._stub.DownloadRevision(request, timeout=timeout_s, metadata=metadata)
            return b"".join([part.chunk.data async for part in call])

        with self._errors_of("adapter", revision):
            return await _until_answered(ask)

    async def models(self) -> dict[str, list[RegisteredModel]]:
        """Return the revisions of every registered base model, by name. Raises Unavailable."""
        models: dict[str, list[RegisteredModel]] = {}
        request = pb.ListBaseModelsRequest(page_size=1000, all_revisions=True)
        async for page in self._pages("base model", self._stub.ListBaseModels, request):
            for model in page.models:
                models.setdefault(model.name, []).append(registered_model(model))
        return models

    async def manifest(self, name: str) -> Manifest:
        """Download the manifest and small files of a base model's live revision, or of `NAME@DIGEST`.

        Raises NotFound or Unavailable.
        """
        files: dict[str, bytearray] = {}
        model = pb.BaseModel()
        with self._errors_of("base model", name):
            async for part in self._stub.DownloadBaseModel(pb.DownloadBaseModelRequest(name=name), timeout=DOWNLOAD_S):
                if part.HasField("model"):
                    model = part.model
                else:
                    files.setdefault(part.chunk.name, bytearray()).extend(part.chunk.data)
        return read_manifest(model, {file: bytes(data) for file, data in files.items()})

    async def key_changes(self, epoch: str, after: int, used: Iterable[str] = ()) -> keys_pb2.ListKeyChangesResponse:
        """Return the API keys that have changed since an answer of that epoch, and tell which were used.

        Raises Unavailable.
        """
        request = keys_pb2.ListKeyChangesRequest(epoch=epoch, after=after, used_key_ids=used)
        with self._errors_of("key"):
            return await self._channel.stub(keys_pb2_grpc.KeyServiceStub).ListKeyChanges(request, timeout=CALL_S)

    async def plan_changes(self, epoch: str, after: int) -> plans_pb2.ListPlanChangesResponse:
        """Return the plans that have changed since an answer of that epoch. Raises Unavailable."""
        request = plans_pb2.ListPlanChangesRequest(epoch=epoch, after=after)
        with self._errors_of("plan"):
            return await self._channel.stub(plans_pb2_grpc.PlanServiceStub).ListPlanChanges(request, timeout=CALL_S)

    async def save_accounts(self, accounts: Sequence[accounts_pb2.Account]) -> None:
        """Merge accounts into the store's, which keeps the later window of each, and of one window the higher counts.

        Saving again is right. Raises InvalidField, or Unavailable; the first ones of many may be saved then.
        """
        for start in range(0, len(accounts), ACCOUNTS_AT_ONCE):
            request = accounts_pb2.SaveAccountsRequest(accounts=accounts[start : start + ACCOUNTS_AT_ONCE])
            with self._errors_of("account"):
                await self._channel.stub(accounts_pb2_grpc.AccountServiceStub).SaveAccounts(request, timeout=CALL_S)

    async def report_outcomes(self, reporter: str, sums: Mapping[tuple[str, int], StepOutcomes]) -> None:
        """Send sums by release and step, which replace those that the reporter sent before. Raises Unavailable."""
        outcomes = [
            releases_pb2.StepOutcomes(
                release=release,
                step=step,
                live=releases_pb2.Outcomes(**asdict(one.live)),
                candidate=releases_pb2.Outcomes(**asdict(one.candidate)),
                shadow=releases_pb2.ShadowOutcomes(**asdict(one.shadow)),
            )
            for (release, step), one in sums.items()
        ]
        request = releases_pb2.ReportOutcomesRequest(reporter=reporter, outcomes=outcomes)
        with self._errors_of("release"):
            await self._channel.stub(releases_pb2_grpc.ReleaseServiceStub).ReportOutcomes(request, timeout=RENEWAL_S)

    async def account_pages(self) -> AsyncIterator[Sequence[accounts_pb2.Account]]:
        """Yield the accounts that the store has, in order of name. Raises Unavailable."""
        request = accounts_pb2.ListAccountsRequest(page_size=ACCOUNTS_AT_ONCE)
        stub = self._channel.stub(accounts_pb2_grpc.AccountServiceStub)
        pages = self._pages("account", stub.ListAccounts, request)
        async for page in pages:
            yield page.accounts

    async def _pages(self, kind: str, ask: Any, request: Any) -> AsyncIterator[Any]:
        """Yield all pages of a list. Raises Unavailable."""
        while True:
            with self._errors_of(kind):
                page = await ask(request, timeout=CALL_S)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    @contextmanager
    def _errors_of(self, kind: str, name: str = "") -> Iterator[None]:
        """Raise an error of a call about the `kind` called `name` as a CallError."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotFound(kind, name, hint=(error.details() or "").partition("; ")[2]) from error
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidField(kind, (error.details() or "not a name").removeprefix("name: ")) from error
            message = f"the adapter store at {self._address} does not answer"
            raise Unavailable(message, reason="STORE_DOWN") from error

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


async def _until_answered(ask: Callable[[float], Awaitable[T]]) -> T:
    """Ask, and again while the store restarts, for RESTART_S. Raises AioRpcError.

    `ask` gets its timeout in seconds: a store that is reached and hangs is asked once.
    """
    until = time.monotonic() + RESTART_S
    while True:
        try:
            return await ask(CALL_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() + PAUSE_S >= until:
                raise
        await asyncio.sleep(PAUSE_S)


class Page(Protocol):
    """A page of changes: the next one is those after `latest`, if there are more."""

    epoch: str
    latest: int
    more: bool


PageT = TypeVar("PageT", bound=Page)


class StoreChanges(Generic[PageT]):
    """Reads what has changed since the last look. `ask` gets an epoch and a number, and raises CallError."""

    def __init__(self, name: str, ask: Callable[[str, int], Awaitable[PageT]]) -> None:
        self._name = name
        self._ask = ask
        self.epoch, self._latest = "", 0
        self._once = LogOnce(log)

    async def look(self) -> tuple[list[PageT], bool] | None:
        """Return the pages of changes, and whether the list begins anew with them; None: the store does not answer.

        Nothing is returned of changes that were read in part, so that the next look begins where this one did.
        """
        pages, epoch, latest = list[PageT](), self.epoch, self._latest
        try:
            while not pages or pages[-1].more:
                page = await self._ask(epoch, latest)
                pages = [*pages, page] if page.epoch == epoch else [page]
                epoch, latest = page.epoch, page.latest
        except CallError as error:
            self._once(f"{self._name}: {error.message}")
            return None
        anew = epoch != self.epoch
        self.epoch, self._latest = epoch, latest
        self._once.reset()
        return pages, anew


# Interval in seconds between looks at the keys: with the time of an answer, how late a revoked one is refused at most.
KEYS_LOOK_S = 0.5


class KeyCopy:
    """Keeps a directory of keys like the store's."""

    def __init__(self, store: StoreClient, directory: KeyDirectory) -> None:
        self._store = store
        self._directory = directory
        self._changes = StoreChanges("API keys", self._ask)
        directory.follow()

    async def look(self) -> None:
        """Take what has changed; where the store does not answer, leave it for the next time."""
        asked_at = time.monotonic()
        news = await self._changes.look()
        if news is None:
            return
        pages, anew = news
        # At once: half of the keys of another epoch would refuse the other half.
        self._directory.put([_key(key) for page in pages for key in page.keys], clear=anew)
        age_s = max(page.age.ToMilliseconds() for page in pages) / 1e3
        self._directory.look_done(age_s + time.monotonic() - asked_at)

    async def _ask(self, epoch: str, after: int) -> keys_pb2.ListKeyChangesResponse:
        used = self._directory.take_used(USED_AT_ONCE)
        try:
            return await self._store.key_changes(epoch, after, used)
        except CallError:
            self._directory.note_used(used)
            raise


def _key(message: keys_pb2.HashedKey) -> HashedKey:
    key = message.key
    return HashedKey(
        key_id=key.key_id,
        tenant=key.tenant,
        role=Role(key.role),
        scopes=frozenset(key.scopes),
        expires_at=key.expire_time.ToNanoseconds() / 1e9 if key.HasField("expire_time") else None,
        revoked=key.HasField("revoke_time"),
        secrets=tuple(
            HashedSecret(one.sha256, one.expire_time.ToNanoseconds() / 1e9 if one.HasField("expire_time") else None)
            for one in message.secrets
        ),
    )
