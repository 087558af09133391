"""The users of Redis: one for routers, one for workers, one for operators, each with what it needs and no more.

Redis checks what a function does against the user who calls it: so a user has the commands of its functions too.

Passwords are in files that only their owner may read: NAME/password, the former password below it. Each file has a
folder of its own, because a container that mounts a file does not see the one that replaces it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import ResponseError

from loraplex.contracts.broker.functions import LIBRARY, load

Passwords = Mapping[str, Sequence[str]]

# The default user signs nobody in, but keeps all rights: Redis 7.0 reads its append-only file as that user, and drops
# each write of a function or transaction that the user may not make.
DEFAULT_USER = ("default", "off", "~*", "&*", "+@all")

# Random bytes of a password: nobody can guess it, so that the server may keep it as a plain hash.
_PASSWORD_BYTES = 32
_CELL, _MODEL = "CELL", "MODEL"
# Commands that the client library sends when it connects, or to find the nodes of a Redis Cluster.
_CONNECTING = ("ping", "select", "info", "cluster|slots", "cluster|shards", "command")


@dataclass(frozen=True, slots=True)
class RedisUser:
    """A user of Redis: its commands, including its functions', and patterns of writable and readable keys."""

    commands: tuple[str, ...]
    keys: tuple[str, ...] = ()
    read_keys: tuple[str, ...] = ()


def _of_model(*names: str) -> tuple[str, ...]:
    return tuple(f"lp:{{{_MODEL}/{_CELL}}}:{name}" for name in names)


ROLES: Mapping[str, RedisUser] = {
    "router": RedisUser(
        commands=(
            *("fcall", "function|load", "time", "exists", "del", "pexpire"),
            *("get", "getrange", "mget", "set", "incr"),
            *("hget", "hmget", "hgetall", "hkeys", "hexists", "hlen", "hrandfield", "hset", "hdel"),
            *("lindex", "lrange", "lpush", "lpop", "rpush", "lset", "lrem", "ltrim"),
            *("sadd", "scard", "srandmember", "srem"),
            *("zadd", "zcard", "zlexcount", "zmscore", "zrandmember", "zrange", "zrangebyscore", "zrem"),
            *("zremrangebyscore", "zrevrange", "zscore"),
            *("xadd", "xgroup|create", "xreadgroup", "xautoclaim", "xclaim", "xack", "xdel", "xlen"),
        ),
        keys=(f"lp:{{*/{_CELL}}}:*", "lp:{ledger}:*", "lp:{resume}:*", "lp:{cells}:*"),
    ),
    "worker": RedisUser(
        commands=(
            *("fcall", "time", "exists", "del", "pexpire", "pttl", "get", "mget", "set", "incr"),
            *("hget", "hmget", "hgetall", "hlen", "hset", "hsetnx", "hdel"),
            *("blpop", "lrange", "lpush", "lpop"),
            *("zadd", "zcard", "zmscore", "zrange", "zrangebyscore", "zrem", "zscore"),
        ),
        keys=_of_model(
            *("job:*", "waiting", "queue:*", "again", "tenants", "idle", "floor", "uses", "totals", "charged"),
            *("wake", "wake:*", "passed_on", "claimed_work", "rooms", "suspects"),
            *("worker:*", "workers", "cards", "commands:*"),
        ),
        read_keys=_of_model("routers", "quarantine", "arrivals", "news", "pins"),
    ),
    # Can make itself any user by setting users: as strong as the server's own.
    "operator": RedisUser(
        commands=(
            *("acl|setuser", "acl|save", "acl|list", "acl|log", "acl|whoami", "acl|getuser"),
            *("function|load", "function|list", "function|delete", "config|get", "slowlog|get", "client|list"),
            *("dbsize", "scan", "type", "ttl", "memory|usage", "zcard", "zrange", "zscore", "hgetall", "hlen"),
            *("lrange", "llen", "xlen"),
        ),
        read_keys=(f"lp:{{*/{_CELL}}}:*", "lp:{ledger}:*", "lp:{cells}:*"),
    ),
}


def rules(user: str, models: Sequence[str], cells: Sequence[str], passwords: Sequence[str]) -> list[str]:
    """Return the rules of a user, as ACL SETUSER and ACL files take them; passwords only as hashes."""
    role = ROLES[user]
    hashes = [f"#{sha256(password.encode()).hexdigest()}" for password in passwords]
    writes = [f"~{pattern}" for key in role.keys for pattern in _patterns(key, models, cells)]
    reads = [f"%R~{pattern}" for key in role.read_keys for pattern in _patterns(key, models, cells)]
    commands = [f"+{command}" for command in commands_of(role)]
    return ["on", *hashes, "resetchannels", *writes, *reads, "-@all", *commands]


def commands_of(role: RedisUser) -> list[str]:
    """Return the commands that a role needs, in lower case."""
    return sorted({*role.commands, *_CONNECTING})


def acl_file(models: Sequence[str], cells: Sequence[str], passwords: Passwords) -> list[str]:
    """Return the lines of an ACL file with all users, but for the default one."""
    return [f"user {user} {' '.join(rules(user, models, cells, passwords[user]))}" for user in ROLES]


async def set_users(redis: Redis, models: Sequence[str], cells: Sequence[str], passwords: Passwords) -> bool:
    """Set all users, turn the default one off, and load the functions; needs a user that may do so.

    Returns whether the server keeps its users over a restart. Raises an error of broker.connection.REDIS_DOWN.
    """
    for user in ROLES:
        await _run(redis, "ACL SETUSER", user, "reset", *rules(user, models, cells, passwords[user]))
    await load(redis, LIBRARY)
    await _run(redis, "ACL SETUSER", *DEFAULT_USER)
    try:
        await _run(redis, "ACL SAVE")
    except ResponseError:  # it has no ACL file
        return False
    return True


async def _run(redis: Redis, *command: str) -> None:
    """Run a command on all nodes."""
    nodes: dict[str, Any] = {"target_nodes": RedisCluster.ALL_NODES} if isinstance(redis, RedisCluster) else {}
    await redis.execute_command(*command, **nodes)  # type: ignore[no-untyped-call]  # theirs


def _patterns(key: str, models: Sequence[str], cells: Sequence[str]) -> list[str]:
    named = [key.replace(_MODEL, model) for model in models] if _MODEL in key else [key]
    return [pattern.replace(_CELL, cell) for pattern in named for cell in (cells if _CELL in pattern else [""])]


def password_path(directory: Path, user: str) -> Path:
    """Return the file of a user's password."""
    return directory / user / "password"


def read_passwords(directory: Path, users: Sequence[str]) -> dict[str, list[str]]:
    """Return the users' valid passwords, the present one first; those without a file get a new one."""
    passwords: dict[str, list[str]] = {}
    for user in users:
        path = password_path(directory, user)
        passwords[user] = path.read_text().split() if path.exists() else [_new_password()]
    return passwords


def rotated(passwords: Passwords) -> dict[str, list[str]]:
    """Return a new password of each user, and its present one, which stays valid until the next rotation."""
    return {user: [_new_password(), *present[:1]] for user, present in passwords.items()}


def write_passwords(directory: Path, passwords: Passwords) -> None:
    """Write the files, each as a whole. Raises OSError."""
    for user, lines in passwords.items():
        path = password_path(directory, user)
        for folder in (directory, path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write("".join(f"{line}\n" for line in lines))
        part.replace(path)


def _new_password() -> str:
    return secrets.token_urlsafe(_PASSWORD_BYTES)
