"""The short form of `make authz`: some cases of each kind, and a key that is revoked while the router runs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraplex.admin.v1 import keys_pb2, keys_pb2_grpc
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.tenancy.permissions import PERMISSIONS
from tests.trials.authz.cases import OPTIONAL, SERVERS, Case, all_cases
from tests.trials.authz.cluster import Cluster, running
from tests.trials.authz.run import Caller

SEED = 16
SAMPLE = 600
GENERATE = "/loraplex.inference.v1.InferenceService/Generate"


@pytest.fixture(scope="module")
def short_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the cluster."""
    return tmp_path_factory.mktemp("a")


@pytest.fixture
async def cluster(short_directory: Path) -> AsyncIterator[Cluster]:
    """A store and a router with credentials on."""
    async with running(short_directory) as found:
        yield found


def sample() -> list[Case]:
    """Return cases of every method, port, kind and fault: the same ones each time."""
    cases = list(all_cases())
    assert len(cases) >= 10_000
    shuffled = random.Random(SEED).sample(cases, SAMPLE)
    right = [case for case in cases if case.fault == "none" and case.expected == "admitted" and case.kind != "jwt"]
    return list(dict.fromkeys(shuffled + right))


def test_the_cases_are_all_there_are() -> None:
    cases = list(all_cases())
    assert len(set(cases)) == len(cases)
    assert {case.method for case in cases} == {name for name in PERMISSIONS if name.split("/")[1] in SERVERS}
    relay = {f"loraplex.relay.v1.{name}Service" for name in ("Relay", "Identity", "TenantData")}
    assert {name.split("/")[1] for name in PERMISSIONS} == SERVERS.keys() | OPTIONAL.keys() | relay | {
        "grpc.health.v1.Health",
        "externalscaler.ExternalScaler",
    }


async def test_calls_are_answered_as_the_table_says_and_revoked_keys_end(cluster: Cluster) -> None:
    caller = Caller(cluster)
    await caller.settle()
    outcome = await caller.run(sample())
    assert not outcome.failures, "\n".join(outcome.failures[:20])
    assert len(outcome.counts) == 10  # every refusal, and admissions
    key = cluster.credentials.bearers["key", Role.TENANT_USER, "none"]
    credentials = grpc.ssl_channel_credentials(cluster.credentials.ca.pem)
    async with grpc.aio.secure_channel(cluster.ports["store"]["operators"], credentials) as channel:
        stub: Any = keys_pb2_grpc.KeyServiceStub(channel)
        operator = (("authorization", f"Bearer {cluster.bootstrap}"),)
        await stub.RevokeKey(keys_pb2.RevokeKeyRequest(key_id=key.split("_")[1]), metadata=operator)
    revoked = Case(GENERATE, "public", "key", Role.TENANT_USER, "none")
    async with asyncio.timeout(60):
        while await caller.call(revoked) != "CREDENTIAL_REVOKED":  # noqa: ASYNC110  # the router looks twice a second
            await asyncio.sleep(0.02)
    await caller.close()
