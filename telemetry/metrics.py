"""Prometheus metrics: how a process declares them, keeps their labels bounded, and serves them.

What is measured stands with the process that measures it (router/metrics.py, worker/io/metrics.py, ...),
and for people in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)

PREFIX = "loraplex"
# Of a setting `metrics_port`.
NO_METRICS = -1
PORT_HELP = f"the port of the Prometheus metrics; 0: the system chooses; {NO_METRICS}: none"
# So many tenants, and so many adapters, have a time series of their own; those that come later share one.
NAMES = 1_000
OTHER = "other"

# Seconds: what a step, a claim or a gap takes; what a request takes.
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
TOKENS = tuple(float(2**power) for power in range(18))

# Else every series has a second one that tells when it began.
disable_created_metrics()  # type: ignore[no-untyped-call]


class MetricsPortError(Exception):
    """The metrics can't be served; one line."""


class Meters:
    """Declares metrics, each under the project's prefix, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # What the process's ready line says of them: where they are served.
        self.ready_word = ""

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """A count, served as `loraplex_{name}_total`."""
        return Counter(name, text, labels, namespace=PREFIX, registry=self.registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        """A value that rises and falls."""
        return Gauge(name, text, labels, namespace=PREFIX, registry=self.registry)

    def histogram(self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        """How often values came up to each of `buckets`."""
        return Histogram(name, text, labels, namespace=PREFIX, registry=self.registry, buckets=buckets)

    def rpc_calls(self) -> tuple[Counter, Histogram]:
        """Of a gRPC server: how its calls ended, and how long they took."""
        ended = self.counter("rpc_requests", "gRPC calls that ended.", ("method", "code"))
        return ended, self.histogram("rpc_seconds", "From a gRPC call to its end.", LONG_S, ("method",))


class BoundedNames:
    """Names that come from outside, as label values: the first `limit` as they are, then `other` for those to come."""

    def __init__(self, limit: int = NAMES) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def bounded(self, name: str) -> str:
        """The name, or OTHER."""
        if name not in self._known:
            if len(self._known) >= self._limit:
                return OTHER
            self._known.add(name)
        return name


class MetricsServer:
    """Serves `/metrics` over HTTP from a thread of its own, which costs nothing until somebody asks."""

    def __init__(self, meters: Meters, host: str, port: int) -> None:
        """Listen on host:port, 0 for a port that the system chooses. Raises MetricsPortError."""
        ProcessCollector(registry=meters.registry)
        try:
            self._server, self._thread = start_http_server(port, addr=host.strip("[]"), registry=meters.registry)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise MetricsPortError(f"--metrics-port: cannot listen on {host}:{port}: {why}") from error
        meters.ready_word = f" metrics={host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(meters: Meters, host: str, port: int) -> MetricsServer | None:
    """Serve them, unless the port says that nobody wants them. Raises MetricsPortError."""
    return None if port == NO_METRICS else MetricsServer(meters, host, port)
