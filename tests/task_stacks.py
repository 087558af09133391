"""A report of where asyncio's tasks wait, added to every test that failed by its timeout.

A plugin of the test suite (see conftest.py). The traceback of a timeout shows the event loop alone, which waits for
sockets; the test's own lines are in the frames of the suspended coroutines.
"""

from __future__ import annotations

import asyncio
import gc
import linecache
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the section to the report of a test that ran into its timeout."""
    report = yield
    if call.excinfo is not None and "from pytest-timeout" in str(call.excinfo.value):
        report.sections.append(("tasks of asyncio", "\n".join(waiting_tasks())))
    return report


def waiting_tasks() -> Iterator[str]:
    """Yield a line for each task that has not ended, and one for each frame of it, outermost first.

    The garbage collector finds the tasks, whichever loop they belong to.
    """
    # isinstance would ask weak references for the class of what is gone.
    for task in [found for found in gc.get_objects() if issubclass(type(found), asyncio.Task)]:
        if not task.done():
            yield repr(task.get_name())
            for frame in _frames(task.get_coro()):
                # A frame between two lines has no number.
                name, line = frame.f_code.co_filename, frame.f_lineno or 0
                yield f"  {name}:{line} in {frame.f_code.co_name}: {linecache.getline(name, line).strip()}"


def _frames(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of all that it awaits, as far as Python tells."""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            return
        yield frame
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
