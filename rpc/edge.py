"""Limits of a gRPC server's connections, as Envoy advises for servers at the edge of a network.

https://www.envoyproxy.io/docs/envoy/latest/configuration/best_practices/edge
"""

from __future__ import annotations

import resource
from typing import Any

# Maximum number of connections, where the process may open as many files; and maximum of files that it asks for.
_CONNECTIONS = 10_000
_FILES = 65_536
# Maximum number of calls of one connection at a time, and of its streams. gRPC ends calls beyond the latter without a
# reason, so that it is larger, for bursts. A stream of which nothing is served yet takes some 20 kB.
CALLS = 1_024
_STREAMS = 4 * CALLS
# Timeout in ms for a new connection's handshake, and time in ms after which one without a call is closed.
_HANDSHAKE_MS = 10_000
_IDLE_MS = 3_600_000
# Time in ms after which a connection takes no new calls, and its client makes another one: certificates are checked at
# the handshake, and those of an authority that was removed would otherwise be good for as long as they like.
AGE_MS = 3_600_000
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
        # send. Without it long messages take more round trips: docs/guides/operating.md, Distant clients.
        ("grpc.http2.bdp_probe", 0),
    ]


def raise_file_limit() -> int:
    """Raise the process's own limit of open files as far as it may; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _FILES if soft == resource.RLIM_INFINITY else soft
