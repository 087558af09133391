"""A disk of a few MiB, which can really be full. Needs the right to mount; without it, its tests are skipped."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

SmallDisk: TypeAlias = Callable[[int], Path]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """`small_disk(size)` returns the directory of an empty disk of `size` bytes."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        directory = tmp_path / f"disk-{len(mounted)}"
        directory.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(directory)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this user may not mount a small disk")
        mounted.append(directory)
        return directory

    yield mount
    for directory in mounted:
        subprocess.run(["umount", str(directory)], check=True)
