"""Starts processes: one line where they cannot, garbage collections, switches between threads of an event loop."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")

# Interval in seconds after which a thread with long work gives way to the event loop; Python's own is 5 ms, which each
# turn of the loop would wait.
_SWITCH_S = 2e-4


class StartError(Exception):
    """A process cannot start, and waiting does not mend it: the message says in one line what to do."""


def starting(*others: type[Exception]) -> Callable[[Callable[P, int | None]], Callable[P, int]]:
    """Decorate the function that runs a process: it returns the exit status, after one line 2.

    That is so for StartErrors and `others`. What the process writes is for its own user.
    """
    stopping: tuple[type[Exception], ...] = (StartError, *others)

    def decorate(main: Callable[P, int | None]) -> Callable[P, int]:
        @wraps(main)
        def run(*arguments: P.args, **named: P.kwargs) -> int:
            os.umask(0o077)
            try:
                return main(*arguments, **named) or 0
            except stopping as error:
                print(f"error: {error}", file=sys.stderr)
                return 2

        return run

    return decorate


@contextmanager
def importing() -> Iterator[None]:
    """Leave modules out of garbage collections, which would take a tenth of the start; let threads give way soon."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
    sys.setswitchinterval(_SWITCH_S)


def hide_module(name: str) -> None:
    """Let imports of a module fail from now on, as where it is not installed."""
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # see Python's reference, "The import system"
