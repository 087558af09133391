"""Releases over gRPC: their states and what may follow which, rollouts by routers' sums, and who may see them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from loraplex.adapters.v1 import adapters_pb2, releases_pb2, releases_pb2_grpc

from loraplex.adapter_store.app import Store
from loraplex.contracts.artifacts.base_model import BaseModel
from tests.adapter_store.conftest import Client, files_of, metadata

ADAPTER = "tenants/acme/adapters/support"


class Releasing:
    """The methods of ReleaseService as a tenant calls them."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = releases_pb2_grpc.ReleaseServiceStub(channel)

    async def ask(self, method: str, tenant: str = "acme", **fields: Any) -> Any:
        """Call a method; returns its release."""
        request = getattr(releases_pb2, f"{method}Request")(**fields)
        answer = await getattr(self.stub, method)(request, metadata=metadata(tenant))
        return answer.release if "release" in answer.DESCRIPTOR.fields_by_name else answer

    async def qualified(self, digest: str) -> Any:
        """Return a qualified release of a revision."""
        release = await self.ask("CreateRelease", revision=f"{ADAPTER}/revisions/{digest}")
        gates = [releases_pb2.GateResult(name="golden", passed=True, figures={"passed": 3})]
        return await self.ask("QualifyRelease", name=release.name, etag=release.etag, gates=gates)

    async def report(self, release: Any, reporter: str = "r1", **sides: Any) -> None:
        """Send a router's sums of the release's current step."""
        outcomes = releases_pb2.StepOutcomes(release=release.name, step=release.rollout.step, **sides)
        await self.ask("ReportOutcomes", reporter=reporter, outcomes=[outcomes])

    async def state(self, name: str) -> str:
        """Return a release's state."""
        release = await self.ask("GetRelease", name=name)
        return str(releases_pb2.ReleaseState.Name(release.state)).removeprefix("RELEASE_STATE_")


def plan(*permilles: int, requests: int = 10, shadow: int = 0, **rules: Any) -> Any:
    """Return a plan with these shares."""
    return releases_pb2.RolloutPlan(
        steps=[releases_pb2.RolloutStep(permille=one, requests=requests) for one in permilles],
        rules=releases_pb2.RolloutRules(**{"min_requests": 5, **rules}),
        shadow_permille=shadow,
        refusal_phrases=["I cannot"] if "max_refusal_rise" in rules else [],
    )


@pytest.fixture
async def releasing(store: Store) -> AsyncIterator[Releasing]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        yield Releasing(channel)


@pytest.fixture
async def digests(client: Client, tiny_base: BaseModel) -> list[str]:
    """Upload three revisions, the first of which is live; return their digests."""
    await client.register(tiny_base)
    uploads = [await client.upload("support", files_of(seed), alias="-" if seed else "") for seed in range(3)]
    return [upload.revision.digest for upload in uploads]


async def live(client: Client) -> Any:
    return await client.get("support")


