"""A reader of strangers' bytes to fuzz."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from loraplex.runtime.rpc.errors import Internal

# Maximum processor time in seconds of one read.
READ_S = 1.0


class SlowError(Exception):
    """A read that takes longer than READ_S."""


@dataclass(frozen=True)
class Target:
    """A reader. `refusals` are the errors that servers turn into a clean status; `words` help to make texts."""

    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()
    # Changes a few fields of what the bytes hold, by a seeded draw; None: the bytes have no fields.
    change: Callable[[bytes, Random], bytes] | None = None

    def try_out(self, data: bytes) -> None:
        """Read the data. Raises SlowError, and what is no refusal."""
        began = time.thread_time()
        try:
            self.read(data)
        except Internal:
            raise
        except self.refusals:
            pass
        took = time.thread_time() - began
        if took > READ_S:
            raise SlowError(f"{took:.2f} s for {len(data)} bytes")
