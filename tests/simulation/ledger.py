"""The ledger over a simulated server: the shipped Lua functions, run by an interpreter over Python's data."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from lupa.lua51 import LuaRuntime, lua_type  # type: ignore[import-untyped]  # has no types
from redis.exceptions import ConnectionError as RedisConnectionError

from broker.keys import LEDGER, key_account
from broker.ledger import SendReserve
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

    lua.globals().redis = lua.table(register_function=register, call=call, pcall=call)
    lua.execute(library.text.partition("\n")[2])
    return lua, {name.removeprefix(library.name + "_"): function for name, function in functions.items()}


def _from_lua(value: Any) -> Any:
    """Return an answer as a client of Redis gets it."""
    if lua_type(value) == "table":
        return [_from_lua(one) for one in value.values()]
    return value.encode("latin-1") if isinstance(value, str) else int(value)


@dataclass
class _Server:
    """A server's keys, and its own time. Deep copies are those of a replica."""

    # The one whose script runs.
    running: ClassVar[_Server]
    now_ms: int = 0
    keys: dict[str, Any] = field(default_factory=dict)
    ends_ms: dict[str, int] = field(default_factory=dict)

    def run(self, name: str, arguments: Sequence[Any], now_ms: int) -> Any:
        """Call a function of the library."""
        lua, functions = _interpreter()
        self.now_ms = now_ms
        for key in [key for key, end_ms in self.ends_ms.items() if end_ms <= now_ms]:
            self.keys.pop(key, None)
            del self.ends_ms[key]
        _Server.running = self
        texts = [str(one) if not isinstance(one, bytes) else one.decode("latin-1") for one in arguments]
        return _from_lua(functions[name](lua.table(), lua.table_from(texts)))

    def call(self, command: str, key: str = "", *arguments: Any) -> Any:
        """Carry out a command of a script."""
        answer = getattr(self, "_" + command.lower())(key, *map(_text, arguments))
        if key in self.keys and not self.keys[key]:
            del self.keys[key]
        lua, _ = _interpreter()
        return lua.table_from(answer) if isinstance(answer, list) else answer

    def _time(self, _: str) -> list[str]:
        return [str(self.now_ms // 1_000), str(self.now_ms % 1_000 * 1_000)]

    def _hmget(self, key: str, *fields: str) -> list[Any]:
        found = self.keys.get(key, {})
        return [found.get(name, False) for name in fields]

    def _hset(self, key: str, *values: str) -> int:
        self.keys.setdefault(key, {}).update(zip(values[::2], values[1::2], strict=True))
        return 1

    def _del(self, *keys: str) -> int:
        return len([self.keys.pop(key, None) for key in keys])

    def _pexpire(self, key: str, ms: str) -> int:
        self.ends_ms[key] = self.now_ms + int(ms)
        return 1

    def _persist(self, key: str) -> int:
        return int(self.ends_ms.pop(key, None) is not None)

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

    def _zadd(self, key: str, score: str, member: str) -> int:
        self.keys.setdefault(key, {})[member] = float(score)
        return 1

    _zrem = _srem

    def _sorted(self, key: str) -> list[tuple[float, str]]:
        return sorted((score, member) for member, score in self.keys.get(key, {}).items())

    def _zrange(self, key: str, first: str, last: str, with_scores: str) -> list[str]:
        assert (first, last, with_scores) == ("-1", "-1", "WITHSCORES")
        return [text for score, member in self._sorted(key)[-1:] for text in (member, f"{score:.0f}")]

    def _zrangebyscore(self, key: str, lowest: str, highest: str) -> list[str]:
        return [member for score, member in self._sorted(key) if float(lowest) <= score <= float(highest)]

    def _xadd(self, key: str, *entry: str) -> str:
        self.keys.setdefault(key, []).append(entry[1:])
        return str(len(self.keys[key]))


def _text(argument: Any) -> str:
    return f"{argument:.17g}" if isinstance(argument, float) else str(argument)


class LuaLedger(_Server):
    """The ledger's data of a server."""

    def look(self, account: str, now_ms: int) -> dict[str, int]:
        """Return the numbers of an account, once reservations of routers that died have ended."""
        state = self.keys.get(LEDGER + "state", {})
        for part in range(1, 13):
            arguments = [state.get("epoch", 0), 0, "nobody's"]
            self.run("ledger_renew", arguments, now_ms + part * HELD_MS // 4)
        return {name: int(value) for name, value in self.keys.get(f"{LEDGER}account:{account}", {}).items()}

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


class SimulatedCalls:
    """Stands in for broker.ledger.LedgerCalls."""

    def __init__(self, redis: SimulatedRedis) -> None:
        self._redis = redis

    async def __call__(self, name: str, arguments: Sequence[Any], send: SendReserve | None = None) -> Any:
        """See LedgerCalls."""
        redis, held, router = self._redis, HELD.get(), NODE.get()
        counted_at = asyncio.get_running_loop().time()

        def run() -> Any:
            answer = redis.data.ledger.run(name, arguments, redis.now_ms)
            if answer[0] in (b"behind", b"closed") or router is None:
                return answer
            if name == "ledger_reserve" and answer[0] == b"granted":
                for account in arguments[7 + 1 :: 7]:
                    redis.granted.append((account, redis.now_ms, sum(answer[3][5:7]), router.name))
                    if held is not None:
                        held[account] = Held(arguments[2], router)
            ids = {"ledger_reserve": arguments[2:3], "ledger_settle": arguments[2:3], "ledger_renew": arguments[3::5]}
            for told in ids.get(name, ()):
                redis.told_s[router, told] = max(redis.told_s.get((router, told), 0.0), counted_at)
            return answer

        if send is None:
            return await redis.call(run)
        call: Any = SimulatedReserve(run)
        await send(call)
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer
