"""Each case in a process of its own: one that starts threads, or keeps many, must not slow the others' down.

(With more OpenMP threads in a process than cores, libgomp stops to let any of them spin: every operator of every model
in that process then takes longer.)
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
    """Ours or a peer."""

    def run(self, requests: Sequence[Request]) -> Timed:
        """Answer all of them."""


class Runs(Protocol[Asked_contra, Result_co]):
    """What can be isolated; what it is asked, and what it returns, must be picklable, and the latter no string."""

    def run(self, requests: Asked_contra) -> Result_co:
        """Do what is asked."""


class Isolated(Generic[Asked_contra, Result_co]):
    """What `make` gives, a context manager, entered and run in another process, which waits without a sound between."""

    def __init__(self, make: Callable[[], AbstractContextManager[Runs[Asked_contra, Result_co]]]) -> None:
        """`make` must be picklable."""
        self._make = make

    def __enter__(self) -> Self:
        """Returns when it is ready. Raises RuntimeError where it can't be made."""
        # Forked from one that has imported what they all need, and has started no thread.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "transformers.generation", "peft", "worker.engine.build"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._make, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._result()
        return self

    def run(self, requests: Asked_contra) -> Result_co:
        """Do what is asked there. Raises RuntimeError where that fails."""
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
