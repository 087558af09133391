"""A real Valkey of a test's own, at an address that stays the same whatever happens to it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path

from redis.asyncio import Redis

from loraplex.cli import valkey
from loraplex.contracts.broker.connection import connect
from loraplex.runtime.rpc.children.process import Process
from tests.free_ports import free_port


class ValkeyServer:
    """A server in `directory`, which must be short enough for a socket's path."""

    def __init__(self, directory: Path, *flags: str, program: str | None = None) -> None:
        """`program`: another server that speaks Redis, instead of Valkey from the wheel."""
        self._directory = directory
        self._program = program
        self._flags = flags
        self._process: Process | None = None
        self.url = valkey.socket_url(directory)
        self.port = free_port()  # replicas need one

    async def start(self) -> None:
        """Run it, until `kill`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        flags = ["--bind", "127.0.0.1", "--port", str(self.port), "--repl-diskless-sync-delay", "0"]
        flags += self._flags
        binary, *settings = valkey.command(self._directory)
        command = [self._program or binary, *settings, *flags]
        log_path = self._directory / "valkey.log"
        self._process = await Process.start("valkey", command, log_path=log_path, ready=valkey.READY)
        await self._process.wait_ready()

    @property
    def process(self) -> Process:
        """While it runs."""
        assert self._process is not None, "start() comes first"
        return self._process

    async def client(self) -> Redis:
        """A client of this server, wherever its address leads."""
        return await connect(self.url)

    async def kill(self) -> None:
        """SIGKILL; returns when it has ended."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            await self._process.kill()
            self._process = None

    async def restart(self, *, keeps: bool) -> None:
        """Kill it and run it again, with its data or empty."""
        dump = self._directory / "dump.rdb"
        dump.unlink(missing_ok=True)
        if keeps:
            async with await self.client() as client:
                await client.save()
        await self.kill()
        await self.start()

    def hang(self) -> None:
        """Stop the server: it answers nobody, though connections stay."""
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let the server go on."""
        self.process.send_signal(signal.SIGCONT)

    async def follow(self, primary: ValkeyServer) -> None:
        """Become a replica; returns when all that the primary has is here."""
        async with await self.client() as here, await primary.client() as there:
            await here.replicaof("127.0.0.1", str(primary.port))
            mark = secrets.token_bytes(8)
            await there.set("test:mark", mark)
            async with asyncio.timeout(30):
                while await here.get("test:mark") != mark:  # noqa: ASYNC110 — nobody tells
                    await asyncio.sleep(0.02)

    async def lead(self) -> None:
        """Become a primary, with what has come by now."""
        async with await self.client() as here:
            await here.replicaof("NO", "ONE")


class MovingAddress:
    """A socket's path that leads to one server, and after a failover to another."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._link = directory / "valkey.sock"
        self.url = valkey.socket_url(directory)

    def lead_to(self, server: ValkeyServer) -> None:
        """Lead whoever connects from now on to this server."""
        fresh = self._link.with_suffix(".new")
        fresh.symlink_to(server.url.removeprefix("unix://"))
        os.replace(fresh, self._link)
