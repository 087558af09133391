"""A primary and its replica, and what can happen to them."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, ResponseError

from loraplex.cli import valkey
from loraplex.contracts.broker.connection import connect
from loraplex.runtime.rpc.children.process import Process
from tests.free_ports import free_port
from tests.trials.chaos.links import Link

DUMP = "dump.rdb"
# The primary's work of so long is gone with a restart or a failover.
LAG_S = 0.15
# Time in seconds by which the clock is ahead.
AHEAD_S = 600
# Written before what is to be kept, and before what is to be lost.
EARLIER, LATER = "chaos:earlier", "chaos:later"


class Server:
    """A Valkey server on a Unix socket, and on a port for its replica."""

    def __init__(self, directory: Path, port: int, environ: dict[str, str] | None) -> None:
        self.directory = directory
        self.port = port
        self._environ = environ

    @property
    def socket(self) -> str:
        """Return the path of the socket that clients use."""
        return str(self.directory / "valkey.sock")

    async def start(self, replica_of: Link | None = None) -> None:
        """Run it; a replica has its primary behind a link."""
        self.directory.mkdir(exist_ok=True)
        command = [*valkey.command(self.directory), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dbfilename", DUMP, "--repl-diskless-sync-delay", "0"]
        if replica_of is not None:
            command += ["--replicaof", *replica_of.address.split(":")]
        log = self.directory / "log"
        self.process = await Process.start(
            self.directory.name, command, log_path=log, environ=self._environ, ready=valkey.READY
        )
        await self.process.wait_ready()
        self.client: Redis = await connect(f"unix://{self.socket}")

    async def kill(self) -> str:
        """Kill it; the proof that it is gone."""
        self.process.send_signal(signal.SIGKILL)
        code = await self.process.exited
        await self.process.kill()
        await self.client.aclose()
        return f"{self.directory.name} (process {self.process.pid}) ended with {code}"


class Valkeys:
    """The two servers; every link in `clients` leads to the primary."""

    def __init__(self) -> None:
        # Of its own: a socket's path has to be short.
        self._temporary = tempfile.TemporaryDirectory(prefix="lp-")
        self._made = 0
        # File with the microseconds that the servers' clock is ahead, which clock_ahead.c reads.
        self._ahead = Path(self._temporary.name) / "ahead"
        self._environ: dict[str, str] | None = None
        self.clients: list[Link] = []

    async def __aenter__(self) -> Self:
        await self._prepare_clock()
        self.primary, self.replica = self._make(), self._make()
        await self.primary.start()
        self._replication = await Link(f"127.0.0.1:{self.primary.port}").start()
        await self._replicate()
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in (self.primary, self.replica):
            if not server.process.exited.done():
                await server.kill()
        await self._replication.stop()
        self._temporary.cleanup()

    async def restart(self) -> str:
        """Kill the primary and start it with what it had a moment before; what was written since is gone."""
        await self.primary.client.set(EARLIER, 1)
        await self._save()
        await self.primary.client.set(LATER, 1)
        await asyncio.sleep(LAG_S)
        proof = await self.primary.kill()
        await self.primary.start()
        return await self._proof(proof, kept=1)

    async def wipe(self) -> str:
        """Kill the primary and start it with nothing."""
        await self.primary.client.set(EARLIER, 1)
        proof = await self.primary.kill()
        await asyncio.to_thread((self.primary.directory / DUMP).unlink, missing_ok=True)
        await self.primary.start()
        return await self._proof(proof, kept=0)

    async def failover(self) -> str:
        """Kill the primary; the replica, which has missed its last moments, takes its place and gets one of its own."""
        await self._replicated_mark()
        self._replication.cut()
        await self.primary.client.set(LATER, 1)
        await asyncio.sleep(LAG_S)
        proof = await self.primary.kill()
        await self.replica.client.replicaof("NO", "ONE")
        self.primary, self.replica = self.replica, self._make()
        for link in self.clients:
            link.target = self.primary.socket
        self._replication.target = f"127.0.0.1:{self.primary.port}"
        self._replication.heal()
        await self._replicate()
        return await self._proof(proof, kept=1)

    @asynccontextmanager
    async def full(self) -> AsyncIterator[str]:
        """Leave the primary no memory while the context is open; yield the proof that it refuses writes."""
        client = self.primary.client
        await client.config_set("maxmemory", 1)
        try:
            await client.set(EARLIER, 1)
        except OutOfMemoryError as error:
            proof = f"{self.primary.directory.name}: {error}"
        else:
            proof = ""
        try:
            yield proof
        finally:
            await client.config_set("maxmemory", 0)

    @asynccontextmanager
    async def clock_ahead(self) -> AsyncIterator[str]:
        """Let the servers' clock be AHEAD_S ahead while the context is open; yield the proof that it is."""
        if self._environ is None:
            yield "skipped: there is no C compiler"
            return
        self._set_ahead(AHEAD_S)
        try:
            ahead_s = 0.0
            async with asyncio.timeout(5):
                while abs(ahead_s - AHEAD_S) > AHEAD_S / 2:  # a server reads the clock once a turn of its loop
                    seconds, _ = await self.primary.client.time()
                    ahead_s = seconds - time.time()
            yield f"Redis's clock was ahead by {ahead_s:.0f} s"
        finally:
            self._set_ahead(0)

    def _set_ahead(self, seconds: int) -> None:
        with self._ahead.open("r+b") as file:
            file.write(struct.pack("<q", seconds * 1_000_000))

    async def _prepare_clock(self) -> None:
        """Compile what sets the clock of the servers; without a compiler it stays as it is."""
        self._ahead.write_bytes(struct.pack("<q", 0))
        compiler, library = shutil.which("cc"), Path(self._temporary.name) / "clock_ahead.so"
        if compiler is not None:
            command = (compiler, "-shared", "-fPIC", "-o", str(library), str(Path(__file__).with_name("clock_ahead.c")))
            process = await asyncio.create_subprocess_exec(*command)
            if await process.wait() == 0:
                self._environ = {**os.environ, "LD_PRELOAD": str(library), "CLOCK_AHEAD": str(self._ahead)}

    async def lose_keys(self, seed: str) -> int:
        """Delete about half of the project's keys; how many were deleted."""
        client, rng = self.primary.client, random.Random(seed)
        keys = sorted([key async for key in client.scan_iter("lp:*", count=1000)])
        return int(await client.delete(*chosen)) if (chosen := [key for key in keys if rng.random() < 0.5]) else 0

    async def _save(self) -> None:
        """Write all to the disk, which it refuses while it does so for a new replica."""
        async with asyncio.timeout(60):
            while True:
                try:
                    await self.primary.client.save()
                except ResponseError as error:
                    if "in progress" not in str(error):
                        raise
                    await asyncio.sleep(0.02)
                else:
                    return

    async def _proof(self, died: str, kept: int) -> str:
        """Return the proof that it died, if the present server has what it should and nothing else."""
        has = [await self.primary.client.exists(key) for key in (EARLIER, LATER)]
        await self.primary.client.delete(EARLIER)
        return died if has == [kept, 0] else ""

    async def _replicated_mark(self) -> None:
        """Write EARLIER to the replica too, which may still be reading what a restart or a wipe has left."""
        # WAIT is about what its own connection has written.
        async with asyncio.timeout(60), self.primary.client.client() as one_connection:
            while True:
                await one_connection.set(EARLIER, 1)
                if await one_connection.wait(1, 100):
                    return

    async def _replicate(self) -> None:
        await self.replica.start(self._replication)
        async with asyncio.timeout(60):
            while True:
                if (await self.replica.client.info("replication"))["master_link_status"] == "up":
                    break
                await asyncio.sleep(0.05)

    def _make(self) -> Server:
        self._made += 1
        return Server(Path(self._temporary.name) / f"valkey-{self._made}", free_port(), self._environ)
