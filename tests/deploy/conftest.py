"""Fixtures of the launcher's tests: nothing that a test started may be left when it ends."""

from __future__ import annotations

import os
import select
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

Leftovers = Callable[[], list[str]]
_MARK = "LAUNCHER_TEST"
_GONE_MS = 20_000


@pytest.fixture(autouse=True)
def short_temp_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary directories are made in one of the test's own, with a path short enough for sockets."""
    assert tmp_path.exists()  # pytest has chosen its own directory before
    with tempfile.TemporaryDirectory(prefix="lx-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


@pytest.fixture
def leftovers(monkeypatch: pytest.MonkeyPatch, short_temp_dir: Path) -> Leftovers:
    """Lists what the test left: processes that inherited its mark and are not ending, and temporary files."""
    mark = uuid4().hex
    monkeypatch.setenv(_MARK, mark)

    def found() -> list[str]:
        processes = [f"process {pid}" for pid in _marked(mark) if not _ends(pid)]
        return processes + [str(path) for path in short_temp_dir.iterdir()]

    return found


def _marked(mark: str) -> list[int]:
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it ended meanwhile
                if f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    pids.append(int(entry.name))
    return pids


def _ends(pid: int) -> bool:
    """Return whether the process ends; one that was just killed may need a moment."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(_GONE_MS))
    finally:
        os.close(descriptor)
