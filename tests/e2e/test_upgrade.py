"""A running cluster of the last version is upgraded part by part under load: no request fails, each token is right.

The order is that of CHANGELOG.md. `make upgrade` installs the last version and runs this.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from loraplex.cli.local import ClusterSettings, LocalCluster
from loraplex.contracts.broker.acl import ROLES, read_passwords, rules
from loraplex.contracts.broker.functions import LIBRARY, load
from loraplex_client import AsyncClient
from tests.e2e.test_rolling_restart import CLIENTS, MODEL, Load


class UpgradedCluster(LocalCluster):
    """A cluster whose processes are of the version that is installed in `former`, until that is None."""

    def __init__(self, settings: ClusterSettings, former: Path) -> None:
        super().__init__(settings)
        self.former: Path | None = former

    async def _spawn(self, name: str, argv: list[str], environ: dict[str, str] | None = None) -> None:
        if environ is None or self.former is None:  # Valkey, or of the new version
            await super()._spawn(name, argv, environ)
            return
        await super()._spawn(name, argv, {**environ, "PYTHONPATH": str(self.former)})
        self._commands[name] = (argv, environ)  # of its successor

    async def renew(self, name: str) -> None:
        """Stop a process and start its successor at the same address."""
        self.kill(name, signal.SIGTERM)
        assert await self.processes[name].exited == 0
        await self.restart(name)
        await self.wait_serving()


@pytest.fixture
def former() -> Path:
    """Return the folder in which `make upgrade` has installed the last version."""
    if not (folder := os.environ.get("UPGRADE_FROM")):
        pytest.skip("takes a minute, and the last version: `make upgrade` runs it")
    environ = {**os.environ, "PYTHONPATH": folder, "PYTHONSAFEPATH": "1"}
    modules = "loraplex.router, loraplex.relay.v1.relay_pb2"
    script = f"import {modules}; print(*(module.__file__ for module in ({modules})))"
    run = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, check=True, text=True)
    assert [path for path in run.stdout.split() if not path.startswith(folder)] == []
    return Path(folder)


async def test_an_upgrade_part_by_part_fails_no_request(
    former: Path,
    start_cluster: Callable[..., AbstractAsyncContextManager[Any]],
    hash_adapters: Mapping[str, Path],
    eventually: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LORAPLEX_ROUTER_DRAIN_S", "0.5")
    monkeypatch.setenv("LORAPLEX_ROUTER_RESUME_KEY", "")  # the routers have the one that they keep in Redis
    flags = ("--rows", "16", "--drain-s", "0.5")
    launch = partial(UpgradedCluster, former=former)
    async with start_cluster(MODEL, hash_adapters, workers=2, routers=2, worker_flags=flags, launch=launch) as cluster:
        local: UpgradedCluster = cluster.local
        async with AsyncClient(",".join(local.routers), "acme") as client:
            load_of_clients = Load(client, cluster.digests)
            await load_of_clients.more(CLIENTS)
            local.former = None
            await _apply_users(cluster.redis, Path(local.redis_url.removeprefix("unix://")).parent)
            await local.renew("store")
            await load_of_clients.more(1)
            for name in ("worker-1", "worker-2"):
                await local.processes[await local.start_worker()].wait_ready()
                await load_of_clients.long_begins()
                local.kill(name, signal.SIGTERM)
                assert await local.processes[name].exited == 0
            for name in ("router-1", "router-2"):
                await load_of_clients.long_begins()
                await local.renew(name)
            await cluster.redis.acl_log_reset()  # former routers look at types of keys, where they may
            await load_of_clients.more(CLIENTS)
            await load_of_clients.end()
        print(f"{load_of_clients.answers} answers, {load_of_clients.continuations} continuations")
        assert load_of_clients.continuations > 0
        await eventually(cluster.idle)


async def _apply_users(redis: Redis, directory: Path) -> None:
    """Do what the new version's `loraplex redis acl --apply` does, but leave the launcher's default user on."""
    passwords = await asyncio.to_thread(read_passwords, directory, list(ROLES))
    for user in ROLES:
        values = rules(user, ["*"], ["*"], passwords[user])
        await redis.execute_command("ACL SETUSER", user, "reset", *values)  # type: ignore[no-untyped-call]  # theirs
    await load(redis, LIBRARY)
