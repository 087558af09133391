"""An HTTP server with a few threads, which clients that send nothing hold for a moment only."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

# Number of threads, maximum number of connections, and time in seconds that one has for its request and the answer.
THREADS = 4
CONNECTIONS = 64
REQUEST_S = 2.0


class QuietHandler(WSGIRequestHandler):
    """Serves a request without a line on stderr."""

    timeout = REQUEST_S

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


class PooledServer(WSGIServer):
    """Serves at most CONNECTIONS at a time; further ones are closed."""

    request_queue_size = CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler], family: int) -> None:
        self.address_family = family
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="metrics")
        # Time of the monotonic clock in seconds at which each open connection is closed.
        self._open: dict[socket.socket, float] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """See BaseServer; called for each connection."""
        if len(self._open) >= CONNECTIONS:
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic() + REQUEST_S * (1 + len(self._open) // THREADS)
        self._threads.submit(self._serve, request, client_address)

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            with suppress(OSError):  # the client has left
                self.finish_request(request, client_address)
        finally:
            self._open.pop(request, None)
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections whose time has passed; called twice a second."""
        now = time.monotonic()
        for request, until in list(self._open.items()):
            if now > until:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """See BaseServer: nothing is logged of a client that breaks off."""

    def server_close(self) -> None:
        """Stop listening, and end the threads."""
        super().server_close()
        for request in list(self._open):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown(wait=True, cancel_futures=True)
