"""Errors of calls: one class for each gRPC status that Loraplex answers with.

LoraplexError                     any of these; `reason` is empty where no Loraplex server has answered
├── InvalidRequestError           INVALID_ARGUMENT: a bad value, `field` names it
├── NotImplementedByServerError   UNIMPLEMENTED: `field` is not served by that version
├── NotFoundError                 NOT_FOUND: unknown, or another tenant's; `kind` and `name`
├── FailedPreconditionError       FAILED_PRECONDITION: `subject` exists but does not go with the rest
├── AlreadyExistsError            ALREADY_EXISTS
├── AbortedError                  ABORTED: changed or taken over meanwhile
├── ResourceExhaustedError        RESOURCE_EXHAUSTED: a quota or queue of `subject` is full; `retry_after_s`
├── UnauthenticatedError          UNAUTHENTICATED
├── PermissionDeniedError         PERMISSION_DENIED: the credential's role, scope or port does not permit the call
├── UnavailableError              UNAVAILABLE: nothing is wrong with the call; `retry_after_s`
├── DeadlineExceededError         DEADLINE_EXCEEDED: `timeout_s` passed; a TimeoutError too
├── CancelledError                CANCELLED, by the other side
│   └── ClientClosedError         none: the client was closed before the call, or while it ran
├── DataLossError                 DATA_LOSS: bytes of `kind` `name` that are not what their digest says
├── InternalError                 INTERNAL, and streams that break the protocol
└── AnswerFormatError             none: an answer that is not of its response_format, cut by max_tokens mostly; `text`
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2 as details_pb2
from google.rpc.status_pb2 import Status

DETAILS_KEY = "grpc-status-details-bin"
# Metadata of an answer: what the caller's plans leave, as JSON.
RATE_LIMITS_KEY = "x-loraplex-rate-limits"


@dataclass(frozen=True)
class RateLimit:
    """A limit of the caller's plan: its maximum, what is left of it, and the seconds until its window ends.

    Of a `budget`, and of a `budget-warning` that is reached, in units of the currency.
    """

    limit: float
    remaining: float
    reset_s: float


def rate_limits_in(metadata: Any) -> Mapping[str, RateLimit]:
    """Return the limits of `requests`, `tokens` and money that an answer's metadata tells."""
    rates = dict(metadata or ()).get(RATE_LIMITS_KEY, "{}")
    return {kind: RateLimit(*values) for kind, values in json.loads(rates).items()}


class LoraplexError(Exception):
    """A call that failed. `message` is one line; `reason` is the server's UPPER_SNAKE_CASE word for it."""

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason


class _FieldError(LoraplexError):
    def __init__(self, message: str, *, reason: str = "", field: str = "") -> None:
        super().__init__(message, reason=reason)
        self.field = field


class _ResourceError(LoraplexError):
    def __init__(self, message: str, *, reason: str = "", kind: str = "", name: str = "") -> None:
        super().__init__(message, reason=reason)
        self.kind = kind
        self.name = name


class InvalidRequestError(_FieldError):
    """An invalid value; `field` is its path in the request, for example sampling.top_p."""


class NotImplementedByServerError(_FieldError):
    """A field (or, where `field` is empty, a whole method) that this version of the server does not serve."""


class NotFoundError(_ResourceError):
    """An unknown name or another tenant's (the answer is the same); `kind` says what it names, for example adapter."""


class FailedPreconditionError(LoraplexError):
    """Objects that do not go together, for example an adapter of another base model; `subject` names the object."""

    def __init__(self, message: str, *, reason: str = "", subject: str = "") -> None:
        super().__init__(message, reason=reason)
        self.subject = subject


class AlreadyExistsError(LoraplexError):
    """A name that is already in use."""


class AbortedError(LoraplexError):
    """A concurrent change, or a request that another call took over."""


class ResourceExhaustedError(LoraplexError):
    """A full quota or queue of `subject`; `retry_after_s` is None if waiting does not help.

    `rate_limits` has the limits of the caller's plan, as a Generation has them, where one of them refused the call.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        subject: str = "",
        retry_after_s: float | None = None,
        rate_limits: Mapping[str, RateLimit] | None = None,
    ) -> None:
        super().__init__(message, reason=reason)
        self.subject = subject
        self.retry_after_s = retry_after_s
        self.rate_limits = rate_limits or {}


class UnauthenticatedError(LoraplexError):
    """A missing or invalid credential."""


class PermissionDeniedError(LoraplexError):
    """A credential that does not permit the call, whatever the call is about."""


class UnavailableError(LoraplexError):
    """A server that does not answer (then `reason` is empty) or can't serve now; a later call may succeed."""

    def __init__(self, message: str, *, reason: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(LoraplexError, TimeoutError):
    """A call whose `timeout_s` passed before its end; a TimeoutError too, which is what other libraries raise."""


class CancelledError(LoraplexError):
    """A call that the other side cancelled, for example a server that shuts down."""


class ClientClosedError(CancelledError):
    """A call of a client that is closed."""

    def __init__(self) -> None:
        super().__init__("the client is closed; make another one")


class DataLossError(_ResourceError):
    """Bytes that do not match their digest."""


class InternalError(LoraplexError):
    """A failure inside the server, or a stream that breaks the protocol."""


# Keywords of other clients.
_FOREIGN = {
    **dict.fromkeys(("adapter", "adapter_name", "lora", "lora_id", "lora_name"), "adapter_id"),
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "max_output_tokens", "max_length"), "max_tokens"),
    **dict.fromkeys(("timeout", "deadline", "deadline_s"), "timeout_s"),
    **dict.fromkeys(("stop_sequences", "stop_words"), "stop"),
}


