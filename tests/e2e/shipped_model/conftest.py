"""The cluster that the tests of this folder share, because an engine's start takes seconds; each leaves it idle."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from examples import structured
from tests.e2e.conftest import Cluster, running_cluster

EXAMPLES = Path(structured.__file__).parent
ADAPTERS = {path.name: path for path in sorted((EXAMPLES / "adapters").glob("*/*"))}
FLAGS = ("--dtype", "float32", "--threads", "1", "--rows", "8", "--kv-blocks", "64")


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A worker with the shipped model in float32 and its adapters, all of tenant acme."""
    directory = tmp_path_factory.mktemp("shipped") / "cluster"
    async with running_cluster(directory, str(EXAMPLES / "model"), ADAPTERS, worker_flags=FLAGS) as running:
        yield running