def code_of(error: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> str:
    return error.value.code().name


async def test_a_release_goes_live_by_steps_and_back(releasing: Releasing, client: Client, digests: list[str]) -> None:
    first, second, _ = digests
    release = await releasing.qualified(second)
    assert release.gates[0].figures["passed"] == 3
    answer = await live(client)
    assert answer.revision.digest == first
    assert not answer.HasField("candidate"), "no rollout yet"
    release = await releasing.ask("PromoteRelease", name=release.name, etag=release.etag, plan=plan(50, 250))
    candidate = (await live(client)).candidate
    assert (candidate.revision.digest, candidate.permille, candidate.step) == (second, 50, 0)
    split_key = candidate.split_key
    assert len(split_key) == 32
    assert split_key not in str(release), "only routers have it"
    assert not (await client.get(f"support@{first}")).HasField("candidate"), "a digest means that revision"
    # Two routers; the one that reports again replaces its own sums.
    for count in (4, 6):
        await releasing.report(release, "r1", candidate=releases_pb2.Outcomes(requests=count))
    assert (await live(client)).candidate.step == 0
    await releasing.report(release, "r2", candidate=releases_pb2.Outcomes(requests=4))
    candidate = (await live(client)).candidate
    assert (candidate.permille, candidate.step, candidate.split_key) == (250, 1, split_key)
    await releasing.report(release, "r3", candidate=releases_pb2.Outcomes(requests=100))  # of the step before
    release = await releasing.ask("GetRelease", name=release.name)
    assert release.rollout.candidate.requests == 0
    await releasing.report(release, candidate=releases_pb2.Outcomes(requests=10))
    answer = await live(client)
    assert answer.revision.digest == second
    assert not answer.HasField("candidate")
    release = await releasing.ask("RollBackRelease", name=release.name)
    assert (await live(client)).revision.digest == first
    names = [releases_pb2.ReleaseState.Name(event.after)[14:] for event in release.history]
    assert names == ["IMPORTED", "VERIFIED", "QUALIFIED", "CANARY", "CANARY", "LIVE", "ROLLED_BACK"]
    assert release.history[4].figures["candidate_requests"] == 10
    assert [event.actor for event in release.history][4:6] == ["store", "store"]


@pytest.mark.parametrize(
    ("rules", "sides", "cause"),
    [
        ({"max_error_rise": 0.1}, {"candidate": {"requests": 5, "errors": 1}}, "max_error_rise 0.1: 0.2"),
        (
            {"max_ttft_ratio": 2},
            {
                "live": {"requests": 5, "ttft_buckets": {20: 5}},
                "candidate": {"requests": 5, "ttft_buckets": {20: 2, 40: 3}},
            },
            "max_ttft_ratio 2: 10",
        ),
        (
            {"max_refusal_rise": 0.1},
            {"live": {"requests": 10, "refusals": 1}, "candidate": {"requests": 5, "refusals": 2}},
            "max_refusal_rise 0.1: 0.3",
        ),
        (
            {"min_agreement": 0.9},
            {"shadow": {"requests": 5, "tokens": 50, "equal_tokens": 40}},
            "min_agreement 0.9: 0.8",
        ),
    ],
)
async def test_each_rule_rolls_back_with_its_figure(
    releasing: Releasing,
    client: Client,
    digests: list[str],
    rules: Mapping[str, Any],
    sides: Mapping[str, Mapping[str, Any]],
    cause: str,
) -> None:
    first, second, _ = digests
    release = await releasing.qualified(second)
    release = await releasing.ask("PromoteRelease", name=release.name, plan=plan(50, shadow=100, **rules))
    kinds = {"live": releases_pb2.Outcomes, "candidate": releases_pb2.Outcomes, "shadow": releases_pb2.ShadowOutcomes}
    healthy = {"requests": 5, "ttft_buckets": {20: 5}}
    await releasing.report(release, live=healthy, candidate=healthy)
    assert await releasing.state(release.name) == "CANARY"
    await releasing.report(release, **{side: kinds[side](**counts) for side, counts in sides.items()})
    release = await releasing.ask("GetRelease", name=release.name)
    assert (releases_pb2.ReleaseState.Name(release.state), release.history[-1].cause) == (
        "RELEASE_STATE_ROLLED_BACK",
        cause,
    )
    assert release.history[-1].figures["candidate_requests"] == release.rollout.candidate.requests
    answer = await live(client)
    assert (answer.revision.digest, answer.HasField("candidate")) == (first, False)


async def test_a_step_by_time_ends_without_requests(releasing: Releasing, client: Client, digests: list[str]) -> None:
    release = await releasing.qualified(digests[1])
    timed = releases_pb2.RolloutPlan(steps=[releases_pb2.RolloutStep(permille=10, seconds=1)])
    watch = releasing.stub.WatchReleases(releases_pb2.WatchReleasesRequest(parent=ADAPTER), metadata=metadata("acme"))
    async with asyncio.timeout(60):
        await releasing.ask("PromoteRelease", name=release.name, plan=timed)
        async for message in watch:
            if message.release.state == releases_pb2.RELEASE_STATE_LIVE:
                break
    watch.cancel()
    assert (await live(client)).revision.digest == digests[1]


async def test_what_cannot_follow_is_refused_and_changes_nothing(
    releasing: Releasing, client: Client, digests: list[str]
) -> None:
    first, second, third = digests
    release = await releasing.ask("CreateRelease", revision=f"{ADAPTER}/revisions/{second}")
    other = await releasing.qualified(third)

    async def refused(code: str, method: str, **fields: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await releasing.ask(method, **fields)
        assert code_of(error) == code, error.value.details()

    await refused("FAILED_PRECONDITION", "PromoteRelease", name=release.name)  # its gates have not run
    failed = [releases_pb2.GateResult(name="golden", passed=False, detail="1 of 3 differs")]
    release = await releasing.ask("QualifyRelease", name=release.name, gates=failed)
    assert release.state == releases_pb2.RELEASE_STATE_VERIFIED
    await refused("FAILED_PRECONDITION", "PromoteRelease", name=release.name)
    await refused("ALREADY_EXISTS", "CreateRelease", revision=f"{ADAPTER}/revisions/{second}")
    await refused("ABORTED", "PromoteRelease", name=other.name, etag="1")
    await refused("FAILED_PRECONDITION", "RollBackRelease", name=other.name)
    for broken in (plan(), plan(50, 50), plan(1000), plan(0), plan(50, min_agreement=0.5), plan(50, max_ttft_ratio=-1)):
        await refused("INVALID_ARGUMENT", "PromoteRelease", name=other.name, plan=broken)
    other = await releasing.ask("PromoteRelease", name=other.name, plan=plan(50))
    gates = [releases_pb2.GateResult(name="golden", passed=True)]
    release = await releasing.ask("QualifyRelease", name=release.name, gates=gates)
    for asked in (None, plan(50)):
        await refused("FAILED_PRECONDITION", "PromoteRelease", name=release.name, plan=asked)  # another is a canary
    await refused("NOT_FOUND", "GetRelease", name=f"{ADAPTER}/releases/99")
    await refused("INVALID_ARGUMENT", "GetRelease", name=f"{ADAPTER}/releases/x")
    await refused("NOT_FOUND", "PromoteRelease", name=other.name, tenant="globex")
    await refused("NOT_FOUND", "ListReleases", parent=ADAPTER, tenant="globex")
    assert (await live(client)).revision.digest == first
    states = [one.state for one in (await releasing.ask("ListReleases", parent=ADAPTER)).releases]
    assert states == [releases_pb2.RELEASE_STATE_CANARY, releases_pb2.RELEASE_STATE_QUALIFIED]


async def test_a_live_alias_moved_by_hand_ends_the_rollout(
    releasing: Releasing, client: Client, digests: list[str]
) -> None:
    _, second, third = digests
    canary = await releasing.qualified(second)
    await releasing.ask("PromoteRelease", name=canary.name, plan=plan(50))
    request = adapters_pb2.SetAliasRequest(adapter="support", alias="live", digest=third)
    await client.call("SetAlias", request)
    assert await releasing.state(canary.name) == "ROLLED_BACK"
    answer = await live(client)
    assert (answer.revision.digest, answer.HasField("candidate")) == (third, False)
    await client.call("DeleteAdapter", adapters_pb2.DeleteAdapterRequest(name="support"))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await releasing.state(canary.name)
    assert code_of(error) == "NOT_FOUND", "releases go with their adapter"


async def test_damaged_files_make_no_release(releasing: Releasing, data: Path, digests: list[str]) -> None:
    for blob in (data / "blobs").rglob("*"):
        if blob.is_file():
            blob.chmod(0o600)
            blob.write_bytes(bytes(blob.stat().st_size))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await releasing.ask("CreateRelease", revision=f"{ADAPTER}/revisions/{digests[1]}")
    assert code_of(error) == "DATA_LOSS"
    assert not (await releasing.ask("ListReleases", parent=ADAPTER)).releases
