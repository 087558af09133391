"""Environments of their own for programs of others, and a cluster that is run as a user does."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.trials.libraries.library import ROOT

# Messages of pip and npm that mean: the registry cannot be reached.
_UNREACHABLE = re.compile(r"Retry\(total=0|ECONNREFUSED|ENOTFOUND|EAI_AGAIN|ETIMEDOUT|ENETUNREACH")


class InstallError(Exception):
    """A program could not be installed; `unreachable` where its registry cannot be reached."""

    def __init__(self, why: str, *, unreachable: bool = False) -> None:
        super().__init__(why)
        self.unreachable = unreachable


def install(directory: Path, packages: Sequence[str], program: str = "python") -> str:
    """Install packages, unless they are installed already; return the program that runs them. Raises InstallError.

    `program`: python, of a virtual environment, or node or java, of this machine.
    """
    interpreter = str(directory / "bin/python") if program == "python" else shutil.which(program)
    if interpreter is None:
        raise InstallError(f"{program} is not on the PATH")
    directory.mkdir(parents=True, exist_ok=True)
    if not packages:
        return interpreter
    stamp, listed = directory / "packages.txt", "\n".join(packages)
    if stamp.exists() and stamp.read_text() == listed:
        return interpreter
    print(f"installing {packages[0]} into {directory.relative_to(ROOT)} ...", file=sys.stderr, flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if program == "node":
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(directory)]
    else:
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        command = [interpreter, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    try:
        done = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise InstallError(f"{command[0]} is not on the PATH") from None
    if done.returncode:
        if _UNREACHABLE.search(done.stderr):
            raise InstallError("the package registry cannot be reached", unreachable=True)
        raise InstallError(f"not installed: {_reason(done.stderr)}")
    stamp.write_text(listed)
    return interpreter


def _reason(output: str) -> str:
    """Return the first lines of a failed installation that tell its error."""
    lines = [line for line in output.splitlines() if line.lower().startswith(("error", "npm error"))]
    return " ".join(lines[:2])[:300] or "no reason given"


@asynccontextmanager
async def running_cluster(*flags: str) -> AsyncIterator[Mapping[str, str]]:
    """Run `loraplex up` with a gateway; yields the addresses of `router`, `store` and `http`."""
    command = [sys.executable, "-m", "loraplex.cli", "up", "--http", "0", "--port", "0", "--store-port", "0", *flags]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    up = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environ, stdout=PIPE, stderr=DEVNULL)
    try:
        assert up.stdout is not None
        async for line in up.stdout:
            if line.startswith(b"ready "):
                yield dict(word.split("=") for word in line.decode().split()[1:])
                break
        else:
            raise SystemExit(f"error: `loraplex up {' '.join(flags)}` did not start; run it to see why")
    finally:
        if up.returncode is None:
            up.send_signal(signal.SIGINT)
        await up.communicate()
