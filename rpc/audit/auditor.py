"""The auditor of a process's servers: an interceptor behind the guard, and the guard's own refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from rpc.audit.audited import AUDITED, STEALABLE, STOLEN, Audited
from rpc.audit.refused_callers import WINDOW_S, Log, RefusedCallers
from rpc.errors import CallError
from rpc.handlers import Method, wrapped
from rpc.identity.principal import Principal, caller

Context = grpc.aio.ServicerContext[Any, Any]
# Maximum entries of a repeated field in a record.
_ENTRIES = 20


class Auditor(grpc.aio.ServerInterceptor):
    """Records calls that change something, with who called and how they ended, and refused callers.

    It closes its `log`; `record` keeps other events.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self.record = log.record
        self._refused = RefusedCallers(log)

    def refused(self, method: str, principal: Principal | None, error: CallError, peer: str) -> None:
        """Record a call that was refused."""
        who = principal.name if principal is not None else ""
        tenant = principal.tenant if principal is not None else ""
        self._refused.note(who, peer, error.reason, method=short(method), tenant=tenant)

    async def follow(self) -> None:
        """Record counts of refusals while no further ones come; never returns."""
        while True:
            await asyncio.sleep(WINDOW_S)
            self._refused.flush()

    def close(self) -> None:
        """Record the last counts of refusals, and close the log."""
        self._refused.flush()
        self._log.close()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handlers of audited methods."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return None
        if (audited := AUDITED.get(method)) is not None:
            return wrapped(handler, lambda inner: self._changing(inner, method, audited))
        if method in STEALABLE:
            return wrapped(handler, lambda inner: self._stealable(inner, method))
        return handler

    def _changing(self, inner: Method, method: str, audited: Audited) -> Method:
        async def recorded(request: Any, context: Context) -> Any:
            code, details = "CANCELLED", dict[str, Any]()
            try:
                if isinstance(request, Message):
                    details |= _values(request, audited.request)
                answer = await inner(request, context)
                code = "OK"
                details |= _values(answer, audited.answer)
                return answer
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

        return recorded

    def _stealable(self, inner: Method, method: str) -> Method:
        async def watched(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async for answer in inner(request, context):
                    yield answer
            except CallError as error:
                if error.reason in STOLEN:
                    self.refused(method, caller(), error, context.peer())
                raise

        return watched


def short(method: str) -> str:
    """Return SERVICE/METHOD of a method's full name."""
    return method.rpartition(".")[2]


def _values(message: Message, paths: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of these paths that are set, by their last names."""
    found = {}
    for path in paths:
        *outer, name = path.split(".")
        owner: Any = message
        for one in outer:
            owner = getattr(owner, one)
        if (value := _plain(getattr(owner, name))) or _is_set(owner, name):
            found[name] = value
    return found


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
    return [str(one)[:100] for one in list(value)[:_ENTRIES]]


def _shown_time(value: Any) -> str:
    """Return a time or a duration as JSON has it; one that a caller made invalid by its numbers."""
    try:
        return str(value.ToJsonString())
    except ValueError:
        return f"{value.seconds} s and {value.nanos} ns"
