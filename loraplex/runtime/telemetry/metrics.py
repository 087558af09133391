"""Prometheus metrics: how a process declares them, keeps their labels bounded, and serves them.

What is measured stands with the process that measures it (router/metrics.py, worker/io/metrics.py, ...),
and for people in docs/reference/metrics.md.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from collections import Counter as Counts
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.exposition import ThreadingWSGIServer

from loraplex.runtime.interpreter import StartError

PREFIX = "loraplex"
# The help text of a setting `metrics_port`.
NO_METRICS = -1
PORT_HELP = f"port of the Prometheus metrics; 0: any free port; {NO_METRICS}: none"
# Maximum number of tenants, and of adapters, with a time series of their own; later ones share `other`.
NAMES = 1_000
OTHER = "other"

# Bounds in seconds of histograms: for a step, a claim or a gap between tokens; for a request.
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
TOKENS = tuple(float(2**power) for power in range(18))

# Without this every series has a second one with its start time.
disable_created_metrics()  # type: ignore[no-untyped-call]


class MetricsPortError(StartError):
    """Metrics cannot be served; the message is one line."""


# Timeout in seconds for an answer of a process's event loop, after which /livez says that it hangs.
LOOP_S = 5.0


class Health:
    """Says at /livez, /readyz and /startupz of the metrics' port how a process is; its event loop sets it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = self._stopping = False
        self._why_not = "starts"

    def set(self, why_not: str = "") -> None:
        """Set why requests cannot be served now; empty: they can."""
        self._loop = asyncio.get_running_loop()
        self._started = self._started or not why_not
        self._why_not = why_not

    def listens(self) -> None:
        """Say that the start is done, though requests may not be served yet."""
        self._loop, self._started = asyncio.get_running_loop(), True

    def stop(self) -> None:
        """Say from now on that requests cannot be served."""
        self._stopping = True

    def why_not(self, path: str) -> str:
        """Return why the answer of a path is no; empty: it is yes. Call it in another thread than the loop's."""
        if path == "/startupz":
            return "" if self._started else self._why_not
        if path == "/readyz":
            return "stops" if self._stopping else self._why_not
        loop, answered = self._loop, Future[None]()
        if loop is None:  # it starts
            return ""
        try:
            loop.call_soon_threadsafe(answered.set_result, None)
            answered.result(LOOP_S)
        except TimeoutError:
            return f"the event loop has not answered for {LOOP_S:g} s"
        except RuntimeError:  # it has ended, and the process is about to
            pass
        return ""


class Meters:
    """Declares metrics under the project's prefix, in a registry of the process's own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # The metrics' address, and others that follow it, as words of the process's ready line.
        self.ready_word = ""
        self.health = Health()
        # 0 for a process without a certificate.
        self.certificate_end = self.gauge(
            "certificate_end_timestamp_seconds",
            "When the process's certificate, or one that signed it, ends, in seconds since 1970.",
        )

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """Declare a counter, served as `loraplex_{name}_total`."""
        return Counter(name, text, labels, namespace=PREFIX, registry=self.registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        """Declare a gauge, a value that rises and falls."""
        return Gauge(name, text, labels, namespace=PREFIX, registry=self.registry)

    def histogram(self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        """Declare a histogram: how many values are at most each of `buckets`."""
        return Histogram(name, text, labels, namespace=PREFIX, registry=self.registry, buckets=buckets)

    def rpc_calls(self) -> tuple[Counter, Histogram]:
        """Declare a gRPC server's metrics: how its calls ended, and how long they took."""
        ended = self.counter("rpc_requests", "gRPC calls that ended.", ("method", "code"))
        return ended, self.histogram("rpc_seconds", "From a gRPC call to its end.", LONG_S, ("method",))

    def refused_callers(self) -> Counter:
        """Declare the count of the calls that a gRPC server's guard refused."""
        return self.counter("rpc_callers_refused", "Calls refused for their credential, role or scope.", ("reason",))


class BoundedNames:
    """Bounds a label whose values come from outside: the first `limit` values stay, later ones become `other`."""

    def __init__(self, limit: int = NAMES) -> None:
        self._limit = limit
        self._values: set[str] = set()

    def bounded(self, name: str) -> str:
        """Return the label value of a name: the name itself, or OTHER."""
        if name not in self._values:
            if len(self._values) >= self._limit:
                return OTHER
            self._values.add(name)
        return name


