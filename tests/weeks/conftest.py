"""One cluster with credentials, for all who do their week at it, each with commands of the pages.

    loraplex up --secured: a store and a router with audit logs, two workers of the hash model
    its operator, an auditor, the administrators of two tenants: a Person each, who types `loraplex ...`

A step is a line as a page has it, what it must print, or the code and the sentence with which it is refused. The weeks
share the cluster and may come in any order: each uses keys, adapters and tenants of its own.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loraplex.__main__ import PROCESSES
from loraplex.cli.__main__ import main
from loraplex.cli.development_ca import write_private
from tests.clients.gateway.oidc_provider import CLIENT, SECRET, Provider, running

# Maximum time in seconds until a change is known everywhere: a key to routers, a record to the disk.
_KNOWN_S, _LOOK_S = 30.0, 0.1
TEAMS = """
tenants:
  acme:
    plan: {tokens_per_day: 2000000, adapters: 1}
    keys: {admin: {role: tenant-admin}}
  globex:
    keys: {admin: {role: tenant-admin}, app: {}}
"""


@dataclass(frozen=True)
class Person:
    """Somebody at a terminal in `directory`, with a credential and the addresses that they were given."""

    directory: Path
    environ: Mapping[str, str]

    def run(self, line: str, code: int = 0) -> str:
        """Type a line; return what it prints, or the error where its exit code is to be another one than 0."""
        ended, out, err = self._run(line)
        assert ended == code, f"{line}\n{out}{err}"
        return err if code else out

    def tries(self, line: str) -> str:
        """Type a line that may be refused yet; return what it prints, or nothing."""
        ended, out, _ = self._run(line)
        return "" if ended else out

    def _run(self, line: str) -> tuple[int | str | None, str, str]:
        """Run the command in this process, as its start takes most of a second; one that is a process as a process."""
        words = shlex.split(line)
        assert words[0] == "loraplex"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
        environ |= self.environ
        if words[1] in {*PROCESSES, "backup"}:
            command = [sys.executable, "-m", *words]
            done = subprocess.run(command, cwd=self.directory, env=environ, capture_output=True, text=True, check=False)
            return done.returncode, done.stdout, done.stderr
        out, err, ended = io.StringIO(), io.StringIO(), None
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(self.directory)
            for name in os.environ.keys() - environ.keys():
                patch.delenv(name)
            for name, value in environ.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", words)
            try:
                main()
            except SystemExit as end:
                ended = end.code
        return ended, out.getvalue(), err.getvalue()

    def json(self, line: str) -> Any:
        """Type a line with --json; return its values."""
        return json.loads(self.run(f"{line} --json"))

    def refused(self, line: str, *sentences: str) -> None:
        """Type a line that is refused with an exit code of 2, in one line that has these parts."""
        error = self.run(line, 2)
        assert error.count("\n") == 1, error
        for sentence in sentences:
            assert sentence in error, (line, error)


@dataclass(frozen=True)
class Workplace:
    """The cluster: the files of `loraplex up --secured`, and addresses for those outside and for operators."""

    directory: Path
    router: str
    store: str
    router_of_operators: str
    store_of_operators: str
    # Where people sign in: the file of issuers, and the provider in it.
    issuers: Path
    provider: Provider

    @property
    def secured(self) -> Path:
        """Return the folder of certificates, keys and data."""
        return self.directory / "secured"

    def person(self, name: str, key: Path, *, operates: bool = False) -> Person:
        """Return somebody with a key, who has a folder of their own, and reaches operators' ports or tenants'."""
        directory = self.directory / name
        directory.mkdir(exist_ok=True)
        router = self.router_of_operators if operates else self.router
        store = self.store_of_operators if operates else self.store
        credential = {"LORAPLEX_CA": str(self.secured / "ca.pem"), "LORAPLEX_API_KEY_FILE": str(key)}
        return Person(directory, {**credential, "LORAPLEX_ADDRESS": router, "LORAPLEX_STORE_ADDRESS": store})

    @property
    def operator(self) -> Person:
        """Return the operator, with the first key."""
        return self.person("operator", self.secured / "first-operator.key", operates=True)

    def administrator(self, tenant: str) -> Person:
        """Return the administrator of a tenant of TEAMS."""
        return self.person(tenant, self.secured / "keys" / f"{tenant}-admin.key")


def until(is_so: Callable[[], Any], what: str) -> None:
    """Look until something is so, which another process brings about."""
    ends = time.monotonic() + _KNOWN_S
    while not is_so():
        assert time.monotonic() < ends, what
        time.sleep(_LOOK_S)


def write_issuers(path: Path, provider: Provider) -> None:
    """Write a file of issuers as docs/guides/security.md has it: who leads acme is its administrator."""
    write_private(path.with_name("secret"), f"{SECRET}\n".encode())
    path.with_name("jwks.json").write_text(json.dumps(provider.keys()))
    issuer = {
        "issuer": provider.issuer,
        "jwks": str(path.with_name("jwks.json")),
        "audience": [CLIENT],
        "groups": "groups",
        "rules": [{"group": "acme-leads", "role": "tenant-admin", "tenant": "acme"}],
        "sign_in": {"client_id": CLIENT, "client_secret_file": str(path.with_name("secret")), "scope": "openid groups"},
    }
    path.write_text(json.dumps({"issuers": [issuer]}))


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """Run the cluster."""
    directory = tmp_path_factory.mktemp("weeks")
    (directory / "teams.yaml").write_text(TEAMS)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    environ["LORAPLEX_ADAPTER_STORE_AUDIT"] = str(directory / "store.jsonl")
    environ["LORAPLEX_ROUTER_AUDIT"] = str(directory / "router.jsonl")
    environ["LORAPLEX_ROUTER_USAGE_FILE"] = str(directory / "usage.jsonl")
    issuers = directory / "issuers.json"
    environ["LORAPLEX_ROUTER_JWT_ISSUERS"] = environ["LORAPLEX_ADAPTER_STORE_JWT_ISSUERS"] = str(issuers)
    provider = Provider({"lee": {"groups": ["acme-leads"]}, "guest": {"groups": ["chess"]}})
    with ExitStack() as stack:
        stack.enter_context(running(provider))
        write_issuers(issuers, provider)
        yield stack.enter_context(_cluster(directory, environ, issuers, provider))


@contextmanager
def _cluster(directory: Path, environ: Mapping[str, str], issuers: Path, provider: Provider) -> Iterator[Workplace]:
    """Run `loraplex up`."""
    line = "loraplex up --model hash:? --name tiny --workers 2 --secured secured --tenants teams.yaml"
    command = [sys.executable, "-m", *line.split(), "--port", "0", "--store-port", "0"]
    with (
        (directory / "up.log").open("w") as log,
        subprocess.Popen(command, cwd=directory, env=environ, stdout=subprocess.PIPE, stderr=log, text=True) as up,
    ):
        assert up.stdout is not None
        try:
            said: dict[str, dict[str, str]] = {}
            while "logs" not in said:
                words = up.stdout.readline().split()
                assert words, (directory / "up.log").read_text()
                said[words[0]] = dict(word.split("=") for word in words[1:] if "=" in word)
            ready, operators = said["ready"], said["operators"]
            addresses = ready["router"], ready["store"], operators["router-1"], operators["store"]
            yield Workplace(directory, *addresses, issuers, provider)
        finally:
            up.send_signal(signal.SIGINT)
            up.communicate(timeout=60)
    assert up.returncode == 0
