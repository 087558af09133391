"""`make clients`: installs client libraries, each in an environment of its own, and tries them with a real cluster."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.libraries.library import LIBRARIES, ROOT, Library

ENVIRONMENTS = ROOT / ".cache/clients"
# The adapter that answers: a shipped one, with a chat template that renders tools, as the model's does not.
ADAPTER = ROOT / "examples/adapters/acme/shout"
TEMPLATE = ROOT / "tests/router/text/families/hermes.jinja"
MODEL = "shout"
# What pip and npm say once their last try to reach a registry has failed.
_UNREACHABLE = re.compile(r"Retry\(total=0|ECONNREFUSED|ENOTFOUND|EAI_AGAIN|ETIMEDOUT|ENETUNREACH")


class InstallError(Exception):
    """A library could not be installed; `unreachable` where its registry cannot be reached."""

    def __init__(self, why: str, *, unreachable: bool = False) -> None:
        super().__init__(why)
        self.unreachable = unreachable


def install(library: Library) -> str:
    """Install a library's packages, unless they are installed already; return its interpreter. Raises InstallError."""
    directory = ENVIRONMENTS / library.name
    interpreter = shutil.which("node") if library.is_node else str(directory / "bin/python")
    if interpreter is None:
        raise InstallError("node is not on the PATH")
    stamp, packages = directory / "packages.txt", "\n".join(library.packages)
    if stamp.exists() and stamp.read_text() == packages:
        return interpreter
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if library.is_node:
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(directory)]
    else:
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        command = [interpreter, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    try:
        done = subprocess.run([*command, *library.packages], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise InstallError(f"{command[0]} is not on the PATH") from None
    if done.returncode:
        if _UNREACHABLE.search(done.stderr):
            raise InstallError("the package registry cannot be reached", unreachable=True)
        raise InstallError(f"not installed: {_reason(done.stderr)}")
    stamp.write_text(packages)
    return interpreter


def _reason(output: str) -> str:
    """Return the first lines of a failed installation that tell its error."""
    lines = [line for line in output.splitlines() if line.lower().startswith(("error", "npm error"))]
    return " ".join(lines[:2])[:300] or "no reason given"


@asynccontextmanager
async def gateway() -> AsyncIterator[str]:
    """Run a cluster as a user does; yields its gateway's address."""
    with tempfile.TemporaryDirectory(prefix="loraplex-clients-") as directory:
        adapter = shutil.copytree(ADAPTER, Path(directory) / "adapters" / MODEL)
        shutil.copy(TEMPLATE, adapter / "chat_template.jinja")
        # In float32 greedy answers do not depend on what a prefix cache has.
        flags = "--model examples/model --dtype float32 --http 0 --port 0 --store-port 0"
        command = [sys.executable, "-m", "clients.cli", "up", *flags.split(), "--adapters", str(adapter.parent)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
        up = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environ, stdout=PIPE, stderr=DEVNULL)
        try:
            assert up.stdout is not None
            async for line in up.stdout:
                if line.startswith(b"ready "):
                    yield "http://" + dict(word.split("=") for word in line.decode().split()[1:])["http"]
                    break
            else:
                raise SystemExit("error: `loraplex up --model examples/model` did not start; run it to see why")
        finally:
            if up.returncode is None:
                up.send_signal(signal.SIGINT)
            await up.communicate()


async def main(names: Sequence[str]) -> int:
    """Try the libraries of these names, or all; print a table, and return 1 if a scenario failed."""
    failed, chosen = False, [library for library in LIBRARIES if not names or library.name in names]
    row = f"{{:{max(len(library.name) for library in chosen)}}}  {{:8}}  {{:17}}  {{}}"
    print(row.format("library", "version", "scenario", "result"), flush=True)
    async with gateway() as url:
        for library in chosen:
            try:
                interpreter = await asyncio.to_thread(install, library)
            except InstallError as error:
                failed = failed or not error.unreachable
                print(row.format(library.name, library.version, "-", error), flush=True)
                continue
            directory = ENVIRONMENTS / library.name
            outcomes = await library.outcomes(interpreter, directory, url, MODEL)
            for scenario, why in outcomes.items():
                first = " ".join(why.split())[:300]
                print(row.format(library.name, library.version, scenario, first or "ok"), flush=True)
            if any(outcomes.values()):
                failed = True
                print(f"see {(directory / 'script.log').relative_to(ROOT)}")
    return int(failed)


def _names(text: str) -> list[str]:
    """Return the names of libraries, which commas separate."""
    names = [name for name in text.split(",") if name]
    known = [library.name for library in LIBRARIES]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(known)}")
    return names


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.libraries", description=__doc__)
    parser.add_argument("--only", type=_names, default=[], metavar="NAME,NAME", help="these libraries alone")
    sys.exit(asyncio.run(main(parser.parse_args().only)))
