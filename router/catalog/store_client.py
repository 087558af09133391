"""The router's client of the adapter store: names become digests, manifests have the tokenizers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import adapters_pb2_grpc
from loraplex.admin.v1 import accounts_pb2, accounts_pb2_grpc, keys_pb2, keys_pb2_grpc, plans_pb2, plans_pb2_grpc

from broker.commands import is_of_tenant
from broker.messages import AdapterRef
from router.catalog.manifest import Manifest, RegisteredModel, read_manifest, registered_model
from rpc.errors import CallError, InvalidField, NotFound, Unavailable
from rpc.principal import TENANT_KEY
from rpc.server import channel_options
from rpc.shares import FairTurns
from rpc.tls import LiveChannel, TlsFiles
from tenancy.api_keys import STALE_S

T = TypeVar("T")


class SharedCalls(Generic[T]):
    """The calls under way, by key. A caller that leaves does not cancel its call for the others."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[T]] = {}

    async def run(self, key: Hashable, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what the call under way with a key returns; without one, begin it."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(call())
            task.add_done_callback(lambda ended: self._ended(key, ended))
        return await asyncio.shield(task)

    def _ended(self, key: Hashable, task: asyncio.Task[T]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # callers that have left do not look at it


# Maximum age in seconds of a cached name: a new upload is served this much later at most. While the store does not
# answer, a name is good for as long as the API keys are (STALE_S).
NAME_TTL_S = 1.0
# Timeout in seconds for a call; a store that restarts is back by then.
CALL_S = 5.0
# Timeout in seconds for asking again for a name that is cached.
RENEWAL_S = 1.0
# Pause in seconds before a call that broke is made again.
PAUSE_S = 0.1
# Timeout in seconds for the download of a manifest with its files.
DOWNLOAD_S = 60.0
# Maximum number of names that the store is asked for at once, in turns of the tenants: it answers a thousand a second.
ASKS_AT_ONCE = 64
# Maximum number of cached names; beyond it the cache is emptied.
NAMES_KEPT = 10_000
# Maximum number of accounts in a message of the store.
ACCOUNTS_AT_ONCE = 1_000
# Reconnect at least twice a second, so that a store that comes back is found soon.
_OPTIONS = [
    *channel_options(),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


@dataclass(frozen=True, slots=True)
class Breach:
    """The limits that an adapter's certificate breaks, with both numbers, and whether it is refused for that."""

    text: str
    refused: bool


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """The revision that an adapter's name stands for now, and its base model.

    `breaches` are those of its certificates, by the quantization of the base. `epoch` is when the adapter was made, in
    nanoseconds since 1970.
    """

    ref: AdapterRef
    base_digest: str
    breaches: Mapping[str, Breach] = field(default_factory=dict)
    epoch: int = 0


class StoreClient:
    """A channel to the adapter store, with a cache of names."""

    def __init__(self, address: str, tls: TlsFiles | None = None) -> None:
        self._address = address
        self._channel = LiveChannel(address, tls, _OPTIONS)
        self._names: dict[tuple[str, str], tuple[float, ResolvedAdapter]] = {}
        self._epochs: dict[str, int] = {}
        self._resolving = SharedCalls[ResolvedAdapter]()
        self._asking = FairTurns(ASKS_AT_ONCE)

    @property
    def _stub(self) -> adapters_pb2_grpc.AdapterServiceAsyncStub:
        return self._channel.stub(adapters_pb2_grpc.AdapterServiceStub)

    @property
    def _accounts(self) -> accounts_pb2_grpc.AccountServiceAsyncStub:
        return self._channel.stub(accounts_pb2_grpc.AccountServiceStub)

    async def resolve(self, tenant: str, name: str) -> ResolvedAdapter:
        """Return the revision that a tenant's name stands for, at most NAME_TTL_S stale, or STALE_S without the store.

        Raises NotFound, InvalidField or Unavailable.
        """
        key = (tenant, name)
        resolved_at, cached = self._names.get(key, (0.0, None))
        age_s = time.monotonic() - resolved_at
        if cached is not None and age_s < NAME_TTL_S:
            return cached
        known = cached is not None and age_s < STALE_S
        try:
            return await self._resolving.run(key, lambda: self._ask_in_turn(tenant, name, known=known))
        except Unavailable:
            if cached is None or not known:
                raise
            return cached
        except CallError:  # the store answers that the name is nothing any more
            self._names.pop(key, None)
            raise

    async def _ask_in_turn(self, tenant: str, name: str, *, known: bool) -> ResolvedAdapter:
        try:
            async with asyncio.timeout(CALL_S):
                await self._asking.take(tenant)
        except TimeoutError:
            message = f"the adapter store at {self._address} has not got to this name within {CALL_S:g} s"
            raise Unavailable(message, reason="STORE_DOWN") from None
        try:
            found = await self._ask(tenant, name, known=known)
        finally:
            self._asking.give(tenant)
        if len(self._names) >= NAMES_KEPT:
            self._names.clear()
        self._names[tenant, name] = (time.monotonic(), found)
        return found

    async def _ask(self, tenant: str, name: str, *, known: bool) -> ResolvedAdapter:
        request, metadata = pb.GetAdapterRequest(name=name), ((TENANT_KEY, tenant),)

        async def ask(timeout_s: float) -> pb.GetAdapterResponse:
            return await self._stub.GetAdapter(request, timeout=timeout_s, metadata=metadata, wait_for_ready=not known)

        try:
            answer = await (ask(RENEWAL_S) if known else _until_answered(ask))
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, "adapter", name) from error
        revision = answer.revision
        ref = AdapterRef(revision.name, revision.digest, revision.rank, revision.weight_bytes)
        breaches = {
            certificate.quantization: Breach(certificate.breach, certificate.verdict == pb.VERDICT_REFUSED)
            for certificate in revision.certificates
            if certificate.verdict in {pb.VERDICT_REFUSED, pb.VERDICT_WARNED}
        }
        epoch = answer.adapter.create_time.ToNanoseconds()
        if len(self._epochs) >= NAMES_KEPT:
            self._epochs.clear()
        self._epochs[ref.revision] = epoch
        return ResolvedAdapter(ref, revision.base_digest, breaches, epoch)

    def epoch_of(self, revision: str) -> int:
        """Return the epoch of a revision's adapter, as last resolved; 0: not known any more."""
        return self._epochs.get(revision, 0)

    def forget_tenant(self, tenant: str) -> int:
        """Forget the names that a tenant has asked for, and those of its adapters; returns how many there were."""
        names = [
            key
            for key, (_, found) in self._names.items()
            if key[0] == tenant or any(is_of_tenant(part.revision, tenant) for part in found.ref.summands)
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
            config = bytearray()
            call = self._stub.DownloadRevision(request, timeout=timeout_s, metadata=metadata, wait_for_ready=True)
            try:
                async for part in call:
                    if part.HasField("chunk"):
                        config.extend(part.chunk.data)
            finally:
                call.cancel()
            return bytes(config)

        try:
            return await _until_answered(ask)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, "adapter", revision) from error

    async def models(self) -> dict[str, RegisteredModel]:
        """Return every registered base model, by name. Raises Unavailable."""
        models: dict[str, RegisteredModel] = {}
        token = ""
        while True:
            request = pb.ListBaseModelsRequest(page_size=1000, page_token=token)
            try:
                page = await self._stub.ListBaseModels(request, timeout=CALL_S)
            except grpc.aio.AioRpcError as error:
                raise self._translate(error, "base model", "") from error
            models |= {model.name: registered_model(model) for model in page.models}
            if not (token := page.next_page_token):
                return models

    async def manifest(self, name: str) -> Manifest:
        """Download a base model's manifest with its small files. Raises NotFound or Unavailable."""
        files: dict[str, bytearray] = {}
        model = pb.BaseModel()
        try:
            async for part in self._stub.DownloadBaseModel(pb.DownloadBaseModelRequest(name=name), timeout=DOWNLOAD_S):
                if part.HasField("model"):
                    model = part.model
                else:
                    files.setdefault(part.chunk.name, bytearray()).extend(part.chunk.data)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, "base model", name) from error
        return read_manifest(model, {file: bytes(data) for file, data in files.items()})

    async def key_changes(self, epoch: str, after: int) -> keys_pb2.ListKeyChangesResponse:
        """Return the API keys that have changed since an answer of that epoch. Raises Unavailable."""
        request = keys_pb2.ListKeyChangesRequest(epoch=epoch, after=after)
        try:
            return await self._channel.stub(keys_pb2_grpc.KeyServiceStub).ListKeyChanges(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, "key", "") from error

    async def plan_changes(self, epoch: str, after: int) -> plans_pb2.ListPlanChangesResponse:
        """Return the plans that have changed since an answer of that epoch. Raises Unavailable."""
        request = plans_pb2.ListPlanChangesRequest(epoch=epoch, after=after)
        try:
            return await self._channel.stub(plans_pb2_grpc.PlanServiceStub).ListPlanChanges(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, "plan", "") from error

    async def save_accounts(self, accounts: Sequence[accounts_pb2.Account]) -> None:
        """Merge accounts into the store's, which keeps the later window of each, and of one window the higher counts.

        Saving again is right. Raises InvalidField, or Unavailable; the first ones of many may be saved then.
        """
        for start in range(0, len(accounts), ACCOUNTS_AT_ONCE):
            request = accounts_pb2.SaveAccountsRequest(accounts=accounts[start : start + ACCOUNTS_AT_ONCE])
            try:
                await self._accounts.SaveAccounts(request, timeout=CALL_S)
            except grpc.aio.AioRpcError as error:
                raise self._translate(error, "account", "") from error

    async def accounts(self) -> list[accounts_pb2.Account]:
        """Return the accounts that the store has, in order of name. Raises Unavailable."""
        accounts: list[accounts_pb2.Account] = []
        token = ""
        while True:
            request = accounts_pb2.ListAccountsRequest(page_size=ACCOUNTS_AT_ONCE, page_token=token)
            try:
                page = await self._accounts.ListAccounts(request, timeout=CALL_S)
            except grpc.aio.AioRpcError as error:
                raise self._translate(error, "account", "") from error
            accounts += page.accounts
            if not (token := page.next_page_token):
                return accounts

    def _translate(self, error: grpc.aio.AioRpcError, kind: str, name: str) -> CallError:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return NotFound(kind, name)
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidField(kind, error.details() or "not a name")
        return Unavailable(f"the adapter store at {self._address} does not answer", reason="STORE_DOWN")

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


async def _until_answered(ask: Callable[[float], Awaitable[T]]) -> T:
    """Ask, and again where the connection breaks: no request should fail of a store that restarts within CALL_S.

    `ask` gets its timeout in seconds, and waits until the store can be reached. Raises AioRpcError.
    """
    until = time.monotonic() + CALL_S
    while True:
        try:
            return await ask(until - time.monotonic())
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() + PAUSE_S >= until:
                raise
        await asyncio.sleep(PAUSE_S)
