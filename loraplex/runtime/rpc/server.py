"""Starting and stopping a gRPC server: options, binding, health, drain.

grpc.health.v1 answers for the empty name and for each service's: NOT_SERVING until the process says that it is ready.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from loraplex.runtime.interpreter import StartError
from loraplex.runtime.rpc.interceptors import CallGuard, Context, ReadableMessages, StatusInterceptor
from loraplex.runtime.rpc.receiving import OneMessage

# Maximum number of connections, where the process may open as many files; and maximum of files that it asks for.
_CONNECTIONS = 10_000
_FILES = 65_536
# Maximum number of calls of one connection at a time, beyond which clients wait. One of which nothing is served yet
# takes some 20 kB.
_STREAMS = 4_096
# Timeout in ms for a new connection's handshake, and time in ms after which one without a call is closed.
_HANDSHAKE_MS = 10_000
_IDLE_MS = 3_600_000
# Time in ms after which a connection takes no new calls, and its client makes another one, for which it resolves the
# name again: so calls reach servers that were added to it. Certificates are checked at the handshake as well, and those
# of an authority that was removed would otherwise be good for as long as they like.
AGE_MS = 60_000
# Time in ms that the calls of such a connection get to end. It is the bound of calls whose clients read nothing: gRPC
# has no way to end one of these alone.
GRACE_MS = 3_600_000


def edge_options(connections: int | None = None) -> list[tuple[str, Any]]:
    """Return the options of a server that many clients reach. Connections leave half of all files to other uses."""
    return [
        ("grpc.max_allowed_incoming_connections", connections or min(_CONNECTIONS, raise_file_limit() // 2)),
        ("grpc.max_concurrent_streams", _STREAMS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.max_connection_age_ms", AGE_MS),
        ("grpc.max_connection_age_grace_ms", GRACE_MS),
        # With this estimate of bandwidth a call takes megabytes that nobody has asked for, as much as its client can
        # send. Without it long messages take more round trips: docs/guides/quotas.md, Distant clients.
        ("grpc.http2.bdp_probe", 0),
    ]


def raise_file_limit() -> int:
    """Raise the process's own limit of open files as far as it may; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        return target
    return _FILES if soft == resource.RLIM_INFINITY else soft


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # its package has no types
    """grpc.health.v1.Health.

    gRPC's own package has one too. There a change of the health waits for each client that watches it, and one that
    reads nothing holds up the start, the drain and the end of the process.
    """

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        # Set at the next change, and then replaced.
        self._changed = asyncio.Event()
        self._stopping = False

    def set(self, service: str, *, serving: bool) -> None:
        """Set the health of a service; after `stop` it stays as it is."""
        if not self._stopping:
            self._serving[service] = serving
            self._tell()

    def stop(self) -> None:
        """Say of all services from now on that they do not serve."""
        self._stopping = True
        self._serving = dict.fromkeys(self._serving, False)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """Return the health of a service."""
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yield the health of a service whenever it changes."""
        sent = None
        while True:
            status = self._status(request.service)
            if status == sent:
                await self._changed.wait()
            else:
                yield health_pb2.HealthCheckResponse(status=status)
                sent = status

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        statuses = health_pb2.HealthCheckResponse
        if service not in self._serving:
            return statuses.SERVICE_UNKNOWN
        return statuses.SERVING if self._serving[service] else statuses.NOT_SERVING


# gRPC's server reads each message in the thread that polls, instead of handing it on among four of its own. That takes
# a quarter less processor time for a message (135 us from 178, with 100 streams). gRPC reads it when it makes its first
# channel or server; an operator's own value stays.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")

# Maximum message of a client.
MESSAGE_BYTES = 4 * 1024 * 1024
# Maximum message between a worker and a router: all tokens of one step, with a long prompt's log probabilities.
RELAY_MESSAGE_BYTES = 256 * 1024 * 1024

# Client and server must agree on keepalive, or the server answers GOAWAY too_many_pings.
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
# Keepalive of the relay: both ends must notice a broken connection before the clients do.
RELAY_KEEPALIVE_MS = 1_000
RELAY_KEEPALIVE_TIMEOUT_MS = 2_000


def channel_options(message_bytes: int = MESSAGE_BYTES) -> list[tuple[str, Any]]:
    """Return the options of public servers and of channels to them, with messages of up to so many bytes."""
    return _options(message_bytes, KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS)


def relay_options() -> list[tuple[str, Any]]:
    """Return the options of the links between workers and routers: an end that is silent for 3 s counts as gone."""
    # Unlike clients, workers may send ahead, as much as the connection takes, and on a link that never ends.
    links = [("grpc.http2.bdp_probe", 1), ("grpc.max_connection_age_ms", _UNBOUNDED)]
    return [*_options(RELAY_MESSAGE_BYTES, RELAY_KEEPALIVE_MS, RELAY_KEEPALIVE_TIMEOUT_MS), *links]


def _options(message_bytes: int, keepalive_ms: int, timeout_ms: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # This timeout is what ends the connection: keepalive_timeout_ms alone was seen not to.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
    ]


# Maximum of a gRPC option.
_UNBOUNDED = (1 << 31) - 1
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    # Calls that wait to be accepted: by default gRPC cancels some beyond 1,000, all beyond 3,000 and any after 30 s,
    # without a reason and whoever calls. They are accepted instead, and refused where there is no room for them.
    ("grpc.server.max_pending_requests", _UNBOUNDED),
    ("grpc.server.max_pending_requests_hard_limit", _UNBOUNDED),
    # In seconds.
    ("grpc.server_max_unrequested_time_in_server", 3_600),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", RELAY_KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
]


class PortInUse(StartError):
    """An address that can't be bound."""


