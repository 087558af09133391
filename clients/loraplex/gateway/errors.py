"""Errors of HTTP requests: the gateway's own, and those of calls to routers with their HTTP statuses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loraplex_client import RateLimit
from loraplex_client import errors as sdk

# The HTTP status of each error of a call, and the code of one without a reason. 499 is nginx's word for a request that
# its client has left.
_STATUSES: tuple[tuple[type[sdk.LoraplexError], int, str], ...] = (
    (sdk.InvalidRequestError, 400, "invalid_value"),
    (sdk.FailedPreconditionError, 400, "failed_precondition"),
    (sdk.UnauthenticatedError, 401, "unauthenticated"),
    (sdk.PermissionDeniedError, 403, "permission_denied"),
    (sdk.NotFoundError, 404, "not_found"),
    (sdk.AlreadyExistsError, 409, "already_exists"),
    (sdk.AbortedError, 409, "aborted"),
    (sdk.ResourceExhaustedError, 429, "resource_exhausted"),
    (sdk.CancelledError, 499, "cancelled"),
    (sdk.UnavailableError, 503, "router_unreachable"),
    (sdk.DeadlineExceededError, 504, "deadline_exceeded"),
    (sdk.LoraplexError, 500, "internal_error"),
)
# Messages of GenerateSpec whose fields are parameters of a request by themselves.
_GROUPS = re.compile(r"\b(?:sampling|stopping|output|chat|prompt_options)\.(?=[a-z])")


@dataclass
class HttpError(Exception):
    """A request that failed. `code` is a word for programs, `field` the parameter that it is about, if any.

    `retry_after_s` is how many seconds to wait before the next request; None: waiting does not help. `rate_limits` are
    the caller's, where one of them refuses the request.
    """

    status: int
    code: str
    message: str
    field: str = ""
    retry_after_s: float | None = None
    rate_limits: Mapping[str, RateLimit] | None = None

    def headers(self) -> list[tuple[str, str]]:
        """Return the headers that go with the error."""
        if self.retry_after_s is None:
            return []
        return [("retry-after", str(max(1, round(self.retry_after_s))))]


def invalid(field: str, why: str, code: str = "invalid_value") -> HttpError:
    """Return the error of a bad parameter."""
    return HttpError(400, code, f"{field}: {why}", field)


def not_served(field: str, why: str = "is not served") -> HttpError:
    """Return the error of a parameter of the protocol that cannot be obeyed."""
    return HttpError(400, "unsupported_parameter", f"{field}: {why}", field)


def full(why: str) -> HttpError:
    """Return the error of a request that the gateway has no room for."""
    return HttpError(503, "gateway_full", f"the gateway {why}", retry_after_s=1.0)


def no_store() -> HttpError:
    """Return the error of a request for adapters where the gateway knows no store."""
    return HttpError(404, "adapters_not_served", "adapters are not served here: start the gateway with --store")


def check_served(request: Mapping[str, Any], refused: Sequence[str], harmless: Mapping[str, Sequence[Any]]) -> None:
    """Raise HttpError on a parameter that is refused, unless its value is a harmless one, which asks for nothing."""
    for name in refused:
        if request.get(name) is not None and request[name] not in harmless.get(name, ()):
            raise not_served(name)


def renamed(error: HttpError, names: Mapping[str, str]) -> HttpError:
    """Return an error whose field has the name that the request's protocol gives it.

    `names` are expressions for beginnings of the cluster's names, with their replacements.
    """
    field, message = error.field, error.message
    for pattern, replacement in names.items():
        field, changed = re.subn(f"^{pattern}", replacement, field)
        if changed:
            break
    if error.field and message.startswith(error.field):
        message = field + message[len(error.field) :]
    return replace(error, field=field, message=message)


def named_model(error: HttpError) -> HttpError:
    """Return an error of a name in the words of protocols in which an adapter is a model."""
    return replace(error, message=error.message.replace("adapter not found:", "model not found:", 1))


def http_error(error: sdk.LoraplexError) -> HttpError:
    """Return the error of a call to a router as that of the request which made it."""
    status, code = next((status, code) for kind, status, code in _STATUSES if isinstance(error, kind))
    field = _GROUPS.sub("", getattr(error, "field", ""))
    message = error.message
    if field == "adapter":  # a name that nothing can have
        status = 404
    if isinstance(error, sdk.NotImplementedByServerError):
        status = 400 if field else 501
    if isinstance(error, (sdk.InvalidRequestError, sdk.NotImplementedByServerError)):
        message = _GROUPS.sub("", message).replace("truncate_to", "truncate_prompt_tokens")
    if isinstance(error, sdk.NotFoundError):
        field = "model"
    if isinstance(error, sdk.DeadlineExceededError) and not error.reason:  # its words are for the gateway's operator
        message = "the answer was not complete when x-request-timeout-ms was over"
    if error.reason == "DEADLINE_UNATTAINABLE":
        status = 504
    if error.reason == "UPLOAD_TOO_SLOW":
        status = 408
    retry_after_s = getattr(error, "retry_after_s", None)
    retry_after_s = 1.0 if status == 503 and retry_after_s is None else retry_after_s
    rates = getattr(error, "rate_limits", None)
    return HttpError(status, error.reason.lower() or code, message, field, retry_after_s, rates)
