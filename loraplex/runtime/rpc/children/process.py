"""A child process of the launcher, or of a router's supervisor: start, ready line, exit, stop.

start ──▶ stdout: `ready ...` ──▶ wait_ready      stderr ──▶ its log file ──▶ failure(): the `error: ...` line

Each child leads a session of its own, so that a terminal's Ctrl-C reaches its parent alone, which stops them in order.
It dies with its parent.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from loraplex.runtime.interpreter import StartError
from loraplex.runtime.rpc.tasks import unless_ended

READY = re.compile(r"^ready ")
_TAIL_BYTES = 64 * 1024
_DIE_WITH_PARENT = Path(__file__).with_name("die_with_parent.py")


class LaunchError(StartError):
    """A child process, or a cluster of them, cannot start or continue; the message is one line."""


class Process:
    """A child process. `exited` is done when the process has ended, with its return code (negative for a signal)."""

    def __init__(self, name: str, child: asyncio.subprocess.Process, output: _Output) -> None:
        self.name = name
        self.pid = child.pid
        self._child = child
        self._output = output
        self.exited: asyncio.Task[int] = asyncio.create_task(self._wait())

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        log_path: Path | None = None,
        environ: Mapping[str, str] | None = None,
        ready: re.Pattern[str] = READY,
    ) -> Process:
        """Run `argv`; `ready` matches the line of its stdout that says that it serves. Raises OSError.

        Without `log_path` its stderr is this process's own.
        """
        # A socket, because with asyncio's pipe wait() would not return while a grandchild holds the other end.
        ours, theirs = socket.socketpair()
        output = _Output(log_path, ready)
        with theirs:
            await asyncio.get_running_loop().create_connection(lambda: output, sock=ours)
            try:
                child = await asyncio.create_subprocess_exec(
                    *_dying_with_parent(argv),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=theirs.fileno(),
                    stderr=output.log,
                    env=environ,
                    start_new_session=True,
                )
            except BaseException:
                await output.close()
                raise
        return cls(name, child, output)

    async def wait_ready(self) -> dict[str, str]:
        """Return the `key=value` pairs of the ready line. Never returns if the process exits first."""
        line = await asyncio.shield(self._output.ready)
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    async def started(self) -> dict[str, str]:
        """Wait as wait_ready does. Raises LaunchError if the process exits first."""
        words = await unless_ended(asyncio.shield(self.exited), self.wait_ready())
        if words is None:
            raise self.failure()
        return words

    @property
    def is_ready(self) -> bool:
        """Return whether the process has printed its ready line."""
        return self._output.ready.done()

    def last_words(self) -> str:
        """Return the last `error: ...` line of the log without the prefix, else the last line, else nothing."""
        if self._output.log_path is None:
            return ""
        with self._output.log_path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or [""])[-1]

    def failure(self) -> LaunchError:
        """Return the reason of the exit in one line; call it when `exited` is done."""
        code, words = self.exited.result(), self.last_words()
        if code == 2 and words:  # The process refused to start and printed the reason.
            return LaunchError(f"{self.name}: {words}")
        if code < 0:
            return LaunchError(f"{self.name} was killed by {signal.Signals(-code).name}")
        return LaunchError(f"{self.name} exited with status {code}" + (f": {words}" if words else ""))

    def send_signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Signal the process, or its whole group, unless it has ended."""
        with suppress(ProcessLookupError):
            if group and not self.exited.done():
                os.killpg(self.pid, number)
            else:
                self._child.send_signal(number)

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM and, after `grace_s`, SIGKILL; returns when the process has ended."""
        self.send_signal(signal.SIGTERM)
        await asyncio.wait({self.exited}, timeout=grace_s)
        await self.kill()

    async def kill(self) -> None:
        """Kill the process and its process group; returns when the process has ended."""
        if not self.exited.done():
            self._kill_group()
        await asyncio.wait({self.exited})
        await self._output.close()

    async def _wait(self) -> int:
        code = await self._child.wait()
        # A worker's engine must not outlive it. Only now is the group's id certainly still ours.
        self._kill_group()
        return code

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS answers EPERM if only zombies are left.
            os.killpg(self.pid, signal.SIGKILL)


class _Output(asyncio.Protocol):
    """Copies a child's stdout to its log, if it has one, and finds the ready line in it; owns both."""

    def __init__(self, log_path: Path | None, pattern: re.Pattern[str]) -> None:
        loop = asyncio.get_running_loop()
        self.log_path = log_path
        self.log = None if log_path is None else log_path.open("ab", buffering=0)
        self.ready: asyncio.Future[str] = loop.create_future()
        self._pattern = pattern
        self._partial = b""
        self._transport: asyncio.BaseTransport | None = None
        self._closed: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self.log is not None:
            self.log.write(data)
        if self.ready.done():
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in (raw.decode(errors="replace") for raw in lines):
            if self._pattern.search(line):
                self.ready.set_result(line)
                return

    def connection_lost(self, exc: Exception | None) -> None:
        if self.log is not None:
            self.log.close()
        self._closed.set_result(None)

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            await self._closed


def _dying_with_parent(argv: Sequence[str]) -> list[str]:
    # Files of the process are for its own user. (uvloop's subprocesses take no umask.)
    if sys.platform != "linux":
        return ["/bin/sh", "-c", 'umask 077 && exec "$@"', "sh", *argv]
    # -I -S: die_with_parent needs no packages and starts in a few milliseconds.
    return [sys.executable, "-I", "-S", str(_DIE_WITH_PARENT), str(os.getpid()), *argv]
