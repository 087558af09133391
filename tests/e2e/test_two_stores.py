"""Two stores on one PostgreSQL and one bucket, under streams: each is killed, and the database started again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.cli.local import LocalCluster
from loraplex_client import AsyncStoreClient
from tests.adapter_store.sources.places import bucket_of, seaweed
from tests.adapter_store.sources.test_import_kills import running
from tests.e2e.conftest import running_cluster
from tests.e2e.test_rolling_restart import CLIENTS, MODEL, Load
from tests.free_ports import free_ports
from tests.postgres_server import PostgresServer


@pytest.mark.nightly
async def test_streams_go_on_whichever_store_dies_and_while_the_database_is_away(
    tmp_path: Path, hash_adapters: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = free_ports(2)
    both = ("--store", f"ipv4:127.0.0.1:{one},127.0.0.1:{two}")  # as a name that stands for all stores
    with seaweed(tmp_path) as url, closing(PostgresServer()) as postgres:
        bucket_of(url)
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        for name, value in {**keys, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        shared = ("--bucket", "s3://acme/two", "--database", postgres.new_database())
        async with (
            running(tmp_path / "other", "--port", str(two), *shared, url=url) as (other, address),
            running_cluster(
                tmp_path / "cluster",
                MODEL,
                hash_adapters,
                workers=2,
                worker_flags=both,
                router_flags=both,
                store_flags=shared,
                launch=lambda settings: LocalCluster(replace(settings, store_port=one)),
            ) as cluster,
        ):
            load = Load(cluster.client, cluster.digests)
            await load.more(CLIENTS)
            cluster.local.kill("store")
            await load.more(2 * CLIENTS)
            async with AsyncStoreClient(address, "acme") as store:
                await store.push(hash_adapters["a"], "later")
            await cluster.local.restart("store")
            await asyncio.to_thread(postgres.stop)
            await load.more(2 * CLIENTS)
            await asyncio.to_thread(postgres.start)
            other.kill()
            await load.more(2 * CLIENTS)
            assert (await cluster.client.generate("a new name", adapter_id="later", max_tokens=2)).token_ids
            await load.end()
            print(f"{load.answers} answers, {load.continuations} continuations")
