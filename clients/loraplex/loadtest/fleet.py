"""Generator processes that share runs: started once, sent plans, and asked for their samples.

The parent sends no requests, so that drawing the screen does not delay them. Processes are spawned, not forked,
because gRPC's threads do not survive a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from loraplex.loadtest.generator import Generator, LoadProgress, Share
from loraplex.loadtest.plan import LoadPlan
from loraplex.loadtest.sender import EncodeSender, GrpcSender, Sender
from loraplex.loadtest.workload import Workload

if TYPE_CHECKING:  # httpx2, which it imports, is needed for HTTP servers alone
    from loraplex.loadtest.http_sender import HttpTarget

# Time in seconds from the command to the first request, so that every process has drawn its part by then.
_LEAD_S = 0.25
# Interval of a process's progress messages, in seconds.
_REPORT_S = 0.25


class GeneratorDiedError(Exception):
    """A generator process ended without sending its samples."""


@dataclass(frozen=True)
class LoadRun:
    """The processes' results of a run. `interrupted` by Ctrl-C."""

    shares: tuple[Share, ...]
    started_unix_s: float
    interrupted: bool


# A router's address, or an HTTP server.
Target: TypeAlias = "str | HttpTarget"


class Fleet:
    """`processes` generators that send to `target`. Prompts are made of the ids in `pool`."""

    def __init__(self, target: Target, pool: Sequence[int], processes: int) -> None:
        self._arguments = (target, tuple(pool), processes)
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        target, pool, count = self._arguments
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, target, pool, number, count), daemon=True)
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

    def run(self, plan: LoadPlan, on_progress: Callable[[Sequence[LoadProgress]], None]) -> LoadRun:
        """Run a plan to its end or to Ctrl-C. `on_progress` gets () until all are ready. Raises GeneratorDiedError."""
        for pipe in self._pipes:
            self._send(pipe, plan)
        for pipe in self._pipes:  # Each answers when it is connected and has drawn its first requests.
            on_progress(())
            self._receive(pipe)
        start_s = time.monotonic() + _LEAD_S
        started_unix_s = time.time() + _LEAD_S
        for pipe in self._pipes:
            self._send(pipe, start_s)
        shares: dict[int, Share] = {}
        latest: dict[int, LoadProgress] = {}
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
                        self._send(pipe, "stop")
        return LoadRun(tuple(share for _, share in sorted(shares.items())), started_unix_s, interrupted)

    def _collect(self, shares: dict[int, Share], latest: dict[int, LoadProgress]) -> None:
        waiting = [pipe for number, pipe in enumerate(self._pipes) if number not in shares]
        for ready in wait(waiting):
            number = self._pipes.index(ready)  # type: ignore[arg-type]  # it is one of those given
            message = self._receive(self._pipes[number])
            if isinstance(message, Share):
                shares[number] = message
            else:
                latest[number] = message

    def _send(self, pipe: Connection, message: Any) -> None:
        try:
            pipe.send(message)
        except OSError as error:
            raise GeneratorDiedError(self._death(pipe)) from error

    def _receive(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError) as error:
            raise GeneratorDiedError(self._death(pipe)) from error

    def _death(self, pipe: Connection) -> str:
        process = self._processes[self._pipes.index(pipe)]
        process.join(5.0)
        return f"generator process {process.pid} ended with code {process.exitcode}; too much to keep in memory?"


def _serve(pipe: Connection, target: Target, pool: Sequence[int], number: int, count: int) -> None:
    """Run plans from the pipe until it is closed, as a generator process. The parent handles Ctrl-C."""
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("grpc").setLevel(logging.CRITICAL)
    with contextlib.suppress(OSError):  # The parent has ended.
        uvloop.run(_serve_runs(pipe, target, pool, (number, count)))


async def _serve_runs(pipe: Connection, target: Target, pool: Sequence[int], part: tuple[int, int]) -> None:
    """Run plans from the pipe; `part` is this process's number and the number of processes."""
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    # A thread, because add_reader would make the pipe non-blocking for sending too.
    threading.Thread(target=_read, args=(pipe, loop, inbox), daemon=True).start()
    while (message := await inbox.get()) is not None:
        if isinstance(message, LoadPlan):  # Anything else is a stop that arrived after the run.
            workload = Workload(message)
            sender = _sender(message, workload, target, pool)
            await _run(pipe, inbox, Generator(message, workload, sender, *part), sender)


def _sender(plan: LoadPlan, workload: Workload, target: Target, pool: Sequence[int]) -> Sender:
    if not isinstance(target, str):
        from loraplex.loadtest.http_sender import HttpSender

        return HttpSender(target, workload, pool, plan)
    return (GrpcSender if plan.task == "generate" else EncodeSender)(target, workload, pool, plan)


def _read(pipe: Connection, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[Any]) -> None:
    """Put the parent's messages into the inbox, and None when the pipe is closed."""
    message: Any = ""
    while message is not None:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            message = None
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            loop.call_soon_threadsafe(inbox.put_nowait, message)


async def _run(pipe: Connection, inbox: asyncio.Queue[Any], generator: Generator, sender: Sender) -> None:
    helpers: list[asyncio.Task[None]] = []
    try:
        await sender.connect()
        pipe.send("ready")
        start_s = await inbox.get()
        if start_s is None:
            inbox.put_nowait(None)
            return
        sender.start_s = start_s
        helpers = [
            asyncio.create_task(_report(pipe, generator)),
            asyncio.create_task(_stop_when_asked(inbox, generator)),
        ]
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


async def _stop_when_asked(inbox: asyncio.Queue[Any], generator: Generator) -> None:
    """Stop the run when the parent sends a stop or has ended."""
    message = await inbox.get()
    generator.stop()
    if message is None:
        inbox.put_nowait(None)
