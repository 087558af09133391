"""Files that a process follows: it reads them again when they change."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from loraplex.runtime.telemetry.logging import LogOnce

T = TypeVar("T")

log = logging.getLogger(__name__)

# Interval in seconds between looks of callers that would look at every request: a look takes some 2 us for each file.
LOOK_S = 0.2
# Time in seconds after which files that could not be used are read again though they look the same: a process that has
# no descriptor left may be the reason.
AGAIN_S = 5.0


class FollowedFiles(Generic[T]):
    """The content of files, as `read` returns it; the former one stays while they cannot be used.

    `read` raises OSError or `error`. Raises `error` where they cannot be used at first, with a message that begins with
    `flags`.
    """

    def __init__(
        self, flags: str, paths: Sequence[Path], read: Callable[[], T], error: type[Exception] = ValueError
    ) -> None:
        self._flags, self._paths, self._read, self._error = flags, paths, read, error
        self._stamps: list[tuple[int, ...]] | None = None
        self._looked_at, self._again_at = time.monotonic(), math.inf
        self._once = LogOnce(log)
        self._read_if_changed()
        # Grows when the files have been read again.
        self.version = 0

    def look(self, *, recent: bool = False) -> bool:
        """Read the files again if they have changed, or some time after a fault; return whether there is new content.

        With `recent` a look within the last LOOK_S seconds is enough: then the answer is no.
        """
        now = time.monotonic()
        if recent and now - self._looked_at < LOOK_S:
            return False
        self._looked_at = now
        try:
            if not self._read_if_changed():
                return False
        except self._error as error:  # of several files one may have been replaced, and the others follow
            self._again_at = now + AGAIN_S
            self._once(f"the former content stays: {error}")
            return False
        self._once.reset()
        self.version += 1
        log.info("read %s again", self._flags)
        return True

    def _read_if_changed(self) -> bool:
        try:
            stamps = [_stamp(path) for path in self._paths]
            if stamps == self._stamps and time.monotonic() < self._again_at:
                return False
            self._stamps, self._again_at = stamps, math.inf
            self.content = self._read()
        except OSError as error:  # ssl.SSLError too
            name = f"{error.filename}: " if error.filename and len(self._paths) > 1 else ""
            raise self._error(f"{self._flags}: {name}{error.strerror or error}") from error
        return True


def is_private(path: Path) -> bool:
    """Tell whether only a file's owner may read it."""
    return not os.stat(path).st_mode & 0o077


def _stamp(path: Path) -> tuple[int, ...]:
    """Return numbers of a file that change with its content.

    A file written in two parts may have one time, so the size is among them; the last changes with owner and mode too.
    """
    stat = os.stat(path)
    return stat.st_mtime_ns, stat.st_ino, stat.st_size, stat.st_ctime_ns
