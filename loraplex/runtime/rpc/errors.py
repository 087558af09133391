"""The tree of errors that a call can end with. Raise them anywhere inside a process; `rpc.status` maps each to a code.

CallError
├── InvalidField        a value of the request, named
├── PositionGone        a position in a stream that is not kept any more
├── NotBuilt            a field or method that this version does not serve
├── NotFound            an unknown resource, or one of another tenant: the answer is the same
├── Mismatch            two resources that exist but do not go together
├── AlreadyExists       a name that is taken
├── Aborted             a concurrent call changed the resource or took the request over
├── Exhausted           a quota, a queue or a memory that is full
├── Unauthenticated     no credential, or a bad one (rpc/principal.py)
├── PermissionDenied    a credential whose role, scope or port does not permit the call
├── Unavailable         a dependency that does not answer now; retry later
├── DeadlinePassed      the call's deadline passed
├── DataLoss            bytes that do not match their digest
└── Internal            a fault of the service
"""

from __future__ import annotations

from collections.abc import Mapping

# Of `requests` and `tokens`: the maximum of a caller's limit, what is left, and the seconds until its window ends.
RateLimits = Mapping[str, tuple[float, float, float]]


class CallError(Exception):
    """An error that ends a call with one status; `reason` is UPPER_SNAKE_CASE and goes into the ErrorInfo detail."""

    reason = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or type(self).reason


class InvalidField(CallError):
    """A value that can't be served; `field` is the path of the value in the request, such as sampling.top_p."""

    reason = "INVALID_FIELD"

    def __init__(self, field: str, message: str, *, reason: str | None = None) -> None:
        super().__init__(f"{field}: {message}", reason=reason)
        self.field = field


class PositionGone(CallError):
    """A position in a stream that is not kept any more; `field` is the path of its value in the request."""

    reason = "POSITION_GONE"

    def __init__(self, field: str, message: str, *, reason: str | None = None) -> None:
        super().__init__(f"{field}: {message}", reason=reason)
        self.field = field


class NotBuilt(CallError):
    """A field or method of the contract that this version does not serve yet."""

    reason = "NOT_BUILT"

    def __init__(self, field: str) -> None:
        super().__init__(f"{field}: not served by this version; leave it out")
        self.field = field


class NotFound(CallError):
    """An unknown resource, or one of another tenant. `kind` is such as adapter; `name` is what the client asked for.

    `hint` says more about what is the caller's own; of what is another tenant's there is none.
    """

    reason = "NOT_FOUND"

    def __init__(self, kind: str, name: str, *, hint: str = "", reason: str | None = None) -> None:
        super().__init__(f"{kind} not found: {name}" + (f"; {hint}" if hint else ""), reason=reason)
        self.kind = kind
        self.name = name


class Mismatch(CallError):
    """Two resources that exist but do not go together: an adapter of another base, a rank that is too big."""

    reason = "MISMATCH"

    def __init__(self, subject: str, message: str, *, reason: str | None = None) -> None:
        super().__init__(f"{subject}: {message}", reason=reason)
        self.subject = subject


class AlreadyExists(CallError):
    """A name that is taken."""

    reason = "ALREADY_EXISTS"


class Aborted(CallError):
    """A concurrent call changed the resource, or took the request over."""

    reason = "ABORTED"


class Exhausted(CallError):
    """A quota, queue or memory that is full; `subject` says whose.

    `retry_after_s` is how many seconds to wait before the next call; None: waiting does not help. `rate_limits` are
    those of the caller's plan, where one of them refuses the call.
    """

    reason = "EXHAUSTED"

    def __init__(self, subject: str, message: str, *, retry_after_s: float | None, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.subject = subject
        self.retry_after_s = retry_after_s
        self.rate_limits: RateLimits = {}


class PermissionDenied(CallError):
    """A credential whose role, scope or port does not permit the call, whatever the call is about."""

    reason = "PERMISSION_DENIED"

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)


class Unavailable(CallError):
    """A dependency that does not answer now: the same call may succeed later."""

    reason = "UNAVAILABLE"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class DeadlinePassed(CallError):
    """The call's deadline passed before the call ended."""

    reason = "DEADLINE_PASSED"


class DataLoss(CallError):
    """Bytes of the `kind` called `name` that do not match their digest."""

    reason = "DATA_LOSS"

    def __init__(
        self, kind: str, name: str, message: str = "its bytes do not match its digest", *, reason: str | None = None
    ) -> None:
        super().__init__(f"{kind} {name}: {message}", reason=reason)
        self.kind = kind
        self.name = name


class Internal(CallError):
    """A fault of the service itself."""
