"""The store as the operator calls it: for a tenant, or for none, and what a failed call means for an object."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.field_mask_pb2 import FieldMask
from loraplex.adapters.v1 import adapters_pb2, adapters_pb2_grpc, releases_pb2, releases_pb2_grpc

import loraplex_client as sdk
from loraplex.admin.v1 import keys_pb2, keys_pb2_grpc, plans_pb2, plans_pb2_grpc
from loraplex.runtime.tenancy.certificates import RESERVED_TENANTS
from loraplex_client.calls import Call, Script
from loraplex_client.connection import AsyncConnection
from loraplex_client.endpoint import credentials_of

# Timeout in seconds of a call, of all but imports, whose time the store bounds.
_ASK_S = 10.0
# Maximum number of calls, and of imports, at once: all objects are looked at when the operator starts, and the store
# takes 64 calls and 4 imports of a tenant.
_CALLS, _IMPORTS = 16, 4
# Maximum number of releases and revisions, the newest ones, that a look reads.
_LISTED = 100
# Intervals in seconds until the next look: where something changes by itself, after a refusal that may be lifted, after
# an import that failed, which costs a download, and where nothing is to be done. All but the download's are at most
# --look-s.
SOON_S, REFUSED_S, IMPORT_FAILED_S, REST_S = 5.0, 30.0, 600.0, math.inf
# The fields of a base model that are read: its modules may be tens of thousands.
_BASE_FIELDS = FieldMask(
    paths=["name", "digest", "original_digest", "architecture", "context_length", "quantization", "state"]
)

T = TypeVar("T")


class State(StrEnum):
    """States of an object, as `kubectl get` shows them."""

    # Somebody has to change the object, or what it names.
    REFUSED = "Refused"
    # The store does not answer, and has not said yet how it is.
    UNKNOWN = "Unknown"
    IMPORTING = "Importing"
    # Waits for gates that others run.
    VERIFIED = "Verified"
    CANARY = "Canary"
    LIVE = "Live"
    ROLLED_BACK = "RolledBack"
    RETIRED = "Retired"


@dataclass(frozen=True)
class Status:
    """The result of a look: an object's state, and its condition Ready (True, False, Unknown) with reason and message.

    `fields` are further fields of its status; the next look is after `again_s`.
    """

    state: State
    ready: str
    reason: str
    message: str
    again_s: float
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stalled(self) -> bool:
        """Tell whether nothing changes until somebody does something."""
        return self.state in {State.REFUSED, State.ROLLED_BACK, State.RETIRED}

    @property
    def warns(self) -> bool:
        """Tell whether an event of it is a warning."""
        return self.stalled or self.ready == "Unknown" or self.reason in {"BaseReplaced", "GatesFailed"}


class Rejected(Exception):
    """A request that stays refused until somebody changes something; the message says what to do."""

    def __init__(self, reason: str, message: str, again_s: float = REFUSED_S) -> None:
        super().__init__(message)
        self.reason, self.again_s = reason, again_s


class _Stub:
    """The methods of the store's services, on one channel."""

    def __init__(self, channel: Any) -> None:
        for stub in (
            adapters_pb2_grpc.AdapterServiceStub,
            releases_pb2_grpc.ReleaseServiceStub,
            plans_pb2_grpc.PlanServiceStub,
            keys_pb2_grpc.KeyServiceStub,
        ):
            vars(self).update(vars(stub(channel)))


def _once(call: Call) -> Script[Any]:
    return (yield call)


