"""Settings of the Python interpreter for a process that steps: while it starts, and once its model is loaded."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Interval in seconds at which threads are switched. Python's default of 5 ms makes a step, whose thread lets go of the
# interpreter for every torch operator, wait that long for a thread that loads an adapter.
_SWITCH_S = 1e-4


@contextmanager
def without_gc() -> Iterator[None]:
    """Import without garbage collection: the modules of torch and transformers stay, and looking for garbage among them
    takes a sixth of the time. Later collections leave them out.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_gc() -> None:
    """Exclude all present objects from garbage collection, a full run of which takes 300 ms; switch threads often."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)
