"""The one table between errors and gRPC statuses; rpc.interceptors applies it to every method.

Details are google.rpc messages in the `grpc-status-details-bin` trailer, ErrorInfo first on every one
(https://google.aip.dev/193).
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details_pb2
from google.rpc.status_pb2 import Status

from loraplex.runtime.rpc.errors import (
    Aborted,
    AlreadyExists,
    CallError,
    DataLoss,
    DeadlinePassed,
    Exhausted,
    Internal,
    InvalidField,
    Mismatch,
    NotBuilt,
    NotFound,
    PermissionDenied,
    PositionGone,
    RateLimits,
    Unavailable,
)
from loraplex.runtime.rpc.principal import Unauthenticated

DOMAIN = "loraplex"
DETAILS_KEY = "grpc-status-details-bin"
# Metadata of an answer to a caller whose plans have such limits: {"requests": [maximum, left, seconds until the window
# ends], "tokens": [...]} as JSON.
RATE_LIMITS_KEY = "x-loraplex-rate-limits"
# Maximum length in characters of a status's message and of a resource's name: trailers have a size limit.
_TEXT_CHARACTERS = 500
# Control characters and line ends, which a caller's own names may have.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    code: f"\\u{code:04x}" for code in (*range(0x2028, 0x202F), *range(0x2066, 0x206A))
}

CODES: dict[type[CallError], grpc.StatusCode] = {
    InvalidField: grpc.StatusCode.INVALID_ARGUMENT,
    PositionGone: grpc.StatusCode.OUT_OF_RANGE,
    NotBuilt: grpc.StatusCode.UNIMPLEMENTED,
    NotFound: grpc.StatusCode.NOT_FOUND,
    Mismatch: grpc.StatusCode.FAILED_PRECONDITION,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    Aborted: grpc.StatusCode.ABORTED,
    Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    DataLoss: grpc.StatusCode.DATA_LOSS,
    Internal: grpc.StatusCode.INTERNAL,
}


# The error of each gRPC status number.
_ERRORS = {code.value[0]: kind for kind, code in CODES.items()}


def to_status(error: CallError) -> tuple[grpc.StatusCode, Status]:
    """Return the code and the rich status of an error; its message may quote the caller, so that it is cut."""
    code, message = CODES[type(error)], _short(error.message)
    status = Status(code=code.value[0], message=message)
    for detail in (details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN), *_details(error, message)):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return code, status


def to_error(code: int, reason: str, message: str, field: str) -> CallError:
    """Return the error that a status's parts stand for; an unknown code is INTERNAL.

    A worker ends a job with these parts; see worker.engine_api.Failure.
    """
    kind, subject, why = _ERRORS.get(code, Internal), field or "request", reason or None
    if kind is NotBuilt:
        return NotBuilt(subject)
    if kind is InvalidField or kind is Mismatch or kind is PositionGone:
        return kind(subject, message, reason=why)
    if kind is NotFound or kind is DataLoss:
        return kind(subject, name=message, reason=why)
    if kind is Exhausted:
        return Exhausted(subject, message, retry_after_s=None, reason=why)
    return kind(message, reason=why)


def _details(error: CallError, message: str) -> list[Message]:
    match error:
        case InvalidField(field=field) | NotBuilt(field=field) | PositionGone(field=field):
            violation = details_pb2.BadRequest.FieldViolation(field=_short(field), description=message)
            return [details_pb2.BadRequest(field_violations=[violation])]
        case NotFound(kind=kind, name=name) | DataLoss(kind=kind, name=name):
            name = _short(name)
            return [details_pb2.ResourceInfo(resource_type=kind, resource_name=name, description=message)]
        case Mismatch(subject=subject):
            subject = _short(subject)
            failure = details_pb2.PreconditionFailure.Violation(type=error.reason, subject=subject, description=message)
            return [details_pb2.PreconditionFailure(violations=[failure])]
        case Exhausted(subject=subject, retry_after_s=after):
            quota = details_pb2.QuotaFailure.Violation(subject=_short(subject), description=message)
            return [details_pb2.QuotaFailure(violations=[quota]), *([] if after is None else [_retry(after)])]
        case Unavailable(retry_after_s=after):
            return [_retry(after)]
    return []


def _short(text: str) -> str:
    """Escape what a status's one line cannot have, and cut a text that would break the size limit of trailers."""
    text = text.translate(_CONTROLS).encode(errors="backslashreplace").decode()
    return text if len(text) <= _TEXT_CHARACTERS else text[: _TEXT_CHARACTERS - 1] + "…"


def _retry(after_s: float) -> details_pb2.RetryInfo:
    delay = Duration()
    delay.FromNanoseconds(int(after_s * 1e9))
    return details_pb2.RetryInfo(retry_delay=delay)


def rates_metadata(rates: RateLimits) -> tuple[tuple[str, str], ...]:
    """Return a caller's limits as metadata; empty if it has none."""
    return ((RATE_LIMITS_KEY, json.dumps(rates)),) if rates else ()


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: CallError) -> NoReturn:
    """End the call with the status of the error; always raises."""
    code, status = to_status(error)
    rates = rates_metadata(error.rate_limits if isinstance(error, Exhausted) else {})
    await context.abort(code, status.message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()), *rates))
