"""The short form of `make hostile`: 200 cases at a real cluster, floods of a gateway, a quiet tenant beside them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.cli.local import LocalCluster
from loraplex.runtime.rpc.server import channel_options
from loraplex_client import AsyncClient
from tests.trials.hostile import edge, floods
from tests.trials.hostile.edge import behind_edge
from tests.trials.hostile.gateway import FLOODS, quiet_beside_floods
from tests.trials.hostile.quiet import QuietTenant
from tests.trials.hostile.run import attack, running
from tests.trials.hostile.table import all_cases

SEED = 16


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    """A cluster with adapters whose templates are hostile, and a base model whose tokenizer panics."""
    async with running(tmp_path / "cluster") as found:
        yield found


async def test_hostile_calls_end_with_one_clean_status_and_a_quiet_tenant_is_served(cluster: LocalCluster) -> None:
    cases = random.Random(SEED).sample(all_cases(), 200)
    quiet = QuietTenant(cluster.router)
    sending = asyncio.create_task(quiet.send())
    outcome = await attack(cluster, cases, calls=16)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert not sending.done()
    assert quiet.ttfts
    sending.cancel()
    async with grpc.aio.insecure_channel(cluster.router, options=channel_options()) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for flood in (*floods.FLOODS.values(), floods.FLOODS["rapid cancels"]):
            await flood.call(stub)
        assert await floods.resume_once(stub, await floods.large_resume(stub, received=300)) == "delta"


# tests/deploy/test_edge_proxy.py and tests/clients/gateway have the limits one by one.
@pytest.mark.nightly
async def test_floods_of_addresses_at_the_proxy_leave_room_and_memory(cluster: LocalCluster) -> None:
    async with behind_edge(cluster) as (port, memory), AsyncClient(f"127.0.0.1:{port}", "quiet") as client:
        await client.generate("hello", max_tokens=4, model="hash")
        before = memory()
        for name, flood in edge.FLOODS.items():
            if name != "long echoes":  # there is no gateway here
                async with edge.flooded(port, flood):
                    for number in range(5):
                        await client.generate(f"hello {number}", max_tokens=4, model="hash")
                        await asyncio.sleep(0.1)
        more = {part: mib - before[part] for part, mib in memory().items()}
        assert max(more.values()) < 128, more  # at once; `make hostile` waits


@pytest.mark.nightly
async def test_floods_of_a_gateway_leave_room_for_a_quiet_tenant(tmp_path: Path) -> None:
    served = await quiet_beside_floods(tmp_path, requests_limit=8, asks=4)
    assert {name: len(seconds) for name, seconds in served.items()} == dict.fromkeys(served, 4)
    assert len(served) == 1 + len(FLOODS)
