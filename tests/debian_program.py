"""Programs from Debian's packages, for tests of what users run beside Loraplex."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest

_CACHE = Path(__file__).parents[1] / ".cache" / "debian"
# Packages of each program, with the libraries that a machine may lack.
_PACKAGES = {
    "haproxy": ("haproxy", "liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1"),
    "promtool": ("prometheus",),
    "redis-server": ("redis-server", "redis-tools", "liblzf1", "libjemalloc2", "libatomic1"),
}
# Timeout in seconds for the download of twenty megabytes, and for unpacking a package.
_PACKAGE_S = 60


def debian_program(name: str) -> str:
    """Return the path of a program, downloaded once unless it is installed; skips the test where it cannot be had."""
    if (installed := shutil.which(name)) is not None:
        return installed
    folder = _CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "run"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not program.exists():
                _download(name, program)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"{name} is not installed, and Debian's package cannot be downloaded or run: {error}")
    return str(program)


def _download(name: str, program: Path) -> None:
    """Unpack the packages, and write a script that runs the program with their libraries."""
    folder = program.parent
    download = ["apt-get", "download", *_PACKAGES[name]]
    subprocess.run(download, cwd=folder, check=True, capture_output=True, timeout=_PACKAGE_S)
    root = folder / "root"
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, root], check=True, timeout=_PACKAGE_S)
    (binary,) = root.glob(f"usr/*bin/{name}")
    libraries = {path.parent.relative_to(root) for path in (root / "usr/lib").rglob("*.so.*")}
    found = ":".join(f"$root/{library}" for library in sorted(libraries))
    script = program.with_suffix(".new")
    script.write_text(
        f'#!/bin/sh\nroot=$(dirname "$0")/root\nLD_LIBRARY_PATH={found} exec "$root/{binary.relative_to(root)}" "$@"\n'
    )
    script.chmod(0o755)
    version = "--version" if name == "promtool" else "-v"
    subprocess.run([script, version], check=True, capture_output=True, timeout=_PACKAGE_S)
    script.rename(program)
