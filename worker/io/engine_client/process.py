"""The engine process as its I/O process sees it: start, messages, death.

A death shows at once: the engine's socket closes. A stall is silence, which worker.io.engine_client.stall watches.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator

from worker.ipc import Configure, FromEngine, Ready, Splitter, ToEngine, Unusable, encode, from_engine_decoder

log = logging.getLogger(__name__)

# Maximum bytes of one read from the engine's socket.
_READ_BYTES = 1 << 20
# Timeout in seconds for the engine process to end once its socket is closed.
_STOP_S = 2.0


class EngineLostError(Exception):
    """The engine process died, or was ended because it no longer stepped."""


class EngineUnusableError(Exception):
    """No engine can serve the model; the message is one line that says why."""


class EngineProcess:
    """An engine process and the I/O process's end of their socket."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._splitter = Splitter()
        self._heard_at = time.monotonic()
        self._expected = False
        # True while it is out of service because it does not step (worker.io.engine_client.stall).
        self.stalled = False

    @classmethod
    async def start(cls, configure: Configure) -> EngineProcess:
        """Start the process; it loads its model on its own."""
        ours, theirs = socket.socketpair()
        # -P: a folder named worker in the working directory must not take the place of this worker.
        command = (sys.executable, "-P", "-m", "worker.engine.process", "--fd", str(theirs.fileno()))
        # Between two operators of a step torch's threads spin for the next one: to sleep and be woken made steps a
        # quarter longer. Between steps they must not spin, for that takes the cores from everything else on the
        # machine. 20,000 spins take some 0.3 ms (libgomp); libomp counts in milliseconds.
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
        """Return its process id."""
        return self._process.pid

    async def ready(self) -> Ready:
        """Wait until the model is loaded. Raises EngineUnusableError or EngineLostError."""
        async for message in self.messages():
            match message:
                case Ready():
                    return message
                case Unusable():
                    raise EngineUnusableError(message.message)
        raise EngineLostError("the engine closed its socket")

    def send(self, message: ToEngine) -> None:
        """Send a message; to a dead engine it is lost, and `messages` raises."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def messages(self) -> AsyncIterator[FromEngine]:
        """Yield what the engine sends. Raises EngineLostError at its end."""
        while True:
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                code = await self._process.wait()
                raise EngineLostError(f"the engine process {self.pid} ended ({_describe_exit(code)})")
            self._heard_at, self._expected = time.monotonic(), False
            for body in self._splitter.feed(data):
                yield from_engine_decoder.decode(body)

    def silent_s(self) -> float:
        """Return the seconds since its last message."""
        return time.monotonic() - self._heard_at

    def expect(self) -> None:
        """Count its silence from now on, once until its next message: it has just got work."""
        if not self._expected:
            self._heard_at, self._expected = time.monotonic(), True

    def kill(self) -> None:
        """End it at once; `messages` then raises."""
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Close its socket, at which it ends; kill it where it does not."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), timeout=_STOP_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()


def _describe_exit(code: int) -> str:
    """Describe an exit code as subprocess gives it: `exit status 1`, or `signal 9, SIGKILL`."""
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    return f"signal {-code}, {name}"
