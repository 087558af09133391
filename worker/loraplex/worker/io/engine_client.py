"""The engine process as its I/O process sees it: start, messages, death.

A death shows at once: the engine's socket closes. A stall is silence beyond what the engine lacked of the processor,
which worker.io.app watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

from loraplex.runtime.interpreter import StartError
from loraplex.worker.engine_api import CaptureFailedError
from loraplex.worker.ipc import (
    Compiling,
    Configure,
    FromEngine,
    Ready,
    Splitter,
    ToEngine,
    Unusable,
    encode,
    from_engine_decoder,
)

log = logging.getLogger(__name__)

# Maximum bytes of one read from the engine's socket.
_READ_BYTES = 1 << 20
# Time in seconds without a message from which on it matters whether the engine lacks the processor: asking Linux takes
# a millisecond.
_QUIET_S = 0.3
# Timeout in seconds for the engine process to end once its socket is closed.
_STOP_S = 2.0


# States of a thread that runs or waits for the processor, and of one that waits for a disk, perhaps for swapped memory.
_RUNNABLE, _WAITS_FOR_DISK = "R", "D"
# Maximum time in seconds that a process waits for a disk between two moments on the processor; beyond, the disk hangs.
_DISK_S = 1.0
# Unit in seconds of processor times in /proc/PID/stat.
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Starvation:
    """The time that a process and its children waited for the processor. Elsewhere than on Linux it counts none.

    A machine with other work, or a container's CPU limit, makes a process slow: a thread of it is runnable and does not
    run, or waits for a disk now and then. One that hangs is stopped, sleeps, or waits for something else.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.reset()

    def reset(self) -> None:
        """Count from the next look on: the process has just done something."""
        self._looked_at = self._used_at = time.monotonic()
        self._used: dict[int, float] | None = None
        # Seconds that the looks have counted.
        self.seconds = 0.0

    def look(self) -> None:
        """Count the time since the last look, less what the busiest thread used of it."""
        now, former, threads = time.monotonic(), self._used, list(_threads(self._pid))
        self._used = {thread: used for thread, _, used in threads}
        if former is not None:
            used = max((used - former.get(thread, used) for thread, _, used in threads), default=0.0)
            if used > 0:
                self._used_at = now
            states = {state for _, state, _ in threads}
            if _RUNNABLE in states or (_WAITS_FOR_DISK in states and now - self._used_at < _DISK_S):
                self.seconds += max(0.0, now - self._looked_at - used)
        self._looked_at = now


def _threads(pid: int) -> Iterator[tuple[int, str, float]]:
    """Yield number, state and processor time in seconds of each thread of a process and its main thread's children."""
    with contextlib.suppress(OSError):  # it has ended, or this is no Linux
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                yield int(task.name), fields[0], (int(fields[11]) + int(fields[12])) * _TICK_S
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _threads(int(child))


class EngineLostError(Exception):
    """The engine process died, or was ended because it no longer stepped."""


class EngineUnusableError(StartError):
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
        self._starvation = Starvation(process.pid)
        self._expected = False
        # True while its last message says that it compiles.
        self.compiling = False
        # True while it is out of service because it does not step (loraplex.worker.io.app).
        self.stalled = False

    @classmethod
    async def start(cls, configure: Configure) -> EngineProcess:
        """Start the process; it loads its model on its own."""
        ours, theirs = socket.socketpair()
        # -P: a folder named worker in the working directory must not take the place of this worker.
        command = (sys.executable, "-P", "-m", "loraplex.worker.engine.process", "--fd", str(theirs.fileno()))
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
        """Wait until the model is loaded. Raises EngineUnusableError, CaptureFailedError or EngineLostError."""
        async for message in self.messages():
            match message:
                case Ready():
                    return message
                case Unusable():
                    raise (CaptureFailedError if message.without_graphs else EngineUnusableError)(message.message)
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
            self._hear(expected=False)
            for body in self._splitter.feed(data):
                message = from_engine_decoder.decode(body)
                self.compiling = isinstance(message, Compiling)
                yield message

    def silent_s(self) -> float:
        """Return the seconds since its last message, without those in which it lacked the processor."""
        silent_s = time.monotonic() - self._heard_at
        if silent_s >= _QUIET_S:
            self._starvation.look()
        return silent_s - self._starvation.seconds

    def expect(self) -> None:
        """Count its silence from now on, once until its next message: it has just got work."""
        if not self._expected:
            self._hear(expected=True)

    def _hear(self, *, expected: bool) -> None:
        self._heard_at, self._expected = time.monotonic(), expected
        self._starvation.reset()

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


# Number of deaths in a row that open the breaker, without a step between them and without a tenant and adapter in all
# of them. Deaths of suspects do not count.
DEATHS_LIMIT = 3
# Seconds before the next engine's own step: after an engine that gave no job a token, so that jobs that may have killed
# it begin elsewhere; and with an open breaker, at first and at most.
SUSPICIOUS_S = 0.75
OPEN_S = 5.0
OPEN_LIMIT_S = 300.0

# A tenant and the digest of an adapter.
Pair = tuple[str, str]


class EngineBreaker:
    """The breaker of a worker whose engines die one after the other: perhaps its device is broken, or its build.

        closed ──3 deaths in a row, of different jobs, or one in a step of its own──▶ open
          ▲                                                                           │
          └──────────────────────── a step gives a job a token ───────────────────────┘

    After a death the worker claims nothing until its next engine has made a step of its own. With an open breaker it
    also waits before this step, longer with each death: so a broken worker leaves its jobs to others, and costs few.

    The death of a suspect tells of the suspect, which has killed an engine before. If it counted, two tenants' suspects
    in turn would open the breaker and hold up everybody.
    """

    def __init__(self, *, suspicious_s: float = SUSPICIOUS_S, open_s: float = OPEN_S) -> None:
        self._suspicious_s = suspicious_s
        self._open_s = open_s
        self.deaths = 0
        # Number of the deaths that count, and the pairs that may be the cause of each of them; None before the first.
        self._counted = 0
        self._common: AbstractSet[Pair] | None = None
        # Whether the present engine has given a job a token, and whether the last one died before it did.
        self._has_stepped, self._died_stepless = False, False
        self.is_open = False
        self._deaths_while_open = 0

    @property
    def pause_s(self) -> float:
        """Return the seconds before the next engine's own step."""
        if not self.is_open:
            return self._suspicious_s if self._died_stepless else 0.0
        return min(OPEN_LIMIT_S, self._open_s * 2.0 ** min(self._deaths_while_open, 16))

    def stepped(self) -> None:
        """Note that a step gave a job a token: the engine works."""
        self._has_stepped = True
        if self.deaths:
            self.deaths, self._counted, self._common = 0, 0, None
            self.is_open, self._deaths_while_open = False, 0

    def died(self, pairs: AbstractSet[Pair], *, in_own_step: bool = False, of_suspect: bool = False) -> None:
        """Count a death, for which jobs of these pairs may be the cause, or a suspect; `in_own_step`: no job is."""
        self._deaths_while_open += self.is_open
        self.deaths += 1
        self._died_stepless, self._has_stepped = not self._has_stepped, False
        if not of_suspect:
            self._counted += 1
            self._common = pairs if self._common is None else self._common & pairs
        self.is_open |= in_own_step or (self._counted >= DEATHS_LIMIT and not self._common)
