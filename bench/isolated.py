"""Runs each benchmark case in its own process, so that the threads of one case do not slow the others.

With more OpenMP threads in a process than cores, libgomp stops spinning in all of them, and every operator of every
model in that process takes longer.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from bench.rounds import Timed
from bench.workload import Request

Asked_contra = TypeVar("Asked_contra", contravariant=True)
Result_co = TypeVar("Result_co", covariant=True)


class Answers(Protocol):
    """An engine that can be timed: our engine, a cluster or a peer."""

    def run(self, requests: Sequence[Request]) -> Timed:
        """Answer the requests and time them."""


class Runs(Protocol[Asked_contra, Result_co]):
    """An object that can run in another process. Requests and results must be picklable; a result is never a string."""

    def run(self, requests: Asked_contra) -> Result_co:
        """Run the requests and return their result."""


class Isolated(Generic[Asked_contra, Result_co]):
    """Enters the context manager that `make` returns in another process, which sleeps between its runs."""

    def __init__(self, make: Callable[[], AbstractContextManager[Runs[Asked_contra, Result_co]]]) -> None:
        """Take `make`, which must be picklable."""
        self._make = make

    def __enter__(self) -> Self:
        """Start the process; returns when it is ready. Raises RuntimeError if `make` or entering its context fails."""
        # Forked from a server process that has imported the common modules and has started no thread.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch", "transformers.generation", "peft", "loraplex.worker.engine.torch_engine"]
        )
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._make, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._result()
        return self

    def run(self, requests: Asked_contra) -> Result_co:
        """Run the requests in the process and return their result. Raises RuntimeError if that fails."""
        self._pipe.send(requests)
        result = self._result()
        assert result is not None, "a run has a result"
        return result

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(None)
        self._process.join()
        self._pipe.close()

    def _result(self) -> Result_co | None:
        try:
            result: Result_co | str | None = self._pipe.recv()
        except EOFError:
            self._process.join()
            result = f"its process ended with {self._process.exitcode}"
        if isinstance(result, str):
            raise RuntimeError(result)
        return result


def _serve(make: Callable[[], AbstractContextManager[Runs[Asked_contra, Result_co]]], pipe: Connection) -> None:
    try:
        with make() as answers:
            pipe.send(None)
            while (requests := pipe.recv()) is not None:
                pipe.send(answers.run(requests))
    except EOFError:
        pass  # the benchmark was interrupted
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise
