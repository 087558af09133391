"""Fixtures of several rooms: a real Valkey server, from its wheel."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import AsyncIterator, Generator, Iterator

import pytest
from redis.asyncio import Redis

from bench.valkey import running_valkey
from loraplex.contracts.broker.connection import connect

# Among the results of tests the lines of gRPC's C library about connections that end are noise.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# OpenMP's threads, too, sleep while they wait: spinning, they take the cores from the suite's other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

pytest_plugins = ["tests.tiny_models", "tests.task_stacks", "tests.small_disks", "tests.file_order"]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis draw the same examples each time, whatever their time; its plugin may be absent, as on a GPU."""
    if hasattr(config.option, "hypothesis_profile"):
        config.option.hypothesis_profile = "ci"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among the hundreds of thousands of objects of collected modules, which stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _interruptible_children() -> None:
    """Take SIGINT again where the parent ignores it, as a shell does for `make test &`: children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the cache of the user's commands in a temporary folder, which all processes of the run share."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
        yield


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """The URL of a server that lives as long as the test session."""
    with running_valkey() as url:
        yield url


@pytest.fixture
async def redis(valkey_url: str) -> AsyncIterator[Redis]:
    """A client of an empty database."""
    client = await connect(valkey_url)
    await client.flushall()
    yield client
    await client.aclose()
