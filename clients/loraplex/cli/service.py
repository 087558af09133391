"""Calls to a cluster's services: their clients, and one line for a call that failed, with a hint what to try next."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from loraplex.cli.terminal import CommandError

if TYPE_CHECKING:
    from loraplex_client import LoraplexError, StoreClient, UnavailableError
    from loraplex_client.calls import Script

T = TypeVar("T")

_FLAGS = {"router": "--router or LORAPLEX_ADDRESS", "store": "--store or LORAPLEX_STORE_ADDRESS"}
_OTHER = {"router": "store or a gateway", "store": "router or a gateway"}
_USUAL = {"router": "127.0.0.1:50051", "store": "127.0.0.1:50052"}
# Parts of gRPC's own messages: of a server without the service, and of a client that meets an HTTP server.
_NO_SUCH_METHOD, _HTTP_SERVER = "Method not found", "http1.x server"
# Part of a server's message for an operator's credential at the port for tenants.
_OPERATOR_AT_PUBLIC_PORT = "role operator may not call this at the public port"


class Service:
    """A connection to the service of `loraplex.NAME`, such as admin.v1.keys, of a `server` (router, store).

    Every method raises CommandError.
    """

    def __init__(self, server: str, address: str, name: str, tenant: str = "", timeout_s: float | None = None) -> None:
        from loraplex_client.connection import Connection

        (descriptor,) = import_module(f"loraplex.{name}_pb2").DESCRIPTOR.services_by_name.values()
        self._methods = descriptor.methods_by_name
        stub = getattr(import_module(f"loraplex.{name}_pb2_grpc"), f"{descriptor.name}Stub")
        self._server, self._address = server, address
        with explained(server, address):
            self._connection = Connection(address, stub, tenant=tenant, timeout_s=timeout_s)

    def ask(self, method: str, **fields: Any) -> Any:
        """Make one call, with the fields of its request, and return its answer."""
        from loraplex_client.calls import Call

        def script() -> Script[Any]:
            return (yield Call(method, self._request(method, fields)))

        with explained(self._server, self._address):
            return self._connection.run(script())

    def list(self, method: str, items: str, **fields: Any) -> list[Any]:
        """Return the items of all pages; `items` is their field in a page."""
        from loraplex_client.calls import pages

        request = self._request(method, {"page_size": 1000, **fields})
        with explained(self._server, self._address):
            return self._connection.run(pages(method, request, attrgetter(items)))

    def _request(self, method: str, fields: Mapping[str, Any]) -> Any:
        from google.protobuf.message_factory import GetMessageClass

        return GetMessageClass(self._methods[method].input_type)(**fields)


def cluster_service(router: str, tenant: str, timeout_s: float | None = None) -> Service:
    """Connect to a router's ClusterService. Raises CommandError."""
    return Service("router", router, "cluster.v1.cluster", tenant, timeout_s)


@contextmanager
def store_client(address: str, tenant: str) -> Iterator[StoreClient]:
    """Open a client of the store whose failures are one-line CommandErrors."""
    from loraplex_client import StoreClient

    with explained("store", address), StoreClient(address, tenant) as client:
        yield client


@contextmanager
def explained(service: str, address: str) -> Iterator[None]:
    """Turn a LoraplexError of a call to `service` (router, store) at `address` into a CommandError."""
    from loraplex_client import LoraplexError

    try:
        yield
    except LoraplexError as error:
        raise explain(error, service, address) from error


async def until_interrupt(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result; Ctrl-C cancels it, and raises KeyboardInterrupt where that ends it.

    asyncio.Runner alone waits on where SIGINT comes just before the loop's select, or to another thread: its handler
    runs when select returns, which only a loop's own handler makes it do.
    """
    loop, task, stopped = asyncio.get_running_loop(), asyncio.current_task(), []
    if task is None or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return await coroutine

    def stop() -> None:
        stopped.append(task.cancel())

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        return await coroutine
    except asyncio.CancelledError:
        if stopped:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def explain(error: LoraplexError, service: str, address: str) -> CommandError:
    """Return the CommandError for a failed call to `service` at `address`."""
    import loraplex_client as sdk

    lacks_service = isinstance(error, sdk.NotImplementedByServerError) and _NO_SUCH_METHOD in error.message
    if lacks_service or (isinstance(error, sdk.UnavailableError) and _HTTP_SERVER in error.message):
        return CommandError(
            f"{address} is not a {service}'s address: a server of another kind answers there, such as a "
            f"{_OTHER[service]}; give the {service}'s address with {_FLAGS[service]}"
        )
    if isinstance(error, sdk.UnavailableError) and not error.reason:
        return _no_answer(error, service, address)
    bad_input = (
        sdk.InvalidRequestError,
        sdk.NotFoundError,
        sdk.FailedPreconditionError,
        sdk.NotImplementedByServerError,
        sdk.AlreadyExistsError,
        sdk.UnauthenticatedError,
        sdk.PermissionDeniedError,
    )
    return CommandError(error.message + _next_step(error), 2 if isinstance(error, bad_input) else 1)


def _no_answer(error: UnavailableError, service: str, address: str) -> CommandError:
    cause = error.message.rsplit(": ", 1)[-1].rstrip("]")
    if fault := _tls_fault(address):
        return CommandError(f"no {service} answers at {address}: {fault}")
    if "connect" not in error.message and "resol" not in error.message:
        return CommandError(f"the {service} at {address} went away: {cause}; try again", 1)
    next_step = f"start one with `loraplex up`, or give its address with {_FLAGS[service]}"
    if any("://" in part or ":" not in part for part in address.split(",")):
        next_step = f"{_FLAGS[service]} takes HOST:PORT, such as {_USUAL[service]}"
    return CommandError(f"no {service} answers at {address} ({cause}); {next_step}")


def _tls_fault(address: str) -> str:
    """Return why TLS keeps the command, with its credentials, from one address; empty: it does not."""
    from loraplex.runtime.rpc.probe import tls_fault
    from loraplex_client.endpoint import SYSTEM_CA, credentials_of

    if (tls := credentials_of(None, None).tls) is None:
        return tls_fault(address, None)
    ca = ssl.get_default_verify_paths().cafile if tls.ca == SYSTEM_CA else str(tls.ca)
    return tls_fault(address, ca, *(str(file) if file else None for file in (tls.cert, tls.key)))


def _next_step(error: LoraplexError) -> str:
    from loraplex_client import NotFoundError, PermissionDeniedError, ResourceExhaustedError, UnavailableError

    match error:
        case PermissionDeniedError() if _OPERATOR_AT_PUBLIC_PORT in error.message:
            return "; give the address of its operators' port"
        case NotFoundError(kind="adapter" | "revision" | "alias"):
            return "; `loraplex adapters list` lists the adapters"
        case NotFoundError(kind="model" | "base_model" | "base model"):
            return "; `loraplex models list` shows what is registered, `loraplex models push` registers one"
        case UnavailableError(retry_after_s=after) | ResourceExhaustedError(retry_after_s=after) if after:
            return f"; try again in {after:.1f} s"
    return ""