class Services:
    """The services of a server, as generated code adds them; `methods` are their full names.

    They are added as generic ones, and not as registered ones too: a registered method has a queue of its own for calls
    that wait to be accepted, and each makes every accept dearer. Health alone has one, so that it is seen during
    a burst.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.methods: set[str] = set()
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """Note the names of a service's methods, whose generic handler generated code adds before."""
        self.methods |= {f"/{service_name}/{method}" for method in method_handlers}


class Server:
    """A grpc.aio server with the project's options and a health service.

    The `guard` decides who may call which method; without one, the server serves its health alone. `outer` interceptors
    see calls before the guard, `interceptors` see those that it has admitted. `connections`: a limit other than the
    usual one. `shared_ports`: other processes of this user may listen on the same ports, if they share them too.
    """

    def __init__(
        self,
        guard: CallGuard | None = None,
        *,
        outer: Sequence[grpc.aio.ServerInterceptor] = (),
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        options: Sequence[tuple[str, Any]] | None = None,
        connections: int | None = None,
        shared_ports: bool = False,
    ) -> None:
        self._guard = guard
        # The status interceptor is outermost, so that it also sees what the others raise.
        edge = {**dict(edge_options(connections)), **dict(channel_options() if options is None else options)}
        self._messages = OneMessage(edge["grpc.max_receive_message_length"])
        behind = self._messages, *interceptors, ReadableMessages()
        self._grpc = grpc.aio.server(
            options=[*edge.items(), *_SERVER_OPTIONS, ("grpc.so_reuseport", int(shared_ports))],
            interceptors=[StatusInterceptor(), *outer, *([guard] if guard else []), *behind],
        )
        self._health = HealthService()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        # Generated code adds services to this. Health alone is added to gRPC's own server: see Services.
        self.services: Any = Services(self._grpc)
        # Called with what `set_serving` sets.
        self.on_serving: Callable[[bool], None] = lambda serving: None

    def bind(self, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listen on host:port, 0 for a port that the system chooses; return the port. Raises PortInUse."""
        try:
            if credentials is None:
                bound = self._grpc.add_insecure_port(f"{host}:{port}")
            else:
                bound = self._grpc.add_secure_port(f"{host}:{port}", credentials)
        except RuntimeError as error:
            raise PortInUse(f"cannot listen on {host}:{port}: the port is in use or the host is not ours") from error
        if bound == 0:
            raise PortInUse(f"cannot listen on {host}:{port}: the port is in use or the host is not ours")
        return bound

    def add_reflection(self) -> None:
        """Serve server reflection of the services that were added so far."""
        from grpc_reflection.v1alpha import reflection

        names = {method.split("/")[1] for method in self.services.methods}
        reflection.enable_server_reflection([*sorted(names), health.SERVICE_NAME, reflection.SERVICE_NAME], self._grpc)

    async def start(self) -> None:
        """Serve; health says NOT_SERVING until `set_serving(True)`.

        Raises UndeclaredMethodError for a method without a row in the permissions table.
        """
        if self._guard is not None:
            self._guard.check_declared(self.services.methods)
        elif self.services.methods:
            raise ValueError("a server of more than its health needs a guard")
        await self.set_serving(False)
        await self._grpc.start()

    async def set_serving(self, serving: bool) -> None:
        """Set what the health service answers from now on, for the process and for each of its services."""
        for name in ("", *{method.split("/")[1] for method in self.services.methods}):
            self._health.set(name, serving=serving)
        self.on_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones end for `grace_s`, then cancel them."""
        self._health.stop()
        await self._grpc.stop(grace_s)


def stop_signal(*, second_ends: bool = True) -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; the second ends the process. Call it inside the loop.

    Without `second_ends` the second changes nothing.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def stop() -> None:
        event.set()
        for number in numbers if second_ends else ():
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        loop.add_signal_handler(number, stop)
    return event
