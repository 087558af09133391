"""The short form of `make hostile`: 200 cases at a real cluster, which serves a quiet tenant meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.local.cluster import LocalCluster
from tests.hostile.quiet import QuietTenant
from tests.hostile.run import attack, running
from tests.hostile.table import all_cases

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