# Maximum number of connections, and timeout in seconds for each piece of a request and for a whole one, which may hold
# a large answer or wait for LOOP_S: anybody may connect to a gateway's.
CONNECTIONS = 64
PIECE_S, WHOLE_S = 2.0, 10.0


class QuietHandler(WSGIRequestHandler):
    """Serves a request without a line on stderr."""

    timeout = PIECE_S

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


class BoundedServer(ThreadingWSGIServer):
    """Serves at most CONNECTIONS at a time, each in a thread; a further one takes the place of the oldest.

    That is the oldest one of the address that has most, so that Kubernetes' probes and a scrape find a place beside
    connections that send half a request.
    """

    # Maximum number of connections that wait to be accepted. With socketserver's 5, a burst waits a second and more,
    # until its SYNs are sent again.
    request_queue_size = CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler], family: int) -> None:
        self.address_family = family
        # Open connections with their hosts and the times of `time.monotonic` at which they end; the oldest come first.
        self._open: dict[socket.socket, tuple[str, float]] = {}
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """See BaseServer; called for each connection."""
        with self._lock:
            if len(self._open) >= CONNECTIONS:
                hosts = Counts(host for host, _ in self._open.values())
                host = max(hosts, key=hosts.__getitem__)
                self._end(next(each for each in self._open if self._open[each][0] == host))
            self._open[request] = client_address[0], time.monotonic() + WHOLE_S
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """See BaseServer; called about twice a second."""
        with self._lock:
            now = time.monotonic()
            while self._open and (first := next(iter(self._open.items())))[1][1] < now:
                self._end(first[0])

    def _end(self, request: socket.socket) -> None:
        """End a connection, whose thread closes it."""
        del self._open[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """See BaseServer; called at the end of each connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """See BaseServer: nothing is logged of a client that breaks off."""


class MetricsServer:
    """Serves `/metrics` over HTTP, and the paths of Health."""

    def __init__(self, meters: Meters, host: str, port: int) -> None:
        """Listen on host:port, 0 for a port that the system chooses. Raises MetricsPortError."""
        ProcessCollector(registry=meters.registry)
        try:
            self._server = _listen(host.strip("[]"), port, meters)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise MetricsPortError(f"--metrics-port: cannot listen on {host}:{port}: {why}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        meters.ready_word = f" metrics={host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class OwnHosts:
    """WSGI application that serves another one to requests for this machine alone.

    A page of another site, in a browser of this machine, reaches loopback under a name of its own that means 127.0.0.1.
    """

    def __init__(self, application: Any) -> None:
        self._application = application

    def __call__(self, environ: Any, start_response: Any) -> Any:
        """Serve a request."""
        host = environ.get("HTTP_HOST", "localhost")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name.lower() == "localhost" or is_address(name):
            return self._application(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"host: not a name of this machine\n"]


def is_address(host: str, *, of_loopback: bool = False) -> bool:
    """Return whether a host is an IP address; `of_loopback`: one that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback or not of_loopback
    except ValueError:
        return False


def _application(meters: Meters) -> Any:
    """Return the WSGI application of a process's metrics and health."""
    metrics = make_wsgi_app(meters.registry)

    def application(environ: Any, start_response: Any) -> Any:
        path = environ.get("PATH_INFO", "")
        if path not in {"/livez", "/readyz", "/startupz"}:
            return metrics(environ, start_response)
        why_not = meters.health.why_not(path)
        status = "503 Service Unavailable" if why_not else "200 OK"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")])
        return [f"{why_not or 'ok'}\n".encode()]

    return application


def _listen(host: str, port: int, meters: Meters) -> BoundedServer:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    server = BoundedServer((host, port), QuietHandler, family)
    application = _application(meters)
    local = host == "localhost" or is_address(host, of_loopback=True)
    server.set_app(OwnHosts(application) if local else application)
    return server


def serve_metrics(meters: Meters, host: str, port: int) -> MetricsServer | None:
    """Serve metrics, unless the port turns them off. Raises MetricsPortError."""
    return None if port == NO_METRICS else MetricsServer(meters, host, port)
