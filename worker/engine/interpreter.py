"""What a process that steps asks of Python once its model is loaded, so that no step waits for anything but itself."""

from __future__ import annotations

import gc
import sys

# Python's own is 5 ms: a step whose thread let go of the interpreter for an operator would wait so long for a loader.
_SWITCH_S = 1e-4


def settle() -> None:
    """What is there stays: to look through it again and again for garbage takes 300 ms. Threads take turns quickly."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)