class TenantStore:
    """The store's calls on behalf of a tenant. Every method raises LoraplexError."""

    def __init__(self, connection: AsyncConnection, calls: asyncio.Semaphore, imports: asyncio.Semaphore) -> None:
        self._connection, self._calls, self._imports = connection, calls, imports

    async def ask(self, method: str, request: Any) -> Any:
        """Make a call and return its answer."""
        async with self._calls:
            return await self._connection.run(_once(Call(method, request, timeout_s=_ASK_S)))

    async def find(self, method: str, request: Any, field: str, missing: T) -> T:
        """Make a call and return a field of its answer; `missing` where the store has nothing of that name."""
        try:
            found: T = getattr(await self.ask(method, request), field)
        except sdk.NotFoundError:
            return missing
        return found

    async def revision(self, name: str) -> adapters_pb2.Revision | None:
        """Return the live revision of an adapter, or that of ADAPTER@DIGEST; None where there is none."""
        return await self.find("GetAdapter", adapters_pb2.GetAdapterRequest(name=name), "revision", None)

    async def releases(self, adapter: str) -> Sequence[releases_pb2.Release]:
        """Return an adapter's releases, newest first; none where there is no adapter."""
        request = releases_pb2.ListReleasesRequest(parent=adapter, page_size=_LISTED)
        return await self.find("ListReleases", request, "releases", ())

    async def revisions(self, adapter: str) -> Sequence[adapters_pb2.Revision]:
        """Return an adapter's revisions, newest first; none where there is no adapter."""
        request = adapters_pb2.ListRevisionsRequest(parent=adapter, page_size=_LISTED)
        return await self.find("ListRevisions", request, "revisions", ())

    async def change(self, method: str, **fields: Any) -> releases_pb2.Release:
        """Call a method of ReleaseService that changes a release, or returns one; return the release."""
        request = getattr(releases_pb2, f"{method}Request")(**fields)
        release: releases_pb2.Release = (await self.ask(method, request)).release
        return release

    async def fetch(self, request: adapters_pb2.ImportRevisionRequest) -> adapters_pb2.Revision:
        """Let the store import a revision, which may take hours; return the revision."""
        answers: list[adapters_pb2.ImportRevisionResponse] = []

        def keep(answer: adapters_pb2.ImportRevisionResponse) -> None:
            answers[:] = [answer]

        async with self._imports:
            await self._connection.run(_once(Call("ImportRevision", request, take=keep)))
        if not answers or answers[0].WhichOneof("event") != "imported":
            raise sdk.UnavailableError("the store ended the import without a result")
        return answers[0].imported.revision

    async def delete(self, adapter: str) -> None:
        """Delete an adapter, unless there is none."""
        with suppress(sdk.NotFoundError):
            await self.ask("DeleteAdapter", adapters_pb2.DeleteAdapterRequest(name=adapter))


class StoreLink:
    """A connection to the store, with the credentials of the environment. Raises InvalidRequestError."""

    def __init__(self, address: str) -> None:
        self._credentials = credentials_of(None, None)
        self._connection = AsyncConnection(address, _Stub, credentials=self._credentials)
        self._bounds = asyncio.Semaphore(_CALLS), asyncio.Semaphore(_IMPORTS)
        self._anybody = TenantStore(self._connection, *self._bounds)

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    def of(self, tenant: str) -> TenantStore:
        """Return the store as a tenant's adapters are changed."""
        return TenantStore(self._connection.for_caller(tenant, self._credentials.api_key), *self._bounds)

    async def base(self, name: str) -> adapters_pb2.BaseModel | None:
        """Return a base model's live revision, or that of NAME@DIGEST; None where there is none. Raises LoraplexError.

        It has no modules and files.
        """
        request = adapters_pb2.GetBaseModelRequest(name=name, read_mask=_BASE_FIELDS)
        return await self._anybody.find("GetBaseModel", request, "model", None)

    async def promote_base(self, name: str, digest: str) -> None:
        """Make a staged or former revision of a base model the live one. Raises LoraplexError."""
        request = adapters_pb2.PromoteBaseModelRequest(name=name, digest=digest)
        await self._anybody.ask("PromoteBaseModel", request)

    async def knows(self, tenant: str) -> bool:
        """Tell whether a tenant has a plan or a key, or is the one of shared adapters. Raises LoraplexError.

        A store without credentials takes any.
        """
        if not self._credentials.name_the_caller or tenant in RESERVED_TENANTS:
            return True
        try:
            await self._anybody.ask("GetPlan", plans_pb2.GetPlanRequest(name=f"tenants/{tenant}"))
        except sdk.NotFoundError:
            keys = (await self._anybody.ask("ListKeys", keys_pb2.ListKeysRequest(tenant=tenant))).keys
            return any(not key.HasField("revoke_time") for key in keys)
        return True


# Errors after which the same call may succeed.
_PASSING = (sdk.UnavailableError, sdk.AbortedError, sdk.DeadlineExceededError, sdk.CancelledError, sdk.InternalError)


def reason_of(error: sdk.LoraplexError) -> str:
    """Return an error's reason as Kubernetes writes them, such as SourceNotAllowed."""
    return "".join(word.capitalize() for word in error.reason.split("_")) or type(error).__name__.removesuffix("Error")


def outcome_of(error: Rejected | sdk.LoraplexError, fields: Mapping[str, Any]) -> Status:
    """Return how an object is after a call for it has failed."""
    if isinstance(error, Rejected):
        return Status(State.REFUSED, "False", error.reason, str(error), error.again_s, fields)
    retry_after_s = getattr(error, "retry_after_s", None)
    reason = reason_of(error)
    if isinstance(error, _PASSING) or retry_after_s is not None:
        return Status(State.UNKNOWN, "Unknown", reason, error.message, max(SOON_S, retry_after_s or 0.0), fields)
    message = error.message
    if isinstance(error, sdk.UnauthenticatedError):
        message += "; give the operator an operator's API key: LORAPLEX_API_KEY_FILE"
    elif isinstance(error, sdk.PermissionDeniedError) and not error.reason.startswith("SOURCE_"):
        message += "; the operator needs an operator's API key, and the address of the store's operators' port"
    return Status(State.REFUSED, "False", reason, message, REFUSED_S, fields)
