"""The engine process as its I/O process sees it: start, messages, death and stall.

A death shows at once (its socket closes, waitpid); a stall is silence, which worker.io.engine_client.stall watches.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator

from worker.ipc import Configure, FromEngine, Ready, Splitter, ToEngine, Unusable, encode, from_engine_decoder

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20


class EngineLostError(Exception):
    """The engine process died, or was ended because it no longer stepped."""


class EngineUnusableError(Exception):
    """The model can't be served; one line that says why."""


class EngineProcess:
    """One engine process and our end of its link."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._splitter = Splitter()
        self._heard_at = time.monotonic()
        self._expected = False
        # Whether it is out of service, since it does not step (worker.io.engine_client.stall).
        self.stalled = False

    @classmethod
    async def start(cls, configure: Configure) -> EngineProcess:
        """Start the process; it loads its model on its own."""
        ours, theirs = socket.socketpair()
        # -P: a folder named worker where the user stands must not take our worker's place.
        command = (sys.executable, "-P", "-m", "worker.engine.process", "--fd", str(theirs.fileno()))
        # Between two operators of a step the threads of torch spin for the next one: to sleep and be woken made steps a
        # quarter longer. Between steps they must not, for they take the cores from everything else on the machine.
        # 20,000 spins are some 0.3 ms (libgomp); libomp counts in milliseconds.
        environ = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"} | os.environ
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, pass_fds=(theirs.fileno(),), env=environ
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        engine = cls(process, reader, writer)
        engine.send(configure)
        return engine

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def ready(self) -> Ready:
        """Wait until the model is loaded. Raises EngineUnusableError or EngineLostError."""
        async for message in self.messages():
            match message:
                case Ready():
                    return message
                case Unusable():
                    raise EngineUnusableError(message.message)
        raise EngineLostError("the engine closed its link")

    def send(self, message: ToEngine) -> None:
        """Send a message; to a dead engine it is lost, which `messages` tells."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def messages(self) -> AsyncIterator[FromEngine]:
        """What the engine sends. Raises EngineLostError at its end."""
        while True:
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                code = await self._process.wait()
                raise EngineLostError(f"the engine process {self.pid} ended ({_exit(code)})")
            self._heard_at, self._expected = time.monotonic(), False
            for body in self._splitter.feed(data):
                yield from_engine_decoder.decode(body)

    def silent_s(self) -> float:
        """Seconds since its last message."""
        return time.monotonic() - self._heard_at

    def expect(self) -> None:
        """It is to be given time: silence counts from now, once for each sign of it."""
        if not self._expected:
            self._heard_at, self._expected = time.monotonic(), True

    def kill(self) -> None:
        """End it at once; `messages` then raises."""
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """End it: its link closes, and it has two seconds to leave."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), timeout=2.0)
        except TimeoutError:
            self.kill()
            await self._process.wait()


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
