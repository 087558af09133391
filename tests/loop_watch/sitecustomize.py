"""Measure how long each process holds its event loop; Python imports this module at its start from PYTHONPATH.

LOOP_HOLDS names a directory. From its line `ready` on, each process with an event loop appends a line to its own file
there for every time that the loop went on late: JSON with the processor time of the loop's thread in ms, and the stack
that a look from another thread found meanwhile. Processor time leaves out waiting, for other processes and for the
interpreter's lock.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

# Interval in seconds of the beats: what is measured includes so much other work of a busy loop.
_BEAT_S = 0.01
# Least processor time in ms that is reported.
_LEAST_MS = 20.0


class _Watch:
    def __init__(self, directory: Path) -> None:
        self._file = directory / f"{os.getpid()}.jsonl"
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        self._stack: list[str] = []
        self.ready = False
        # Times of the last beat: processor time of the loop's thread, and of the monotonic clock.
        self._cpu, self._at = time.thread_time(), time.monotonic()
        self._loop.call_later(_BEAT_S, self._beat)
        threading.Thread(target=self._look, daemon=True).start()

    def _beat(self) -> None:
        now = time.thread_time()
        held_ms = 1e3 * (now - self._cpu)
        if held_ms > _LEAST_MS and self.ready:
            line = {"held_ms": round(held_ms, 1), "argv": sys.argv[:3], "stack": self._stack}
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")
        self._cpu, self._at, self._stack = time.thread_time(), time.monotonic(), []
        self._loop.call_later(_BEAT_S, self._beat)

    def _look(self) -> None:
        while not self._loop.is_closed():
            time.sleep(_BEAT_S)
            if not self._stack and time.monotonic() - self._at > _LEAST_MS / 1e3:
                frame = sys._current_frames().get(self._thread)
                self._stack = [f"{part.filename}:{part.lineno} {part.name}" for part in traceback.extract_stack(frame)]


def _watched(run: Any) -> Any:
    async def watched(main: Any) -> Any:
        watch = _Watch(Path(os.environ["LOOP_HOLDS"]))

        def show(*values: Any, **options: Any) -> None:
            watch.ready = watch.ready or str(values[:1]).startswith("('ready")
            shows(*values, **options)

        shows, builtins.print = builtins.print, show
        return await main

    return lambda self, main, **kwargs: run(self, watched(main), **kwargs)


if "LOOP_HOLDS" in os.environ and "pytest" not in sys.argv[0]:
    asyncio.Runner.run = _watched(asyncio.Runner.run)  # type: ignore[method-assign]
