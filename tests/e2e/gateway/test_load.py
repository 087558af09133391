"""The HTTP client of bench.gateway: it waits for first tokens, and counts those of its streams."""

from __future__ import annotations

import math
import os

import pytest

from bench.http_load import HttpLoad, connected
from bench.http_peer import AIMS, PeerSizes, compare_servers
from bench.relay_load import Setup
from tests.e2e.conftest import Cluster
from tests.e2e.gateway.conftest import Eventually

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_lone_requests_and_streams(cluster: Cluster, eventually: Eventually) -> None:
    setup = Setup(alone=0, probes=0, seconds=0.2, warm_s=0.0, tokens=7)
    async with connected(cluster.local.http) as lone:
        load = HttpLoad(setup, 5.0, cluster.client, {"client": os.getpid()}, cluster.local.http, lone)
        assert len(await load.ttfts_ms(2, 0.0)) == 2
        flow = await load.flow("few", 2)
    assert flow.tokens > 14, "each stream is followed by another"
    await eventually(cluster.idle)


async def test_two_servers_are_asked_alike(cluster: Cluster, eventually: Eventually) -> None:
    sizes = PeerSizes(alone=2, rounds=1, few=2, many=3, tokens=4)
    rows, ratios = await compare_servers(sizes, "hash", cluster.local.http, cluster.local.http)
    assert ratios.keys() == AIMS.keys()
    assert all(0 < ratio < math.inf for ratio in ratios.values())
    assert [row["requests"] for row in rows if "requests" in row] == [2, 2]
    assert sum(row.get("tokens/s", 0) > 0 for row in rows) == 4
    await eventually(cluster.idle)
