"""The tree of errors that a call can end with. Raised anywhere inside a process; `rpc.status` gives each its code.

CallError
├── InvalidField        a value of the request, named
├── NotBuilt            a field or method that this version does not serve
├── NotFound            unknown, or another tenant's: the answer is the same
├── Mismatch            things that exist but do not go together
├── AlreadyExists
├── Aborted             somebody else changed or took it over meanwhile
├── Exhausted           a quota or a queue is full
├── Unauthenticated
├── Unavailable         try again later
├── DeadlinePassed
├── DataLoss
└── Internal
"""

from __future__ import annotations


class CallError(Exception):
    """Ends a call with one status. `reason` is UPPER_SNAKE_CASE and stands in the ErrorInfo detail."""

    reason = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or type(self).reason


class InvalidField(CallError):
    """A value that can't be served; `field` is its path in the request, such as sampling.top_p."""

    reason = "INVALID_FIELD"

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
    """An unknown resource, or one of another tenant. `kind` is such as adapter, `name` what was asked for."""

    reason = "NOT_FOUND"

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"{kind} not found: {name}")
        self.kind = kind
        self.name = name


class Mismatch(CallError):
    """Both things exist but do not go together: an adapter of another base, a rank that is too big."""

    reason = "MISMATCH"

    def __init__(self, subject: str, message: str, *, reason: str | None = None) -> None:
        super().__init__(f"{subject}: {message}", reason=reason)
        self.subject = subject


class AlreadyExists(CallError):
    """The name is taken."""

    reason = "ALREADY_EXISTS"


class Aborted(CallError):
    """Somebody else changed it meanwhile, or took the call over."""

    reason = "ABORTED"


class Exhausted(CallError):
    """A quota or queue is full; `subject` says whose, `retry_after_s` when to come back."""

    reason = "EXHAUSTED"

    def __init__(self, subject: str, message: str, *, retry_after_s: float, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.subject = subject
        self.retry_after_s = retry_after_s


class Unauthenticated(CallError):
    """No credential, or a bad one."""

    reason = "UNAUTHENTICATED"


class Unavailable(CallError):
    """Nothing is wrong with the call; it may go through later."""

    reason = "UNAVAILABLE"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class DeadlinePassed(CallError):
    """The call's deadline came before its end."""

    reason = "DEADLINE_PASSED"


class DataLoss(CallError):
    """Bytes that are not what their digest says."""

    reason = "DATA_LOSS"

    def __init__(self, kind: str, name: str, message: str) -> None:
        super().__init__(f"{kind} {name}: {message}")
        self.kind = kind
        self.name = name


class Internal(CallError):
    """Our fault."""
