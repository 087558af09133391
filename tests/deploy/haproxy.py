"""Debian's haproxy: that of the machine, or one that is unpacked into .cache/haproxy."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_FOLDER = ROOT / ".cache" / "haproxy"
# With the libraries that a machine without haproxy may lack.
_PACKAGES = ("haproxy", "liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1")


@cache
def haproxy() -> tuple[str, dict[str, str]]:
    """Return the program and the environment that it needs; skips the test where it cannot be had."""
    if installed := shutil.which("haproxy"):
        return installed, {}
    program = _FOLDER / "root/usr/sbin/haproxy"
    if not program.exists():
        _FOLDER.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(
                ("apt-get", "download", *_PACKAGES), cwd=_FOLDER, check=True, capture_output=True, timeout=60
            )
            for package in _FOLDER.glob("*.deb"):
                subprocess.run(("dpkg", "-x", package, _FOLDER / "root"), check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            pytest.skip("haproxy is not installed, and apt-get cannot download it")
    libraries = ":".join(sorted({str(path.parent) for path in (_FOLDER / "root/usr/lib").rglob("*.so.*")}))
    environment = {"LD_LIBRARY_PATH": f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")}
    if subprocess.run((program, "-v"), env=os.environ | environment, capture_output=True, check=False).returncode:
        pytest.skip("haproxy of .cache/haproxy does not run here")
    return str(program), environment
