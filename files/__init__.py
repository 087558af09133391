"""Files that a process watches: whether they have changed since they were last read."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

# Interval in seconds between looks of callers that would look at every request: a look takes some 2 us for each file.
LOOK_S = 0.2
# Time in seconds after which files that could not be used are read again though they look the same: a process that has
# no descriptor left may be the reason.
AGAIN_S = 5.0

_Stamp = tuple[int, int, int, int]


class WatchedFiles:
    """Files that their reader reads again whenever `changed` says so."""

    def __init__(self, *paths: str | Path) -> None:
        self._paths = paths
        self._stamps: list[_Stamp] | None = None
        self._looked_at = -math.inf
        self._again_at = math.inf

    def changed(self, *, recent: bool = False) -> bool:
        """Tell whether to read the files: at first, where one is another, some time after `failed`. Raises OSError.

        With `recent` a look within the last LOOK_S seconds is enough: then the answer is no.
        """
        now = time.monotonic()
        if recent and now - self._looked_at < LOOK_S:
            return False
        self._looked_at = now
        stamps = [_stamp(path) for path in self._paths]
        if stamps == self._stamps and now < self._again_at:
            return False
        self._stamps, self._again_at = stamps, math.inf
        return True

    def failed(self) -> None:
        """Note that the files could not be used as they are."""
        self._again_at = time.monotonic() + AGAIN_S


def _stamp(path: str | Path) -> _Stamp:
    """Return numbers of a file of which one is another when its content is.

    With the size, since a file that is written in two parts may have one time. The last is the time of a change of
    owner or mode too, after which a file may be readable.
    """
    stat = os.stat(path)
    return stat.st_mtime_ns, stat.st_ino, stat.st_size, stat.st_ctime_ns
