"""Fixtures of several rooms: a real Valkey server, from its wheel."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from broker.connection import connect
from deploy.local import valkey

pytest_plugins = ["tests.tiny_models", "tests.task_stacks", "tests.small_disks"]


@pytest.fixture(scope="session", autouse=True)
def _interruptible_children() -> None:
    """Take SIGINT again where the parent ignores it, as a shell does for `make test &`: children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """The URL of a server that lives as long as the test session."""
    with tempfile.TemporaryDirectory(prefix="lp-") as name:
        directory = Path(name)
        server = subprocess.Popen(valkey.command(directory), stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            assert any(valkey.READY.search(line) for line in server.stdout), "Valkey ended before it was ready"
            yield valkey.socket_url(directory)
        finally:
            server.send_signal(signal.SIGKILL)
            server.wait()
            server.stdout.close()


@pytest.fixture
async def redis(valkey_url: str) -> AsyncIterator[Redis]:
    """A client of an empty database."""
    client = await connect(valkey_url)
    await client.flushall()
    yield client
    await client.aclose()
