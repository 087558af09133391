"""The auditor of a process's servers: which calls the audit log has, and which callers were refused."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from google.protobuf.message import Message

from loraplex.runtime.rpc.errors import CallError
from loraplex.runtime.rpc.interceptors import Context, Handler, Interceptor, within
from loraplex.runtime.rpc.principal import Principal, caller
from loraplex.runtime.tenancy.audit_log import AuditLog
from loraplex.runtime.tenancy.permissions import PERMISSIONS, Audited, Permission

# Reasons for which a call that changes nothing is recorded as refused: somebody tried another's credential or token.
STOLEN = frozenset({"RESUME_TOKEN_INVALID", "RESUME_TOKEN_MISMATCH", "RESUME_TOKEN_ENDED"})
# Methods that may end with one of these.
STEALABLE = frozenset({"/loraplex.inference.v1.InferenceService/Resume"})
# Interval in seconds after which refusals are counted anew.
WINDOW_S = 60.0
# Maximum records in a window, of one caller and of all.
CALLER_LIMIT, LIMIT = 10, 100
# Maximum callers with a count of their own in a window; the others have one together.
COUNTED_LIMIT = 50
OTHERS = "others"


class RefusedCallers:
    """Records the first refusals of a caller in a window, and counts the rest."""

    def __init__(self, log: AuditLog, now: Callable[[], float] = time.monotonic) -> None:
        self._log, self._now = log, now
        self._began = now()
        self._recorded: Counter[str] = Counter()
        self._counted: dict[str, Counter[str]] = {}

    def note(self, caller: str, peer: str, reason: str, **values: Any) -> None:
        """Record or count a refusal; callers without a name are told apart by their address, without its port."""
        if self._now() - self._began >= WINDOW_S:
            self.flush()
        who = caller or peer.rpartition(":")[0]
        if self._recorded[who] < CALLER_LIMIT and self._recorded.total() < LIMIT:
            self._recorded[who] += 1
            self._log.record("refused", caller=caller, peer=peer, reason=reason, **values)
            return
        if who not in self._counted and len(self._counted) >= COUNTED_LIMIT:
            who = OTHERS
        self._counted.setdefault(who, Counter())[reason] += 1

    def flush(self) -> None:
        """Record the counts, and begin another window."""
        for who, reasons in self._counted.items():
            self._log.record("refused more", caller=who, count=reasons.total(), reasons=dict(reasons))
        self._began = self._now()
        self._recorded.clear()
        self._counted.clear()


# Maximum entries of a repeated field in a record.
_ENTRIES = 20


class Auditor(Interceptor):
    """Records calls that change something, with who called and how they ended, and refused callers.

    It closes its `log`; `record` keeps other events.
    """

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self.record = log.record
        self._refused = RefusedCallers(log)
        # Records counts while no further refusals come; called every WINDOW_S.
        self.flush = self._refused.flush

    def refused(self, method: str, principal: Principal | None, error: CallError, peer: str, **values: Any) -> None:
        """Record a call that was refused, with further values."""
        who = principal.name if principal is not None else ""
        tenant = principal.tenant if principal is not None else ""
        self._refused.note(who, peer, error.reason, method=short(method), tenant=tenant, **values)

    def close(self) -> None:
        """Record the last counts of refusals, and close the log."""
        self.flush()
        self._log.close()

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Wrap the handlers of audited methods."""
        if (audited := PERMISSIONS.get(method, Permission()).audited) is not None:
            return within(handler, lambda request, context: self._recording(request, context, method, audited))
        if method in STEALABLE:
            return within(handler, lambda request, context: self._watching(context, method))
        return handler

    @contextmanager
    def _recording(
        self, request: Any, context: Context, method: str, audited: Audited
    ) -> Iterator[Callable[[Message], None]]:
        """Record a call when the context ends, with details of the messages that what it yields was called with."""
        code, details = "CANCELLED", dict[str, Any]()
        try:
            if isinstance(request, Message):
                details |= _values(request, audited.request)
            yield lambda answer: details.update(_values(answer, audited.answer))
            code = "OK"
        except CallError as error:
            code = error.reason
            raise
        except Exception:
            code = "INTERNAL"
            raise
        finally:
            who = caller()
            self.record(
                "call",
                method=short(method),
                caller=who.name,
                credential=who.kind.value,
                peer=context.peer(),
                tenant=who.tenant,
                result=code,
                details=details,
            )

    @contextmanager
    def _watching(self, context: Context, method: str) -> Iterator[None]:
        try:
            yield
        except CallError as error:
            if error.reason in STOLEN:
                self.refused(method, caller(), error, context.peer())
            raise


def short(method: str) -> str:
    """Return SERVICE/METHOD of a method's full name."""
    return method.rpartition(".")[2]


def _values(message: Message, paths: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of these paths that are set, by their last names."""
    values = {}
    for path in paths:
        *outer, name = path.split(".")
        owner: Any = message
        for one in outer:
            owner = getattr(owner, one)
        if (value := _plain(getattr(owner, name))) or _is_set(owner, name):
            values[name] = value
    return values


def _is_set(message: Message, name: str) -> bool:
    """Tell whether an optional number or text was given, though it may be 0 or empty."""
    field = message.DESCRIPTOR.fields_by_name[name]
    return field.has_presence and field.message_type is None and message.HasField(name)


def _plain(value: Any) -> Any:
    """Return a field's value as JSON has it."""
    if isinstance(value, str):
        return value[:500]
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Message):
        return _shown_time(value) if value.ByteSize() else ""
    entries = value if not hasattr(value, "items") else (f"{name}: {one}" for name, one in value.items())
    return [" ".join(str(one).split())[:100] for one in islice(entries, _ENTRIES)]


def _shown_time(value: Any) -> str:
    """Return a time or a duration as JSON has it; one that a caller made invalid by its numbers."""
    try:
        return str(value.ToJsonString())
    except ValueError:
        return f"{value.seconds} s and {value.nanos} ns"
