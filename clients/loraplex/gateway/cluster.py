"""The cluster behind the gateway: callers, names of models, bytes of tokens, and health."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from loraplex.adapters.v1.releases_pb2_grpc import ReleaseServiceStub
from starlette.datastructures import Headers

from loraplex.admin.v1.accounts_pb2_grpc import AccountServiceStub
from loraplex.admin.v1.keys_pb2_grpc import KeyServiceStub
from loraplex.admin.v1.plans_pb2_grpc import PlanServiceStub
from loraplex.cluster.v1.cluster_pb2_grpc import ClusterServiceStub
from loraplex.gateway.errors import HttpError, invalid, no_store, not_served
from loraplex_client import (
    AsyncBatchClient,
    AsyncClient,
    LoraplexError,
    NotImplementedByServerError,
    PermissionDeniedError,
    ServedModel,
    Tls,
    UnauthenticatedError,
)
from loraplex_client.calls import Call, Script
from loraplex_client.connection import AsyncConnection
from loraplex_client.endpoint import TENANT_KEY, Credentials
from loraplex_client.retries import read_addresses

# Time in seconds for which the names of the served models are kept.
_NAMES_S = 5.0
# Timeout in seconds of a look at a router's health.
_HEALTH_S = 2.0
# Timeout in seconds for a router's answer to whether it accepts a credential, and where a call needs that answer.
_ACCEPTED_S, _NEEDED_S = 1.0, 10.0
# Maximum number of accepted credentials that are remembered: of each a hash of 32 bytes and a tenant's name.
_ACCEPTED = 100_000
# Maximum length in characters of a tenant's name or a credential: a gRPC server reads headers of 8 KiB.
_WHO_CHARACTERS = 6_000
# Names that clients of servers with one model give it; the store refuses adapters that are named so (artifacts.names).
_ANY_MODEL = ("tgi", "dummy")
# Maximum number of tokens whose bytes are kept.
_TOKENS = 300_000
# Maximum number of tokens whose bytes one call asks for: routers take as many ids as the context has.
_TOKENS_PER_CALL = 128


def usage_stub(channel: Any) -> SimpleNamespace:
    """Return the store's methods by which usage is read."""
    return SimpleNamespace(
        ListAccounts=AccountServiceStub(channel).ListAccounts,
        ListPlans=PlanServiceStub(channel).ListPlans,
        ListKeys=KeyServiceStub(channel).ListKeys,
    )


