"""The users of Redis: one for routers, one for workers, one for operators, each with what it needs and no more.

Redis checks what a function does against the user who calls it: so a user has the commands of its functions too, which
are read from the Lua files. A list of its own are the keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import ResponseError

from broker.functions import load
from broker.scripts import SCRIPTS

_CALL = re.compile(r"redis\.p?call\('([A-Z]+)'")
_CELL, _MODEL = "CELL", "MODEL"
# Commands that the client library sends when it connects, or to find the nodes of a Redis Cluster.
_CONNECTING = ("ping", "select", "info", "cluster|slots", "cluster|shards", "command")


@dataclass(frozen=True, slots=True)
class Role:
    """A user: scripts and commands that it calls; patterns of the keys that it writes, and of others that it reads."""

    scripts: tuple[str, ...]
    commands: tuple[str, ...]
    keys: tuple[str, ...] = ()
    read_keys: tuple[str, ...] = ()


def _of_model(*names: str) -> tuple[str, ...]:
    return tuple(f"lp:{{{_MODEL}/{_CELL}}}:{name}" for name in names)


ROLES: Mapping[str, Role] = {
    "router": Role(
        scripts=(
            "enqueue",
            "finish",
            "look_up",
            "renew_job",
            "census",
            "live_routers",
            "forget_tenant",
            "send_command",
            "record_death",
            "dead_push",
            "resume_keys",
            "set_aside",
            "renew_pin",
            *("ledger_reserve", "ledger_tell"),
        ),
        # Commands of no script: for waiting jobs, dead letters, pins, usage events and the removal of a tenant's data.
        commands=(
            *("zcard", "lrange", "hset", "hgetall", "hdel", "function|load"),
            *("xgroup|create", "xreadgroup", "xautoclaim", "xack", "xdel"),
        ),
        keys=(f"lp:{{*/{_CELL}}}:*", "lp:{ledger}:*", "lp:{resume}:*"),
    ),
    "worker": Role(
        scripts=("claim", "charge", "beat", "declare_dead", "stop_claiming", "stop_waiting"),
        # Commands of no script: for wake-ups, operators' commands and pins.
        commands=("blpop", "hgetall"),
        keys=_of_model(
            *("job:*", "waiting", "queue:*", "again", "tenants", "idle", "floor", "uses", "totals", "charged"),
            *("wake", "wake:*", "passed_on", "rooms", "suspects", "worker:*", "workers", "commands:*"),
        ),
        read_keys=_of_model("routers", "quarantine", "arrivals", "news", "pins"),
    ),
    # Can make itself any user by setting users: as strong as the server's own.
    "operator": Role(
        scripts=(),
        commands=(
            *("acl|setuser", "acl|save", "acl|list", "acl|log", "acl|whoami", "acl|getuser"),
            *("function|load", "function|list", "function|delete", "config|get", "slowlog|get", "client|list"),
            *("dbsize", "scan", "type", "ttl", "memory|usage", "zcard", "zrange", "zscore", "hgetall", "hlen"),
            *("lrange", "llen", "xlen"),
        ),
        read_keys=(f"lp:{{*/{_CELL}}}:*", "lp:{ledger}:*"),
    ),
}


def rules(user: str, models: Sequence[str], cell: str, passwords: Sequence[str]) -> list[str]:
    """Return the rules of a user, as ACL SETUSER and ACL files take them; passwords only as hashes."""
    role = ROLES[user]
    hashes = [f"#{sha256(password.encode()).hexdigest()}" for password in passwords]
    writes = [f"~{pattern}" for key in role.keys for pattern in _patterns(key, models, cell)]
    reads = [f"%R~{pattern}" for key in role.read_keys for pattern in _patterns(key, models, cell)]
    commands = [f"+{command}" for command in commands_of(role)]
    return ["on", *hashes, "resetchannels", *writes, *reads, "-@all", *commands]


def commands_of(role: Role) -> list[str]:
    """Return the commands that a role needs, in lower case."""
    called = {command.lower() for name in role.scripts for command in _CALL.findall(SCRIPTS.assemble(name))}
    return sorted(called | set(role.commands) | set(_CONNECTING) | ({"fcall"} if role.scripts else set()))


def acl_file(models: Sequence[str], cell: str, passwords: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of an ACL file with all users, but for the default one."""
    return [f"user {user} {' '.join(rules(user, models, cell, passwords[user]))}" for user in ROLES]


async def set_users(redis: Redis, models: Sequence[str], cell: str, passwords: Mapping[str, Sequence[str]]) -> bool:
    """Set all users, turn the default one off, and load the functions; needs a user that may do so.

    Returns whether the server keeps its users over a restart. Raises an error of broker.connection.REDIS_DOWN.
    """
    for user in ROLES:
        await _run(redis, "ACL SETUSER", user, "reset", *rules(user, models, cell, passwords[user]))
    await load(redis, SCRIPTS.library)
    await _run(redis, "ACL SETUSER", "default", "off")
    try:
        await _run(redis, "ACL SAVE")
    except ResponseError:  # it has no ACL file
        return False
    return True


async def _run(redis: Redis, *command: str) -> None:
    """Run a command on all nodes."""
    nodes: dict[str, Any] = {"target_nodes": RedisCluster.ALL_NODES} if isinstance(redis, RedisCluster) else {}
    await redis.execute_command(*command, **nodes)  # type: ignore[no-untyped-call]  # theirs


def _patterns(key: str, models: Sequence[str], cell: str) -> list[str]:
    named = [key.replace(_MODEL, model) for model in models] if _MODEL in key else [key]
    return [pattern.replace(_CELL, cell) for pattern in named]
