"""The HTTP client of bench.gateway: it waits for first tokens, and counts those of its streams."""

from __future__ import annotations

import os

import pytest

from bench.http_load import HttpLoad
from bench.relay_load import Setup
from tests.e2e.conftest import Cluster
from tests.e2e.gateway.conftest import Eventually

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_lone_requests_and_streams(cluster: Cluster, eventually: Eventually) -> None:
    setup = Setup(alone=0, probes=0, seconds=0.2, warm_s=0.0, tokens=7)
    load = HttpLoad(setup, 5.0, cluster.client, {"client": os.getpid()}, cluster.local.http)
    assert len(await load.ttfts_ms(2, 0.0)) == 2
    flow = await load.flow("few", 2)
    assert flow.tokens > 14, "each stream is followed by another"
    load.close()
    await eventually(cluster.idle)
