"""The metrics of a gateway. docs/reference/metrics.md explains them; a test compares it with this file."""

from __future__ import annotations

from telemetry.metrics import LONG_S, Meters


class GatewayMetrics(Meters):
    """The metrics of one gateway. `path` is a path that it serves, or `other`."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self.counter("http_requests", "HTTP requests that ended, by status.", ("path", "status"))
        self.seconds = self.histogram("http_request_seconds", "From a request to its end.", LONG_S, ("path",))
        self.open = self.gauge("http_requests_open", "Requests that run now.", ("path",))
        self.connections = self.gauge("http_connections", "Open connections.")
        self.closed = self.counter("http_connections_closed", "Connections closed for their client's fault.", ("why",))
        self.continued = self.counter("http_answers_continued", "Answers that went on elsewhere after a loss.")