class Cluster:
    """Routers, and the adapter store where it is known. With `ca` they get each caller's own credential.

    Operators then have ports of their own, `operator_routers` and `operator_store`; without `ca` the same ones.
    """

    def __init__(self, routers: str, store: str, ca: str, operator_routers: str = "", operator_store: str = "") -> None:
        tls = Tls(ca) if ca else None
        self._checks_credentials = tls is not None
        self._client = AsyncClient(routers, store=store or None, api_key="", tls=tls)
        self._health = [
            AsyncConnection(address, health_pb2_grpc.HealthStub, credentials=Credentials("", tls))
            for address in read_addresses(routers)
        ]
        operated = operator_routers if self._checks_credentials else routers
        self._operators = {
            address: AsyncConnection(address, ClusterServiceStub, credentials=Credentials("", tls))
            for address in (read_addresses(operated) if operated else ())
        }
        self.has_store = bool(store)
        self._releases = AsyncConnection(store, ReleaseServiceStub, credentials=Credentials("", tls)) if store else None
        self._batches = AsyncBatchClient(store, api_key="", tls=tls) if store else None
        operator_store = operator_store if self._checks_credentials else store
        # The store's accounts, for tenants and for operators.
        self._usage, self._all_usage = (
            AsyncConnection(address, usage_stub, credentials=Credentials("", tls)) if address else None
            for address in (store, operator_store)
        )
        self._names: frozenset[str] = frozenset()
        self._names_until = 0.0
        self._digests: frozenset[str] = frozenset()
        self._bytes: dict[tuple[str, int], bytes] = {}
        # Tenants and holders of credentials that a router has accepted, by their hashes; revoked ones may stay.
        self._holders: dict[bytes, tuple[str, str]] = {}

    async def close(self) -> None:
        """Close the channels."""
        connections = (*self._health, *self._operators.values(), self._releases, self._usage, self._all_usage)
        closing = (one.close() for one in (*connections, self._batches) if one is not None)
        await asyncio.gather(self._client.close(), *closing)

    def caller(self, headers: Headers) -> AsyncClient:
        """Return a client that calls as the request's tenant, or with its credential. Raises HttpError."""
        return self._client.for_caller(*self._who(headers))

    async def identity(self, headers: Headers, *, fresh: bool = False) -> bytes:
        """Return a hash of who calls: the same for all secrets of an API key, and for all tokens of a subject.

        It is the tenant's where no credential is checked, and the credential's where no router tells whose it is.
        `fresh` asks a router now: one that knows a secret which has ended is not its key's holder. Raises HttpError,
        LoraplexError.
        """
        tenant, credential = self._who(headers)
        who = f"credential {credential}" if credential else f"tenant {tenant}"
        if credential and all(holder := await self._holder_of(credential, fresh=fresh)):
            who = "holder {} {}".format(*holder)
        return sha256(who.encode()).digest()

    def releases(self, headers: Headers) -> AsyncConnection:
        """Return a connection to the store's ReleaseService, for the request's tenant. Raises HttpError."""
        if self._releases is None:
            raise no_store()
        return self._releases.for_caller(*self._who(headers))

    def batches(self, headers: Headers) -> AsyncBatchClient:
        """Return a client of the store's files and batches, for the request's tenant. Raises HttpError."""
        if self._batches is None:
            raise no_store()
        return self._batches.for_caller(*self._who(headers))

    def usage(self, headers: Headers) -> AsyncConnection:
        """Return a connection to the store's accounts, for the request's tenant. Raises HttpError."""
        if self._usage is None:
            raise no_store()
        return self._usage.for_caller(*self._who(headers))

    def all_usage(self, headers: Headers) -> AsyncConnection:
        """Return a connection to the store's accounts, for an operator. Raises HttpError."""
        if self._all_usage is None:
            raise HttpError(404, "usage_not_served", "usage is not served: give the gateway --operator-store")
        return self._all_usage.for_caller(*self._who(headers))

    def operators(self, headers: Headers) -> Sequence[tuple[str, AsyncConnection]]:
        """Return a connection to each router's ClusterService, with its address, for an operator. Raises HttpError."""
        if not self._operators:
            raise HttpError(404, "state_not_served", "the state is not served: give the gateway --operator-router")
        who = self._who(headers)
        return [(address, connection.for_caller(*who)) for address, connection in self._operators.items()]

    async def counted_as(self, headers: Headers) -> str:
        """Return the name of the caller whose share a request takes: its tenant, once a router has told it.

        Requests without a credential, or with one for which no router tells a tenant, are all one caller's: names that
        anybody can make up would each have a share. Raises UnauthenticatedError where a router refuses the credential.
        """
        try:
            tenant, credential = self._who(headers)
        except HttpError:  # the handler raises it, where it needs a caller
            return ""
        if self._checks_credentials:
            tenant = credential and (await self._holder_of(credential))[0]
        return f"tenant {tenant}" if tenant or not self._checks_credentials else ""

    def claimed(self, headers: Headers) -> str:
        """Return the name of the caller that a request claims to be of, accepted or not. Raises HttpError."""
        tenant, credential = self._who(headers)
        if self._checks_credentials:
            key = sha256(credential.encode())
            tenant, _ = self._holders.get(key.digest(), ("", ""))
            return f"tenant {tenant}" if tenant else f"credential {key.hexdigest()}"
        return f"tenant {tenant}"

    async def _holder_of(self, credential: str, *, fresh: bool = False) -> tuple[str, str]:
        """Return the tenant of a credential and who of it has it; both empty where no router tells it.

        Raises UnauthenticatedError; `fresh` asks whatever is remembered, and raises any LoraplexError.
        """
        key = sha256(credential.encode()).digest()
        if key in self._holders and not fresh:
            return self._holders[key]
        try:
            asking = self._client.for_caller(api_key=credential)
            holder = await asking.identity(timeout_s=_NEEDED_S if fresh else _ACCEPTED_S)
            if not holder[0]:  # from an older router
                return holder
        except LoraplexError as error:
            if fresh or isinstance(error, UnauthenticatedError):
                raise
            if not isinstance(error, PermissionDeniedError):  # a known caller, who may call something else
                return "", ""
            holder = "", ""
        if len(self._holders) >= _ACCEPTED:
            self._holders.clear()
        self._holders[key] = holder
        return holder

    def _who(self, headers: Headers) -> tuple[str, str]:
        """Return the tenant and the credential of a request, each empty for none. Raises HttpError."""
        tenants = headers.getlist(TENANT_KEY)
        if len(tenants) > 1:
            raise invalid(TENANT_KEY, "is given twice")
        # Routers that check no credentials take the tenant as it is, and know no keys.
        who = "".join(tenants), _credential(headers) if self._checks_credentials else ""
        if (size := max(map(len, who))) > _WHO_CHARACTERS:
            message = f"the tenant or credential has {size} characters; at most {_WHO_CHARACTERS}"
            raise HttpError(401, "credential_invalid", message)
        return who

    async def serves(self) -> bool:
        """Return whether a router answers that requests are served."""

        def check() -> Script[bool]:
            answer = yield Call("Check", health_pb2.HealthCheckRequest(), timeout_s=_HEALTH_S)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        async def one(connection: AsyncConnection) -> bool:
            try:
                return await connection.run(check())
            except LoraplexError:
                return False

        return any(await asyncio.gather(*map(one, self._health)))

    async def models(self, caller: AsyncClient) -> tuple[ServedModel, ...]:
        """Return the base models. Raises LoraplexError."""
        served = await caller.models()
        if (digests := frozenset(model.digest for model in served)) != self._digests:
            self._digests = digests
            self._bytes.clear()
        self._names, self._names_until = frozenset(model.name for model in served), time.monotonic() + _NAMES_S
        return served

    async def named(self, caller: AsyncClient, name: str) -> Mapping[str, Any]:
        """Return the options of what `name` names: a base model, an adapter, or BASE:ADAPTER. Raises LoraplexError."""
        if not name:
            raise invalid("model", "is empty")
        if time.monotonic() > self._names_until:
            await self.models(caller)
        base, colon, adapter = name.partition(":")
        if colon and base in self._names:
            if not adapter:
                raise HttpError(404, "not_found", f"model not found: {name[:200]} names no adapter", "model")
            return {"model": base, "adapter_id": adapter}
        if name in self._names:
            return {"model": name}
        return {} if name in _ANY_MODEL else {"adapter_id": name}

    async def token_bytes(self, caller: AsyncClient, model: str, ids: Iterable[int]) -> Mapping[int, bytes]:
        """Return the bytes of each of these tokens. Raises LoraplexError."""
        distinct = set(ids)
        # Without a name it is the caller's default model, if there are several: another caller's is another one.
        known = self._bytes if model or len(self._names) == 1 else {}
        missing = [token_id for token_id in distinct if (model, token_id) not in known]
        if missing:
            if len(known) + len(missing) > _TOKENS:
                known.clear()
                missing = list(distinct)
            for start in range(0, len(missing), _TOKENS_PER_CALL):
                part = missing[start : start + _TOKENS_PER_CALL]
                part_bytes = await _bytes_of(caller, model, part)
                known.update(zip(((model, token_id) for token_id in part), part_bytes, strict=True))
        return {token_id: known[model, token_id] for token_id in distinct}


async def _bytes_of(caller: AsyncClient, model: str, ids: Sequence[int]) -> tuple[bytes, ...]:
    try:
        return await caller.token_bytes(ids, model=model)
    except NotImplementedByServerError as error:
        raise not_served("logprobs", error.message) from error


def _credential(headers: Headers) -> str:
    """Return the API key or token of a request; empty for none. Raises HttpError."""
    credentials = {value.strip() for value in headers.getlist("x-api-key")}
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "basic":  # of clients that know nothing but a URL, such as TRL's: http://any:KEY@HOST
            key = _password(key)
        elif scheme.lower() != "bearer":
            raise HttpError(401, "credential_invalid", "authorization: give `Bearer` and an API key or a token")
        credentials.add(key.strip())
    if len(credentials) > 1:
        raise HttpError(401, "credentials_differ", "the request has two credentials; give one")
    return "".join(credentials)


def _password(encoded: str) -> str:
    try:
        user, colon, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except ValueError:
        colon = ""
    if not colon:
        raise HttpError(401, "credential_invalid", "authorization: `Basic` is the base64 of NAME:KEY")
    return password or user
