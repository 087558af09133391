"""Test the changes of files that are seen: their content, their size alone, another file in their place, their mode."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loraplex.runtime.files import AGAIN_S, LOOK_S, FollowedFiles


def follow(*paths: Path) -> FollowedFiles[list[str]]:
    """Follow files with texts, of which `bad` is a fault."""

    def read() -> list[str]:
        texts = [path.read_text() for path in paths]
        if "bad" in texts:
            raise ValueError("--files: bad")
        return texts

    return FollowedFiles("--files", paths, read)


def test_each_change_is_told_once(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("a")
    second.write_text("b")
    files = follow(first, second)
    at = second.stat().st_mtime_ns
    second.write_text("longer")
    os.utime(second, ns=(at, at))  # the clock of files has ticks of some ms
    assert [files.look() for _ in range(2)] == [True, False]
    (tmp_path / "other").write_text("c")
    (tmp_path / "other").rename(first)
    assert [files.look() for _ in range(2)] == [True, False]
    first.chmod(0o400)  # the file may be readable now
    assert [files.look() for _ in range(2)] == [True, False]
    assert (files.content, files.version) == (["c", "longer"], 3)


def test_the_former_content_stays_while_a_file_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, away = tmp_path / "file", tmp_path / "away"
    with pytest.raises(ValueError, match="--files: No such file"):
        follow(path)
    path.write_text("a")
    files = follow(path)
    path.rename(away)
    assert not any(files.look() for _ in range(2))
    assert (files.content, len(caplog.records)) == (["a"], 1)
    path.write_text("b")
    assert files.look()
    assert files.content == ["b"]


def test_a_recent_look_is_enough_where_the_caller_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "file", [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    path.write_text("a")
    files = follow(path)
    path.write_text("longer")
    assert not files.look(recent=True)
    now[0] += LOOK_S
    assert files.look(recent=True)
    path.write_text("much longer")
    assert files.look()


def test_files_that_could_not_be_used_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now, refused = tmp_path / "file", [0.0], False
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    path.write_text("a")

    def read() -> str:
        if refused:
            raise OSError(24, "Too many open files")
        return path.read_text()

    files = FollowedFiles("--files", [path], read)
    path.write_text("longer")
    refused = True
    assert not files.look()
    refused = False
    assert not files.look()
    now[0] += AGAIN_S
    assert [files.look() for _ in range(2)] == [True, False]
    assert files.content == "longer"
