"""A few child processes that render chat templates, in turns of the tenants.

                  ┌─▶ child ─▶ text, or the field to blame
request ─▶ turn ──┤
                  └─✗ the child died of it: InvalidField, and the next request starts another child

A child that spends too long on a request is killed by the kernel after a time of its own, which a crowded machine does
not stretch (child.CPU_S). One that does not answer for WALL_S is killed here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from router.request import Chat
from router.shares import FairTurns
from rpc.errors import InvalidField, Unavailable

# Number of children at most: half of the cores, since workers and Redis may share the machine.
CHILDREN = max(2, (os.cpu_count() or 1) // 2)
# Timeout in seconds for an answer. A child works for half a second at most, so that only a machine that gives it no
# processor for seconds comes near.
WALL_S = 10.0
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class TemplateCall:
    """A template with a chat: the special tokens that it may name, the time `now`, the most characters it may make."""

    source: str
    tokens: Mapping[str, str]
    chat: Chat
    now: float
    limit: int


class TemplateRenderer:
    """Renders chat templates. The first requests start the children."""

    def __init__(self, children: int = CHILDREN, wall_s: float = WALL_S) -> None:
        self._turns = FairTurns(children)
        self._wall_s = wall_s
        self._idle: list[ChildProcess] = []
        self._working: set[asyncio.Task[Mapping[str, Any]]] = set()
        self._closed = False

    async def render(self, call: TemplateCall, tenant: str) -> str:
        """Return the text of a chat. Raises InvalidField with the template's own words, or Unavailable."""
        answer = await self._turns.run(tenant, lambda: self._start(call))
        if "text" not in answer:
            raise InvalidField(answer["field"], answer["error"], reason="CHAT_TEMPLATE")
        return str(answer["text"])

    def _start(self, call: TemplateCall) -> asyncio.Task[Mapping[str, Any]]:
        working = asyncio.create_task(self._ask(call))
        self._working.add(working)
        working.add_done_callback(self._working.discard)
        return working

    async def _ask(self, call: TemplateCall) -> Mapping[str, Any]:
        data = msgspec.json.encode(call)
        child = self._idle.pop() if self._idle else await asyncio.to_thread(ChildProcess)
        answer: Mapping[str, Any] = {"last": True}
        try:
            async with asyncio.timeout(self._wall_s):
                answer = await child.ask(data)
        except EOFError:
            return {"field": "chat.messages", "error": await asyncio.to_thread(child.why_dead)}
        except TimeoutError:
            raise Unavailable("chat templates are not rendered: the machine is busy", reason="TEMPLATES_BUSY") from None
        finally:
            if "last" in answer or self._closed:
                child.close()
            else:
                self._idle.append(child)
        return answer

    def close(self) -> None:
        """End the children, those that work too."""
        self._closed = True
        for child in self._idle:
            child.close()
        self._idle.clear()
        for task in self._working:
            task.cancel()


class ChildProcess:
    """A child process and the socket that it reads and writes; starting it blocks for milliseconds."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._socket.setblocking(False)
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-m", "router.text.templates.child"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                # Nothing else of the environment: it has the router's secrets.
                env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                cwd="/",
                start_new_session=True,  # Ctrl-C at a terminal is the router's to handle
            )

    async def ask(self, data: bytes) -> Mapping[str, Any]:
        """Return the answer to a request. Raises EOFError where the process died of it."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._socket, _LENGTH.pack(len(data)) + data)
            size = _LENGTH.unpack(await self._read(_LENGTH.size))[0]
            answer: Mapping[str, Any] = msgspec.json.decode(await self._read(size))
        except ConnectionError as error:
            raise EOFError from error
        return answer

    async def _read(self, size: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < size:
            piece = await loop.sock_recv(self._socket, size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def why_dead(self) -> str:
        """Wait for the end of a process that has closed its socket; return its cause in words."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "the chat template ended its process"
        if code == -signal.SIGPROF:
            return "the chat template takes too long"
        return (
            f"the chat template ended its process ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"
        )

    def close(self) -> None:
        """End the process, whatever it does."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