def unknown_keyword(name: str, known: Collection[str]) -> TypeError:
    """Return the error of a keyword that a method does not have, with the one that is meant."""
    meant = _FOREIGN.get(name, "")
    if meant not in known:
        meant = next(iter(get_close_matches(name, known, 1)), "")
    hint = f"did you mean {meant}?" if meant else "the method's help lists the known ones"
    return TypeError(f"unknown keyword {name!r}; {hint}")


def is_broken(error: LoraplexError) -> bool:
    """Return whether the connection broke, or no server took the call: such errors have no reason of a server."""
    broke = isinstance(error, (UnavailableError, CancelledError, InternalError)) or type(error) is LoraplexError
    return broke and not error.reason


class AnswerFormatError(LoraplexError):
    """An answer that can't be read as its response_format, mostly because max_tokens cut it; `text` has it."""

    def __init__(self, message: str, *, text: str) -> None:
        super().__init__(message)
        self.text = text


# Each status with its class, and the values that the class takes from the details.
_CLASSES: dict[grpc.StatusCode, tuple[type[LoraplexError], tuple[str, ...]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (InvalidRequestError, ("field",)),
    grpc.StatusCode.UNIMPLEMENTED: (NotImplementedByServerError, ("field",)),
    grpc.StatusCode.NOT_FOUND: (NotFoundError, ("kind", "name")),
    grpc.StatusCode.FAILED_PRECONDITION: (FailedPreconditionError, ("subject",)),
    grpc.StatusCode.ALREADY_EXISTS: (AlreadyExistsError, ()),
    grpc.StatusCode.ABORTED: (AbortedError, ()),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (ResourceExhaustedError, ("subject", "retry_after_s", "rate_limits")),
    grpc.StatusCode.UNAUTHENTICATED: (UnauthenticatedError, ()),
    grpc.StatusCode.PERMISSION_DENIED: (PermissionDeniedError, ()),
    grpc.StatusCode.UNAVAILABLE: (UnavailableError, ("retry_after_s",)),
    grpc.StatusCode.DEADLINE_EXCEEDED: (DeadlineExceededError, ()),
    grpc.StatusCode.CANCELLED: (CancelledError, ()),
    grpc.StatusCode.DATA_LOSS: (DataLossError, ("kind", "name")),
    grpc.StatusCode.INTERNAL: (InternalError, ()),
}


# The name of each class's status.
STATUSES = {cls: status.name for status, (cls, _) in _CLASSES.items()}


def error_of(error: grpc.RpcError, address: str) -> LoraplexError:
    """Return the exception for a failed call of grpc or grpc.aio; `address` is the server's."""
    call: Any = error  # at run time every RpcError of a call is a grpc.Call
    metadata = call.trailing_metadata()
    details = {**_read_details(metadata), "rate_limits": rate_limits_in(metadata)}
    message, reason = call.details() or f"{address} gave no message", details.pop("reason", "")
    if call.code() is grpc.StatusCode.UNAVAILABLE and not reason:
        message = f"no answer from {address}: {message}"
    if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not reason:
        message = f"{address} had not answered in full when timeout_s was over"
    cls, names = _CLASSES.get(call.code(), (LoraplexError, ()))
    return cls(message, reason=reason, **{name: details[name] for name in names if name in details})


_DETAIL_TYPES = {
    cls.DESCRIPTOR.full_name: cls
    for cls in (
        details_pb2.ErrorInfo,
        details_pb2.BadRequest,
        details_pb2.ResourceInfo,
        details_pb2.PreconditionFailure,
        details_pb2.QuotaFailure,
        details_pb2.RetryInfo,
    )
}


def _read_details(metadata: Any) -> dict[str, Any]:
    """Return the values in a status's google.rpc messages, by the names of the errors' attributes."""
    details: dict[str, Any] = {}
    packed = next((value for key, value in metadata or () if key == DETAILS_KEY), b"")
    try:
        for detail in Status.FromString(packed).details:
            cls = _DETAIL_TYPES.get(detail.TypeName())
            if cls is not None:
                details |= _values_of(cls.FromString(detail.value))
    except DecodeError:  # Another program's trailer: code and message are still valid.
        return {}
    return details


def _values_of(message: Any) -> dict[str, Any]:
    match message:
        case details_pb2.ErrorInfo():
            return {"reason": message.reason}
        case details_pb2.BadRequest():
            return {"field": next((violation.field for violation in message.field_violations), "")}
        case details_pb2.ResourceInfo():
            return {"kind": message.resource_type, "name": message.resource_name}
        case details_pb2.RetryInfo():
            return {"retry_after_s": message.retry_delay.ToNanoseconds() / 1e9}
        case _:  # PreconditionFailure, QuotaFailure
            return {"subject": next((violation.subject for violation in message.violations), "")}
