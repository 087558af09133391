"""`loraplex router`: reads the settings and runs the router, or with `--processes N` several behind one port.

             ┌─▶ process 1 ◀─┐
supervisor ──┼─▶ process 2 ◀─┼── the kernel spreads the connections to --port and --mtls-port (SO_REUSEPORT)
             └─▶ ...       ◀─┘

Each process is a router like any other, with a relay address, metrics, operators' ports and files of its own
(RouterSettings.of_process). The supervisor holds the shared ports, starts processes that have ended again, and stops
all.

`loraplex router NUMBER` is such a process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import uvloop

from loraplex.router.settings import RouterSettings
from loraplex.runtime.interpreter import importing, starting
from loraplex.runtime.rpc.children.process import LaunchError, Process
from loraplex.runtime.rpc.server import PortInUse, stop_signal
from loraplex.runtime.rpc.settings import read_settings
from loraplex.runtime.rpc.tasks import unless_stopped
from loraplex.runtime.telemetry.logging import set_up_logging

log = logging.getLogger("loraplex.router.processes")

# Number of new objects after which Python looks for garbage among them, and of such looks until one among older ones.
# A call makes hundreds of objects that live as long as it does: by default the looks took an eighth of a burst's time.
_COLLECTIONS = (20_000, 20, 20)
# First and longest pause in seconds before a process that has ended is started again; each is twice as long as the one
# before, and the first follows again once a process has run for STEADY_S.
FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S = 0.5, 30.0, 60.0
# Timeout in seconds, beside --drain-s, for a process to stop before it is killed.
STOP_S = 15.0


@starting()
def main(argv: Sequence[str], process: int = 0) -> int:
    """Run until a signal stops the router.

    `process` is its number where it is one of several processes, which `supervise` has started.
    """
    settings = read_settings(RouterSettings, "router", argv, os.environ)
    set_up_logging(f"router-{process}" if process else "router", settings.log_format, settings.log_level)
    if settings.processes > 1 and not process:
        return uvloop.run(supervise(settings, argv))
    with importing():
        from loraplex.router.app import run
    gc.set_threshold(*_COLLECTIONS)
    uvloop.run(run(settings.of_process(process), supervised=True) if process else run(settings))
    return 0


async def supervise(settings: RouterSettings, argv: Sequence[str]) -> int:
    """Run the processes until SIGTERM or SIGINT; return the exit code. Raises PortInUse or LaunchError.

    A second signal ends the supervisor, and with it all processes.
    """
    stop = stop_signal()
    with ExitStack() as reserved:
        flags = list[str]()
        for name, port in (("--port", settings.port), ("--mtls-port", settings.mtls_port)):
            if port is not None:
                flags += [name, str(reserved.enter_context(reserve(settings.host, port)).getsockname()[1])]
        processes = _Processes([*argv, *flags], settings.processes)
        try:
            await unless_stopped(stop, processes.run())
        except LaunchError:
            if not processes.refused:
                raise
            return 2  # a process has said why
        finally:
            stopped = await processes.stop(settings.drain_s + STOP_S)
        return 0 if stopped else 1


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket bound to host:port: while it is open, only processes of this user that share ports listen there.

    Raises PortInUse, also where another supervisor has the port.
    """
    bare = host.strip("[]")
    try:
        family = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        bound = socket.socket(family)
        try:
            # Bind as any server does, beside connections of a former router that end. Share the port only afterwards,
            # so that a port in use is refused.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((bare, port))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except BaseException:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise PortInUse(f"cannot listen on {host}:{port}: {why}") from error
    return bound


class _Processes:
    """The processes, with the flags `argv`, by their numbers."""

    def __init__(self, argv: Sequence[str], count: int) -> None:
        self._argv = argv
        self._count = count
        self._running: dict[int, Process] = {}

    @property
    def refused(self) -> bool:
        """Return whether a process did not start, for a reason that it has printed."""
        return any(process.exited.done() and process.exited.result() == 2 for process in self._running.values())

    async def run(self) -> None:
        """Start the processes, and again those that end; never returns. Raises LaunchError until all are ready."""
        # First one alone: what stops it would stop the others too, and is said once.
        ready = [await (await self._start(1)).started()]
        others = [await self._start(number) for number in range(2, self._count + 1)]
        ready += await asyncio.gather(*(process.started() for process in others))
        words = [f"{name}={','.join(dict.fromkeys(one[name] for one in ready))}" for name in ready[0]]
        print("ready", *words, f"processes={self._count}", flush=True)
        await asyncio.gather(*(self._keep(number) for number in self._running))

    async def stop(self, timeout_s: float) -> bool:
        """Drain and stop all; return whether each that ran has ended by itself, without an error."""
        running = [process for process in self._running.values() if not process.exited.done()]
        await asyncio.gather(*(process.stop(timeout_s) for process in running))
        return all(process.exited.result() == 0 for process in running)

    async def _start(self, number: int) -> Process:
        command = (sys.executable, "-P", "-m", "loraplex.router", str(number), *self._argv)
        process = self._running[number] = await Process.start(f"router-{number}", command)
        log.info("%s starts as process %d", process.name, process.pid)
        return process

    async def _keep(self, number: int) -> None:
        """Start a process again whenever it has ended; never returns."""
        pause_s, began = FIRST_PAUSE_S, time.monotonic()
        while True:
            process = self._running[number]
            await asyncio.wait({process.exited})
            if time.monotonic() - began > STEADY_S:
                pause_s = FIRST_PAUSE_S
            log.error("%s; it starts again in %g s", process.failure(), pause_s)
            await process.kill()
            await asyncio.sleep(pause_s)
            pause_s, began = min(2 * pause_s, LONGEST_PAUSE_S), time.monotonic()
            try:
                await self._start(number)
            except OSError as error:
                log.error("%s cannot start: %s", process.name, error.strerror)


if __name__ == "__main__":
    words = sys.argv[1:]
    number = int(words.pop(0)) if words and words[0].isdecimal() else 0
    sys.exit(main(words, number))
