"""Ports for programs that cannot let the system choose one, or must keep theirs over a restart."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

# Below those that Linux gives to connections, one of which could take a port before its server opens it.
_PORTS = range(12_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Return ports that are free now. They are drawn, because other test processes look for some at the same time."""
    draw, found = random.SystemRandom(), list[int]()
    with ExitStack() as held:
        while len(found) < count:
            port = draw.choice(_PORTS)
            with suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return found


def free_port() -> int:
    """Return a port that is free now."""
    return free_ports(1)[0]
