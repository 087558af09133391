"""Debian's Redis 7.0, the oldest server that the documentation names."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[1] / ".cache" / "redis"
_PACKAGES = ("redis-server", "redis-tools", "liblzf1", "libjemalloc2", "libatomic1")
# Timeout in seconds for the download of 3 MB, and for unpacking a package.
_PACKAGE_S = 60


def redis_program() -> str:
    """Return the path of redis-server, which is downloaded once unless it is installed; skips the test without it."""
    if (installed := shutil.which("redis-server")) is not None:
        return installed
    _FOLDER.mkdir(parents=True, exist_ok=True)
    program = _FOLDER / "redis-server"
    with (_FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not program.exists():
                _download(program)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"redis-server is not installed, and Debian's package cannot be downloaded: {error}")
    return str(program)


def _download(program: Path) -> None:
    """Unpack Debian's packages, and write a script that runs the server with their libraries."""
    download = ["apt-get", "download", *_PACKAGES]
    subprocess.run(download, cwd=_FOLDER, check=True, capture_output=True, timeout=_PACKAGE_S)
    root = _FOLDER / "root"
    for package in _FOLDER.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, root], check=True, timeout=_PACKAGE_S)
    (library,) = root.glob("usr/lib/*/liblzf.so.1")
    script = program.with_suffix(".new")
    here, libraries = 'root=$(dirname "$0")/root', f"$root/{library.parent.relative_to(root)}"
    script.write_text(f'#!/bin/sh\n{here}\nLD_LIBRARY_PATH={libraries} exec "$root/usr/bin/redis-server" "$@"\n')
    script.chmod(0o755)
    script.rename(program)
