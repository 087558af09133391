"""Redis servers in this process: the shipped Lua functions over data in the same interpreter, at a clock that is set.

A call crosses from Python into Lua once, so that it takes a fraction of a call of a real server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
from lupa.luajit21 import LuaRuntime  # type: ignore[import-untyped]  # has no types
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import ResponseError

Command = Sequence[Any]


@cache
def _interpreter() -> Any:
    """Return the functions of commands.lua: `new`, `copy` and `execute`."""
    lua = LuaRuntime(encoding=None, unpack_returned_tuples=True)
    texts = [files("bench.in_process").joinpath(name).read_bytes() for name in ("message_pack.lua", "commands.lua")]
    return lua.execute(texts[1], *lua.execute(texts[0]))


def _bytes(argument: Any) -> bytes:
    """Return an argument as a client sends it."""
    if isinstance(argument, bytes):
        return argument
    return (argument if isinstance(argument, str) else repr(argument)).encode()


@dataclass(eq=False)
class _Waiting:
    """A BLPOP that waits for one of its lists to grow."""

    command: Command
    keys: set[bytes]
    popped: asyncio.Future[list[bytes]]


class Server:
    """A server. `clock` returns its time in ms; `run` is the name of its start."""

    def __init__(self, clock: Callable[[], int], run: str = "0") -> None:
        self._clock = clock
        self._lua = _interpreter()
        self._execute = self._lua[b"execute"]
        self.data: Any = None
        # In the order in which they came.
        self._blocked: list[_Waiting] = []
        self.start(run)

    def start(self, run: str, data: Any = None) -> None:
        """Start, without data where none is given."""
        self.data = self._lua[b"new"]() if data is None else data
        self.data[b"run"] = _bytes(run)

    def copy(self) -> Any:
        """Return a copy of the data."""
        return self._lua[b"copy"](self.data)

    def execute(self, *command: Any) -> Any:
        """Carry out a command, and return its answer. Raises ResponseError."""
        packed, pushed = self._execute(self.data, self._clock(), *map(_bytes, command))
        if pushed and self._blocked:
            self._serve_blocked({*pushed.split(b"\n")})
        answer = msgspec.msgpack.decode(packed)
        if isinstance(answer, dict):
            raise ResponseError(answer["err"])
        return answer

    def answer(self, command: Command) -> Any:
        """Return a command's answer or error."""
        try:
            return self.execute(*command)
        except ResponseError as error:
            return error

    async def pop(self, command: Command) -> list[bytes] | None:
        """Return the answer of BLPOP, which waits for one of its lists to grow."""
        popped: list[bytes] | None = self.execute(*command)
        if popped is not None:
            return popped
        waiting = _Waiting(command, {*map(_bytes, command[1:-1])}, asyncio.get_running_loop().create_future())
        self._blocked.append(waiting)
        try:
            return await asyncio.wait_for(waiting.popped, command[-1])
        except TimeoutError:
            return None
        finally:
            self._blocked.remove(waiting)

    def _serve_blocked(self, pushed: set[bytes]) -> None:
        for waiting in tuple(self._blocked):
            if not waiting.popped.done() and waiting.keys & pushed:
                item = self.execute(*waiting.command)
                if item is not None:
                    waiting.popped.set_result(item)


class Client(Redis):
    """A client of such a server, for what the broker makes of one; `send` may be replaced by a network with faults."""

    def __init__(self, server: Server) -> None:
        super().__init__(protocol=2)
        self.server = server

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one round trip; return their answers, some of which may be errors."""
        pop, answer = self.server.pop, self.server.answer
        return [await pop(command) if command[0] == "BLPOP" else answer(command) for command in commands]

    async def execute_command(self, *command: Any, **options: Any) -> Any:
        """Return a command's answer. Raises ResponseError."""
        (answer,) = await self.send((command,))
        return self._read(command, answer, options)

    def _read(self, command: Command, answer: Any, options: Mapping[str, Any]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        read = self.response_callbacks.get(command[0])
        # `keys` are for the library's own cache.
        options = {name: value for name, value in options.items() if name != "keys"}
        return answer if read is None else read(answer, **options)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """Return a pipeline, whose commands share a round trip."""
        return _Pipeline(self)


class _Pipeline(Pipeline):
    def __init__(self, client: Client) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction=False, shard_hint=None)
        self._client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Send the commands; their answers in order."""
        sent, self.command_stack = self.command_stack, []
        answers = await self._client.send([command for command, _ in sent])
        for place, (command, options) in enumerate(sent):
            try:
                answers[place] = self._client._read(command, answers[place], options)
            except ResponseError as error:
                if raise_on_error:
                    raise
                answers[place] = error
        return answers
