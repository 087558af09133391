"""A few child processes for hostile data, in turns of the tenants.

                  ┌─▶ child ─▶ answer
request ─▶ turn ──┤
                  └─✗ the child died of it: ChildDiedError, and the next request starts another child

A child that spends too long on a request is killed by the kernel after a time of its own, which a crowded machine does
not stretch (see child.py). One that does not answer for `wall_s` is killed here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from loraplex.runtime.rpc.children.child import LAST, LENGTH
from loraplex.runtime.rpc.errors import Unavailable
from loraplex.runtime.rpc.shares import FairTurns

# Number of children at most: half of the cores, since workers and Redis may share the machine.
CHILDREN = max(2, (os.cpu_count() or 1) // 2)
# Timeout in seconds for an answer. A child works for a part of it at most, so that only a machine that gives it no
# processor for seconds comes near.
WALL_S = 10.0

Answer = Mapping[str, Any]


class ChildDiedError(Exception):
    """A request that ended its child; the message goes on after "it ..."."""


class ChildPool:
    """Child processes that run `python -m module`, which calls rpc.children.child.serve. The first requests start them.

    `busy` is the reason of the error that ends a call on a machine without processor time for them.
    """

    def __init__(self, module: str, busy: str, children: int = CHILDREN, wall_s: float = WALL_S) -> None:
        self._module = module
        self._busy = busy
        self._turns = FairTurns(children)
        self._wall_s = wall_s
        self._idle: list[ChildProcess] = []
        self._working: set[asyncio.Task[Answer]] = set()
        self._closed = False
        # Grows when children are to end that have started before.
        self._generation = 0

    async def ask(self, tenant: str, request: Any) -> Answer:
        """Return the answer to a request, at the tenant's turn. Raises ChildDiedError, or Unavailable."""
        return await self._turns.run(tenant, lambda: self._start(request))

    def _start(self, request: Any) -> asyncio.Task[Answer]:
        working = asyncio.create_task(self._ask(request))
        self._working.add(working)
        working.add_done_callback(self._working.discard)
        return working

    async def _ask(self, request: Any) -> Answer:
        data = msgspec.json.encode(request)
        generation = self._generation
        child = self._idle.pop() if self._idle else await asyncio.to_thread(ChildProcess, self._module)
        answer: Answer = {LAST: True}
        try:
            async with asyncio.timeout(self._wall_s):
                answer = await child.ask(data)
        except EOFError:
            raise ChildDiedError(await asyncio.to_thread(child.why_dead)) from None
        except TimeoutError:
            message = f"a child process gave no answer within {self._wall_s:g} s: the machine is busy"
            raise Unavailable(message, reason=self._busy) from None
        finally:
            if LAST in answer or self._closed or generation != self._generation:
                child.close()
            else:
                self._idle.append(child)
        return answer

    def forget(self) -> int:
        """End the children, which have kept texts of earlier requests, and those that work after their answer.

        Returns how many there were.
        """
        ended, self._generation = len(self._idle) + len(self._working), self._generation + 1
        self._end_idle()
        return ended

    def close(self) -> None:
        """End the children, those that work too."""
        self._closed = True
        self._end_idle()
        for task in self._working:
            task.cancel()

    def _end_idle(self) -> None:
        for child in self._idle:
            child.close()
        self._idle.clear()


class ChildProcess:
    """A child process and the socket that it reads and writes; starting it blocks for milliseconds."""

    def __init__(self, module: str) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._socket.setblocking(False)
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-m", module],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                # Nothing else of the environment: it has the parent's secrets. Numerical libraries start a thread for
                # each core otherwise, which reserves address space.
                env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **_ONE_THREAD},
                cwd="/",
                start_new_session=True,  # Ctrl-C at a terminal is the parent's to handle
            )

    async def ask(self, data: bytes) -> Answer:
        """Return the answer to a request. Raises EOFError where the process died of it."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._socket, LENGTH.pack(len(data)) + data)
            size = LENGTH.unpack(await self._read(LENGTH.size))[0]
            answer: Answer = msgspec.json.decode(await self._read(size))
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
            return "ended its process"
        if code == -signal.SIGPROF:
            return "takes too long"
        return f"ended its process ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"

    def close(self) -> None:
        """End the process, whatever it does; a thread waits until the kernel has freed its memory."""
        self._socket.close()
        self._process.kill()
        threading.Thread(target=self._process.wait, name="child-end", daemon=True).start()


_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
