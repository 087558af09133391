"""The endpoint of both transports: a service's addresses, the metadata of calls, and the channels to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Self

import grpc
from loraplex.inference.v1 import inference_pb2

from loraplex_client.addresses import Rotation, read_addresses
from loraplex_client.calls import Call
from loraplex_client.channels import Channels
from loraplex_client.credentials import ApiKey, Credentials, credentials_of
from loraplex_client.errors import (
    CancelledError,
    InvalidRequestError,
    LoraplexError,
    UnavailableError,
    error_of,
    is_broken,
)
from loraplex_client.recovery import Attempt, Recovery
from loraplex_client.retries import RESUME_ATTEMPTS, RetryBudget, Tries
from loraplex_client.tracing import trace_metadata

TENANT_KEY = "x-loraplex-tenant"
# The tenant of a client that has neither a credential nor a tenant.
DEFAULT_TENANT = "default"


class Endpoint:
    """A service's addresses, the tenant with its credentials, and the timeout of each call.

    Without `credentials` those of the environment are used. With a credential, an empty tenant is the credential's;
    without one it is `default`.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        stub: Callable[[Any], Any],
        *,
        tenant: str = "",
        timeout_s: float | None = None,
        resume_attempts: int = RESUME_ATTEMPTS,
        credentials: Credentials | None = None,
    ) -> None:
        self._rotation = Rotation(read_addresses(address))
        self._budget = RetryBudget()
        self._timeout_s = timeout_s
        self._resume_attempts = resume_attempts
        credentials = credentials_of(None, None) if credentials is None else credentials
        self._call_as(tenant, credentials)
        self._channels = Channels(self._transport, stub, credentials.tls)

    # The module that makes channels: grpc or grpc.aio.
    _transport: Any

    def _call_as(self, tenant: str, credentials: Credentials) -> None:
        """Set the tenant and the credentials of the calls. Raises InvalidRequestError."""
        if not (tenant.isascii() and tenant.isprintable()):
            raise InvalidRequestError(f"tenant: {tenant!r} is not a name", field="tenant")
        credentials.check(self._rotation.addresses)
        self._credentials = credentials
        self.tenant = tenant or ("" if credentials.given else DEFAULT_TENANT)
        self._metadata = ((TENANT_KEY, self.tenant),) if self.tenant else ()

    def for_caller(self, tenant: str, api_key: ApiKey) -> Self:
        """Return this endpoint for calls of another tenant or key, with the same channels and budget of retries."""
        other = copy(self)
        other._call_as(tenant, replace(self._credentials, api_key=api_key))
        return other

    @property
    def closings(self) -> int:
        """Return how often the channels were closed; streams that ran then are not resumed."""
        return self._channels.closings

    def start(self, attempt: Attempt) -> Any:
        """Begin an RPC."""
        method = getattr(self._channels.stub(attempt.address), attempt.call.method)
        metadata = (*self._metadata, *self._credentials.metadata(), *trace_metadata())
        return method(attempt.call.request, timeout=attempt.timeout_s, metadata=metadata)

    def _recovery(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> Recovery:
        return Recovery(request, self._tries(timeout_s))

    def _tries(self, timeout_s: float | None = None) -> Tries:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return Tries(self._rotation, self._budget, timeout_s, self._resume_attempts)

    def _attempt(self, call: Call, tries: Tries) -> Attempt:
        address, timeout_s = tries.begin()
        return Attempt(address, call, timeout_s)

    def _failed(self, attempt: Attempt, tries: Tries, error: grpc.RpcError) -> float:
        """Return the seconds until the next try of a call that is not resumed. Raises the error that ends it."""
        failure = error_of(error, attempt.address)
        try:
            if not (isinstance(failure, UnavailableError) or is_broken(failure) or tries.waits(failure)):
                raise failure
            if not attempt.call.may_repeat:
                self._rotation.failed(attempt.address)
                raise failure
            return tries.failed(failure)
        except LoraplexError:
            raise failure from error

    def _check_open(self, closings: int) -> None:
        """Raise CancelledError where the client was closed while a call waited for its next try."""
        if self.closings != closings:
            raise CancelledError("the client was closed")
