"""The ledger over a simulated server: the shipped Lua functions, run by an interpreter over Python's data."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import Mock

import msgspec
from lupa.lua51 import LuaRuntime, lua_type  # type: ignore[import-untyped]  # has no types
from redis.exceptions import ConnectionError as RedisConnectionError

from broker.keys import LEDGER, key_account
from broker.ledger import Ledger, SendReserve
from broker.scripts import SCRIPTS
from broker.terms import HELD_MS
from router.quotas.usage import WRITE_S, Facts
from tests.simulation.loop import NODE, Node

if TYPE_CHECKING:
    from tests.simulation.redis import SimulatedRedis


@cache
def _interpreter() -> tuple[LuaRuntime, dict[str, Any]]:
    """Return an interpreter, and the functions that the library registers in it, by name."""
    lua, functions = LuaRuntime(encoding="latin-1", unpack_returned_tuples=True), dict[str, Any]()
    library = SCRIPTS.library

    def call(*command: Any) -> Any:
        return _Server.running.call(*command)

    def register(function: Any) -> None:
        functions[function["function_name"]] = function["callback"]

    def pack(value: Any) -> str:
        return msgspec.msgpack.encode(_to_python(value)).decode("latin-1")

    def unpack(packed: str) -> Any:
        return lua.table_from(msgspec.msgpack.decode(packed.encode("latin-1")), recursive=True)

    lua.globals().redis = lua.table(register_function=register, call=call, pcall=call)
    lua.globals().cmsgpack = lua.table(pack=pack, unpack=unpack)
    lua.execute(library.text.partition("\n")[2])
    return lua, {name.removeprefix(library.name + "_"): function for name, function in functions.items()}


def _to_python(value: Any) -> Any:
    """Return a table as a list or a dictionary."""
    if lua_type(value) != "table":
        return value
    items = {key: _to_python(one) for key, one in value.items()}
    return list(items.values()) if all(isinstance(key, int) for key in items) else items


@dataclass
class _Server:
    """A server's keys, and its own time. Deep copies are those of a replica."""

    # The one whose script runs.
    running: ClassVar[_Server]
    now_ms: int = 0
    keys: dict[str, Any] = field(default_factory=dict)
    ends_ms: dict[str, int] = field(default_factory=dict)

    def run(self, name: str, message: Mapping[str, Any], now_ms: int) -> bytes:
        """Call a function of the library."""
        lua, functions = _interpreter()
        self.now_ms = now_ms
        for key in [key for key, end_ms in self.ends_ms.items() if end_ms <= now_ms]:
            self.keys.pop(key, None)
            del self.ends_ms[key]
        _Server.running = self
        packed = msgspec.msgpack.encode(message).decode("latin-1")
        answer: str = functions[name](lua.table(), lua.table_from([packed]))
        return answer.encode("latin-1")

    def call(self, command: str, key: str = "", *arguments: Any) -> Any:
        """Carry out a command of a script."""
        answer = getattr(self, "_" + command.lower())(key, *map(_text, arguments))
        if key in self.keys and not self.keys[key]:
            del self.keys[key]
        lua, _ = _interpreter()
        return lua.table_from(answer) if isinstance(answer, list) else answer

    def _time(self, _: str) -> list[str]:
        return [str(self.now_ms // 1_000), str(self.now_ms % 1_000 * 1_000)]

    def _get(self, key: str) -> Any:
        return self.keys.get(key, False)

    def _set(self, key: str, value: str, *px: str) -> str:
        self.keys[key] = value
        self.ends_ms.pop(key, None)
        if px:
            self.ends_ms[key] = self.now_ms + int(px[1])
        return "OK"

    def _hget(self, key: str, name: str) -> Any:
        return self.keys.get(key, {}).get(name, False)

    def _hgetall(self, key: str) -> list[str]:
        return [text for item in self.keys.get(key, {}).items() for text in item]

    def _hdel(self, key: str, name: str) -> int:
        return int(self.keys.get(key, {}).pop(name, None) is not None)

    def _hset(self, key: str, *values: str) -> int:
        self.keys.setdefault(key, {}).update(zip(values[::2], values[1::2], strict=True))
        return 1

    def _del(self, *keys: str) -> int:
        return len([self.keys.pop(key, None) for key in keys])

    def _exists(self, key: str) -> int:
        return int(bool(self.keys.get(key)))

    def _sadd(self, key: str, *members: str) -> int:
        self.keys.setdefault(key, {}).update(dict.fromkeys(members))
        return 1

    def _srem(self, key: str, *members: str) -> int:
        return sum(self.keys.get(key, {}).pop(member, 0) is None for member in members)

    def _smembers(self, key: str) -> list[str]:
        return list(self.keys.get(key, ()))

    def _srandmember(self, key: str, count: str) -> list[str]:
        return self._smembers(key)[: int(count)]

    def _scard(self, key: str) -> int:
        return len(self.keys.get(key, ()))

    def _xadd(self, key: str, *entry: str) -> str:
        self.keys.setdefault(key, []).append(entry[1:])
        return str(len(self.keys[key]))


def _text(argument: Any) -> str:
    return f"{argument:.17g}" if isinstance(argument, float) else str(argument)


class LuaLedger(_Server):
    """The ledger's data of a server."""

    def look(self, account: str, now_ms: int) -> dict[str, int]:
        """Return the numbers of an account, once reservations of routers that died have ended."""
        nobody = {"router": "nobody", "number": 0, "reservations": [], "accounts": [], "events": []}
        self.run("ledger_tell", {**nobody, "fills": True, "begins": True, "closes": False}, now_ms)
        for part in range(1, 13):
            self.run("ledger_tell", {**nobody, "renews": True}, now_ms + part * HELD_MS // 4)
        packed = self.keys.get(f"{LEDGER}account:{account}")
        counts: dict[str, int] = msgspec.msgpack.decode(packed.encode("latin-1")) if packed else {}
        return counts

    def take_events(self) -> list[tuple[str, int, frozenset[str]]]:
        """Remove the events of the stream; return their ids, their tokens and the accounts that they are of."""
        events = []
        for entry in self.keys.pop(LEDGER + "usage", []):
            fields = dict(zip(entry[::2], entry[1::2], strict=True))
            facts = msgspec.json.decode(fields["facts"], type=Facts)
            accounts = {facts.tenant, *([key_account(facts.key)] if facts.key else [])}
            events.append((fields["id"], int(fields["input"]) + int(fields["output"]), frozenset(accounts)))
        return events


class SimulatedUsage:
    """Stands in for router.quotas.usage.UsageLog: the events that it reads are on the disk at once."""

    def __init__(self, redis: SimulatedRedis) -> None:
        self._redis = redis

    async def write(self) -> None:
        """Read what waits."""
        with contextlib.suppress(RedisConnectionError):
            await self._redis.call(self._redis.read_usage)

    async def close(self, timeout_s: float) -> None:
        """Read what waits, for the last time."""
        await self.write()

    async def follow(self) -> None:
        """Read again and again; never returns."""
        while True:
            await self.write()
            await asyncio.sleep(WRITE_S)


@dataclass
class SimulatedReserve:
    """Stands in for broker.ledger.ReserveCall: the simulated queue carries it out before an enqueue."""

    reserve: Callable[[], Any]
    answer: Any = None


@dataclass(frozen=True)
class Held:
    """A reservation of a call, and the router that has it."""

    id: str
    router: Node


# The reservations of the story whose call runs, by account.
HELD: ContextVar[dict[str, Held] | None] = ContextVar("HELD", default=None)


class SimulatedLedger(Ledger):
    """A ledger whose scripts a simulated server carries out."""

    def __init__(self, redis: SimulatedRedis) -> None:
        self._simulated = redis
        super().__init__(Mock())

    async def _call(self, name: str, message: Mapping[str, Any], send: SendReserve | None) -> Any:
        redis, held, router = self._simulated, HELD.get(), NODE.get()
        counted_at = asyncio.get_running_loop().time()
        message = msgspec.to_builtins(message)

        def run() -> bytes:
            packed = redis.data.ledger.run(name, message, redis.now_ms)
            answer = msgspec.msgpack.decode(packed)
            if answer.get("behind") or answer.get("closed_ms") or "refused" in answer or router is None:
                return packed
            if granted := answer.get("reservation"):
                for account in granted["accounts"].split():
                    redis.granted.append((account, redis.now_ms, granted["input"] + granted["output"], router.name))
                    if held is not None:
                        held[account] = Held(granted["id"], router)
            told = [message["reservation"]] if granted else message["reservations"]
            for one in told:
                key = router, one["id"]
                redis.told_s[key] = max(redis.told_s.get(key, 0.0), counted_at)
            return packed

        if send is None:
            return await redis.call(run)
        call: Any = SimulatedReserve(run)
        await send(call)
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer
