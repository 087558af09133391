"""Test the changes of files that are seen: their content, their size alone, another file in their place, their mode."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from files import AGAIN_S, LOOK_S, WatchedFiles


def test_each_change_is_told_once(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("a")
    second.write_text("b")
    files = WatchedFiles(first, str(second))
    assert [files.changed() for _ in range(2)] == [True, False]
    at = second.stat().st_mtime_ns
    second.write_text("longer")
    os.utime(second, ns=(at, at))  # the clock of files has ticks of some ms
    assert [files.changed() for _ in range(2)] == [True, False]
    (tmp_path / "other").write_text("c")
    (tmp_path / "other").rename(first)
    assert [files.changed() for _ in range(2)] == [True, False]
    first.chmod(0o400)  # the file may be readable now
    assert [files.changed() for _ in range(2)] == [True, False]


def test_a_file_that_is_missing_is_an_error_until_it_is_back(tmp_path: Path) -> None:
    path, away = tmp_path / "file", tmp_path / "away"
    path.write_text("a")
    files = WatchedFiles(path)
    assert files.changed()
    path.rename(away)
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            files.changed()
    path.write_text("b")
    assert files.changed()


def test_a_recent_look_is_enough_where_the_caller_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "file", [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    path.write_text("a")
    files = WatchedFiles(path)
    assert files.changed(recent=True)
    path.write_text("longer")
    assert not files.changed(recent=True)
    now[0] += LOOK_S
    assert files.changed(recent=True)
    path.write_text("much longer")
    assert files.changed()


def test_files_that_could_not_be_used_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "file", [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    path.write_text("a")
    files = WatchedFiles(path)
    assert files.changed()
    files.failed()
    assert not files.changed()
    now[0] += AGAIN_S
    assert [files.changed() for _ in range(2)] == [True, False]
