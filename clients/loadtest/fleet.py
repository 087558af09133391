"""Generator processes that share runs: started once, told what to run, asked for what they saw.

The parent only watches, so that drawing the screen takes no time from sending. Processes are spawned, not forked:
gRPC's threads do not survive a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Self

from loraplex_client import LoraplexError

from clients.loadtest.generator import Generator, Progress, Share
from clients.loadtest.plan import Plan
from clients.loadtest.sender import Sender
from clients.loadtest.workload import Workload

# From the order to run to the first request, so that every process has drawn its part by then.
_LEAD_S = 0.25
_REPORT_S = 0.25


class GeneratorDiedError(Exception):
    """A generator process ended without handing in what it saw."""


@dataclass(frozen=True)
class Run:
    """What the processes saw of one run. `interrupted`: somebody pressed Ctrl-C."""

    shares: tuple[Share, ...]
    started_unix_s: float
    interrupted: bool


@dataclass(frozen=True)
class _Part:
    """What a process needs to know for a run: `part` is its number, and how many there are."""

    plan: Plan
    router: str
    pool: Sequence[int]
    part: tuple[int, int]

    def parts(self) -> tuple[Generator, Sender]:
        workload = Workload(self.plan)
        sender = Sender(self.router, workload, self.pool, model=self.plan.model, timeout_s=self.plan.timeout_s)
        return Generator(self.plan, workload, sender, *self.part), sender


class Fleet:
    """`processes` generators that send to `router`. Prompts are made of the ids in `pool`."""

    def __init__(self, router: str, pool: Sequence[int], processes: int) -> None:
        self._arguments = (router, tuple(pool), processes)
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        router, pool, count = self._arguments
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, router, pool, number, count), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()

    def run(self, plan: Plan, on_progress: Callable[[Sequence[Progress]], None]) -> Run:
        """Run a plan to its end, or to Ctrl-C. Raises GeneratorDiedError."""
        for pipe in self._pipes:
            self._say(pipe, plan)
        for pipe in self._pipes:  # connected, and its draws made
            self._hear(pipe)
        start_s = time.monotonic() + _LEAD_S
        started_unix_s = time.time() + _LEAD_S
        for pipe in self._pipes:
            self._say(pipe, start_s)
        shares: dict[int, Share] = {}
        latest: dict[int, Progress] = {}
        interrupted = False
        while len(shares) < len(self._pipes):
            try:
                self._collect(shares, latest)
                on_progress(list(latest.values()))
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                for number, pipe in enumerate(self._pipes):
                    if number not in shares:
                        self._say(pipe, "stop")
        return Run(tuple(share for _, share in sorted(shares.items())), started_unix_s, interrupted)

    def _collect(self, shares: dict[int, Share], latest: dict[int, Progress]) -> None:
        waiting = [pipe for number, pipe in enumerate(self._pipes) if number not in shares]
        for ready in wait(waiting):
            number = self._pipes.index(ready)  # type: ignore[arg-type]  # it is one of those given
            message = self._hear(self._pipes[number])
            if isinstance(message, Share):
                shares[number] = message
            else:
                latest[number] = message

    def _say(self, pipe: Connection, message: Any) -> None:
        try:
            pipe.send(message)
        except OSError as error:
            raise GeneratorDiedError(self._death(pipe)) from error

    def _hear(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError) as error:
            raise GeneratorDiedError(self._death(pipe)) from error

    def _death(self, pipe: Connection) -> str:
        process = self._processes[self._pipes.index(pipe)]
        process.join(5.0)
        return f"generator process {process.pid} ended with code {process.exitcode}; too much to keep in memory?"


def _serve(pipe: Connection, router: str, pool: Sequence[int], number: int, count: int) -> None:
    """A generator process: runs what it is told until the pipe is closed. Ctrl-C is the parent's."""
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    logging.getLogger("grpc").setLevel(logging.CRITICAL)
    with contextlib.suppress(OSError):  # the parent is gone
        uvloop.run(_serve_runs(pipe, router, pool, (number, count)))


async def _serve_runs(pipe: Connection, router: str, pool: Sequence[int], part: tuple[int, int]) -> None:
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    # A thread and not add_reader: that would make the pipe non-blocking for what is sent, too.
    threading.Thread(target=_read, args=(pipe, loop, inbox), daemon=True).start()
    while (message := await inbox.get()) is not None:
        if isinstance(message, Plan):  # else a stop that came when the run was over
            await _run(pipe, inbox, _Part(message, router, pool, part))


def _read(pipe: Connection, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[Any]) -> None:
    """Pass on what the parent says; None when it has closed the pipe."""
    message: Any = ""
    while message is not None:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            message = None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(inbox.put_nowait, message)


async def _run(pipe: Connection, inbox: asyncio.Queue[Any], make: _Part) -> None:
    generator, sender = make.parts()
    helpers: list[asyncio.Task[None]] = []
    try:
        with contextlib.suppress(LoraplexError):  # gone since it was asked last: the requests will tell
            await sender.connect()
        pipe.send("ready")
        start_s = await inbox.get()
        if start_s is None:
            inbox.put_nowait(None)
            return
        sender.start_s = start_s
        helpers = [asyncio.create_task(_report(pipe, generator)), asyncio.create_task(_obey(inbox, generator))]
        share = await generator.run()
    finally:
        for helper in helpers:
            helper.cancel()
        await sender.close()
    pipe.send(generator.progress())
    pipe.send(share)


async def _report(pipe: Connection, generator: Generator) -> None:
    while True:
        await asyncio.sleep(_REPORT_S)
        pipe.send(generator.progress())


async def _obey(inbox: asyncio.Queue[Any], generator: Generator) -> None:
    """Stop when the parent says so, or is gone."""
    message = await inbox.get()
    generator.stop()
    if message is None:
        inbox.put_nowait(None)
