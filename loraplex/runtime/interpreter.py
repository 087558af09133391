"""Sets the Python interpreter up for processes with an event loop: garbage collections, switches between threads."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Interval in seconds after which a thread with long work gives way to the event loop; Python's own is 5 ms, which each
# turn of the loop would wait.
_SWITCH_S = 2e-4


@contextmanager
def importing() -> Iterator[None]:
    """Leave modules out of garbage collections, which would take a tenth of the start; let threads give way soon."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
    sys.setswitchinterval(_SWITCH_S)
