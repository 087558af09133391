"""Settings of the Python interpreter for a process that steps, applied once its model is loaded."""

from __future__ import annotations

import gc
import sys

# Interval in seconds at which threads are switched. Python's default of 5 ms makes a step, whose thread lets go of the
# interpreter for every torch operator, wait that long for a thread that loads an adapter.
_SWITCH_S = 1e-4


def freeze_gc() -> None:
    """Exclude all present objects from garbage collection, a full run of which takes 300 ms; switch threads often."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)
