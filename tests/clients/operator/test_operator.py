"""The operator between an API server of Kubernetes and a real store: the lives of its objects, and what it refuses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from loraplex.adapters.v1 import adapters_pb2, releases_pb2

from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.operator.app import run
from loraplex.operator.settings import OperatorSettings
from loraplex.runtime.rpc.settings import SettingsError
from tests.adapter_store.conftest import files_of
from tests.clients.operator.kubernetes_api import CRDS, KubernetesApi, Refusal, rules_of
from tests.clients.operator.running import World

pytestmark = pytest.mark.asyncio(loop_scope="module")
SUPPORT = "tenants/acme/adapters/support"
SPEC = {"tenant": "acme", "base": "base", "source": "s3://acme/1"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Run one operator for the tests of this file, each of which has adapters of its own."""
    async with World(tmp_path_factory.mktemp("operator")).running() as world:
        await world.start()
        yield world


async def test_an_adapter_lives_from_its_object_to_its_deletion(world: World) -> None:
    kube = world.kube
    spec: dict[str, Any] = {"tenant": "acme", "base": "base", "source": world.source("support-1", 1)}
    kube.apply("LoraAdapter", "support", **spec)
    assert await world.until("support", "Live") == "requests of acme for support get it"
    first = await world.live("support")
    status = world.status("support")
    assert status["state"] == "Live"
    assert status["digest"] == status["live"] == first.digest
    assert status["release"] == f"{SUPPORT}/releases/1"
    assert {one["type"]: one["status"] for one in status["conditions"]} == {"Ready": "True", "Stalled": "False"}
    await world.told("support", "Importing", "Live")

    # Applied twice, nothing happens; neither does anything at further looks.
    version = (kube.get("support") or {})["metadata"]["resourceVersion"]
    kube.apply("LoraAdapter", "support", **spec)
    await looks(world)
    assert (kube.get("support") or {})["metadata"]["resourceVersion"] == version
    assert len(await world.releases("support")) == 1

    # Edited: the new source becomes live by a step that a router's answers end.
    release = {"steps": [{"percent": 5, "requests": 10}], "rules": {"minRequests": 5, "maxErrorRise": 0.1}}
    edited: dict[str, Any] = {**spec, "source": world.source("support-2", 2), "run": "2041", "release": release}
    kube.apply("LoraAdapter", "support", **edited)
    assert await world.until("support", "Canary") == "release 2 is a canary: step 1 of 1: 5%"
    assert world.status("support")["share"] == "5%"
    assert world.status("support")["live"] == first.digest
    canary = await world.releasing.ask("GetRelease", name=f"{SUPPORT}/releases/2")
    assert canary.origin.run_id == "2041"
    assert canary.rollout.plan.rules.max_error_rise == 0.1
    await world.releasing.report(canary, candidate=releases_pb2.Outcomes(requests=10))
    await world.until("support", "Live")
    assert "share" not in world.status("support")
    assert (await world.live("support")).digest == world.status("support")["digest"] != first.digest

    # Edited during a canary: what it superseded is aborted, and the live revision stays.
    kube.apply("LoraAdapter", "support", **{**edited, "source": world.source("support-3", 3)})
    await world.until("support", "Canary")
    kube.apply("LoraAdapter", "support", **edited)
    await world.until("support", "Live")
    assert [state for _, state in await world.releases("support")] == ["RETIRED", "LIVE", "ROLLED_BACK"]
    await kube.until(lambda: "Superseded" in kube.events("support"))

    kube.delete("support")
    await world.gone("support")
    assert await world.live("support") is None


async def looks(world: World, count: int = 3) -> None:
    """Wait for so many looks of the operator at an adapter."""
    seen = 0
    done = asyncio.Event()

    def count_calls(call: str) -> None:
        nonlocal seen
        seen += call == "after ListReleases"
        if seen >= count:
            done.set()

    world.on_call = count_calls
    async with asyncio.timeout(60):
        await done.wait()
    world.on_call = lambda call: None


async def test_a_rollback_and_what_people_do_by_hand_stay_until_the_object_asks_again(world: World) -> None:
    spec = {"tenant": "acme", "base": "base", "adapter": "tone"}
    steps = {"steps": [{"percent": 5, "requests": 10}], "rules": {"minRequests": 5, "maxErrorRise": 0.1}}
    world.kube.apply("LoraAdapter", "of-tone", source=world.source("tone-1", 11), **spec)
    await world.until("of-tone", "Live")
    wanted = {**spec, "source": world.source("tone-2", 12)}
    world.kube.apply("LoraAdapter", "of-tone", release=steps, **wanted)
    await world.until("of-tone", "Canary")
    canary = await world.releasing.ask("GetRelease", name="tenants/acme/adapters/tone/releases/2")
    await world.releasing.report(canary, candidate=releases_pb2.Outcomes(requests=10, errors=9))
    message = await world.until("of-tone", "RolledBack")
    assert message.startswith("release 2 was rolled back: max_error_rise 0.1")
    assert "change spec.source, or spec.run to release the same again" in message
    assert {one["status"] for one in world.status("of-tone")["conditions"]} == {"False", "True"}
    await looks(world)
    assert len(await world.releases("tone")) == 2

    world.kube.apply("LoraAdapter", "of-tone", run="again", **wanted)
    await world.until("of-tone", "Live")
    assert [state for _, state in await world.releases("tone")] == ["RETIRED", "ROLLED_BACK", "LIVE"]
    first = (await world.releasing.ask("GetRelease", name="tenants/acme/adapters/tone/releases/1")).digest
    request = adapters_pb2.SetAliasRequest(adapter="tone", alias="live", digest=first)
    await world.client.call("SetAlias", request)
    assert f"has ended: live was moved to {first}" in await world.until("of-tone", "Retired")
    await looks(world)
    assert (await world.live("tone")).digest == first


async def test_what_the_store_has_is_adopted_and_may_be_left(world: World) -> None:
    source, uploaded = world.source("mine", 21), await world.client.upload("theirs", files_of(22), base_model="base")
    imported = adapters_pb2.ImportRevisionRequest(adapter="mine", source=source, base_model="base")
    async for _ in world.client.stub.ImportRevision(imported, metadata=(("x-loraplex-tenant", "acme"),)):
        pass
    spec = {"tenant": "acme", "base": "base", "deletionPolicy": "Retain"}
    world.kube.apply("LoraAdapter", "mine", source=source, **spec)
    await world.until("mine", "Live")
    assert await world.releases("mine") == [], "it was imported from there"
    await world.told("mine", "Live")
    # Another source has the same bytes: the import gives the revision that is live already.
    world.kube.apply("LoraAdapter", "theirs", source=world.source("theirs", 22), **spec)
    await world.until("theirs", "Live")
    assert world.status("theirs")["digest"] == uploaded.revision.digest
    for name in ("mine", "theirs"):
        world.kube.delete(name)
        await world.gone(name)
        assert await world.live(name) is not None


async def test_external_gates_are_waited_for(world: World) -> None:
    source, release = world.source("gated", 31), {"gates": "External"}
    spec: dict[str, Any] = {"tenant": "acme", "base": "base", "source": source, "release": release}
    world.kube.apply("LoraAdapter", "gated", **spec)
    message = await world.until("gated", "WaitsForGates")
    assert message == ("release 1 waits for its gates: loraplex releases qualify gated#1 --tenant acme --gates FILE")
    name = "tenants/acme/adapters/gated/releases/1"
    await world.releasing.ask("QualifyRelease", name=name, gates=[releases_pb2.GateResult(name="golden")])
    assert await world.until("gated", "GatesFailed") == (
        "gates of release 1 failed: golden; change spec.source or spec.run"
    )
    await world.releasing.ask("QualifyRelease", name=name, gates=[releases_pb2.GateResult(name="golden", passed=True)])
    await world.until("gated", "Live")


async def test_an_import_that_goes_on_ends_with_the_source_or_the_object(world: World) -> None:
    spec: dict[str, Any] = {"tenant": "acme", "base": "base", "adapter": "slow"}
    for edited in (True, False):
        world.hold, world.held = "ImportRevision", asyncio.Event()
        world.kube.apply("LoraAdapter", "slow", source=world.source("slow-1", 51), **spec)
        async with asyncio.timeout(60):
            await world.held.wait()
        await world.until("slow", "Importing")
        if edited:
            second = world.source("slow-2", 52)
            world.kube.apply("LoraAdapter", "slow", source=second, **spec)
            await world.until("slow", "Live")
            assert await world.releases("slow") == [(second, "LIVE")]
        world.kube.delete("slow")
        await world.gone("slow")
        assert await world.live("slow") is None


async def test_bad_input_is_a_condition_that_says_what_to_do_and_ends_with_its_cause(world: World) -> None:
    kube, source = world.kube, world.source("good", 41)
    spec: dict[str, Any] = {"tenant": "acme", "base": "base", "source": source}
    kube.apply("LoraAdapter", "no-base", **{**spec, "base": "later"})
    kube.apply("LoraAdapter", "not-allowed", **{**spec, "source": f"file://{world.folder}/elsewhere"})
    kube.apply("LoraAdapter", "of-another", **{**spec, "tenant": "beta"})
    (world.folder / "sources" / "empty").mkdir()
    kube.apply("LoraAdapter", "no-adapter", **{**spec, "source": f"file://{world.folder}/sources/empty"})
    kube.apply("LoraAdapter", "bad", namespace="team", **spec)
    kube.apply("BaseModel", "bad", namespace="team", model="base", digest="sha256:" + "0" * 64)
    kube.apply("BaseModel", "seen", namespace="team", model="base")
    kube.apply("LoraAdapter", "first", **{**spec, "adapter": "both"})
    await world.until("first", "Live")
    kube.apply("LoraAdapter", "second", **{**spec, "adapter": "both"})
    kube.apply("BaseModel", "later")
    assert "the store has no base model later; register it" in await world.until("no-base", "BaseNotFound")
    assert "may not import from" in await world.until("not-allowed", "SourceNotAllowed")
    assert "beta may not import from" in await world.until("of-another", "SourceNotAllowed")
    assert "is not an adapter: it has no adapter_config.json" in await world.until("no-adapter", "SourceBroken")
    assert await world.until("bad", "TenantNotAllowed", namespace="team") == (
        "spec.tenant: objects of team may have adapters of beta alone; the chart's value operator.namespaces, or "
        "--namespaces of the operator, allows more"
    )
    await world.until("bad", "DigestNotAllowed", "basemodels", "team")
    await world.until("seen", "Live", "basemodels", "team")
    assert await world.until("second", "Conflict") == ("llm/first asks for acme/both already; delete one of the two")
    assert "loraplex models push DIR --name later" in await world.until("later", "NotRegistered", "basemodels")
    for name in ("no-base", "not-allowed", "no-adapter", "second"):
        conditions = {one["type"]: one["status"] for one in world.status(name)["conditions"]}
        assert conditions == {"Ready": "False", "Stalled": "True"}
        assert world.status(name)["state"] == "Refused"

    await world.told("not-allowed", "Importing", "SourceNotAllowed")
    with pytest.raises(Refusal, match="'s4://x' does not match"):
        kube.apply("LoraAdapter", "no-scheme", **{**spec, "source": "s4://x"})
    with pytest.raises(Refusal, match="'sauce' was unexpected"):
        kube.apply("LoraAdapter", "no-field", **spec, sauce="x")
    await world.client.register(read_base_model("hash:?vocab=700", name="later"))
    await world.until("no-base", "Live")
    await world.until("later", "Live", "basemodels")
    assert kube.events("not-allowed") == ["Importing", "SourceNotAllowed"], "however often it was looked at"


async def test_refused_objects_change_nothing_when_they_go(world: World) -> None:
    kube = world.kube
    spec: dict[str, Any] = {"tenant": "acme", "base": "base", "source": world.source("going", 61)}
    await world.client.upload("kept", files_of(62), base_model="base")
    kube.apply("LoraAdapter", "kept", **{**spec, "base": "typo"})
    kube.apply("LoraAdapter", "older", **{**spec, "adapter": "shared-by-two"})
    await world.until("older", "Live")
    kube.apply("LoraAdapter", "other", **{**spec, "adapter": "shared-by-two"})
    kube.apply("LoraAdapter", "kept", namespace="team", **spec)
    await world.until("kept", "BaseNotFound")
    await world.until("other", "Conflict")
    await world.until("kept", "TenantNotAllowed", namespace="team")
    for name, namespace in (("kept", "llm"), ("other", "llm"), ("kept", "team")):
        kube.delete(name, namespace=namespace)
        await world.gone(name, namespace)
    assert await world.live("kept") is not None
    assert await world.live("shared-by-two") is not None


async def test_the_steps_of_a_release_are_the_store_s_to_check(world: World) -> None:
    spec: dict[str, Any] = {"tenant": "acme", "base": "base", "source": world.source("steps-1", 71)}
    world.kube.apply("LoraAdapter", "steps", **spec)
    await world.until("steps", "Live")
    spec["release"] = {"steps": [{"percent": 5}, {"percent": 5}]}
    world.kube.apply("LoraAdapter", "steps", run="2", **spec)
    await world.until("steps", "Live")  # the same bytes are live, so that there is nothing to roll out
    world.kube.apply("LoraAdapter", "steps", **{**spec, "source": world.source("steps-2", 72)})
    assert "plan.steps[1].permille: 50; shares must rise" in await world.until("steps", "InvalidField")


async def test_a_base_model_is_shown_and_its_revision_promoted(world: World) -> None:
    live = await world.client.register(read_base_model("hash:?vocab=601", name="qwen"))
    staged = await world.client.register(read_base_model("hash:?vocab=602", name="qwen"), stage=True)
    world.kube.apply("BaseModel", "qwen")
    await world.until("qwen", "Live", "basemodels")
    status = world.status("qwen", "basemodels")
    assert (status["digest"], status["architecture"], status["contextLength"]) == (
        live.digest,
        "hash",
        live.context_length,
    )
    world.kube.apply("BaseModel", "qwen", digest="sha256:" + "0" * 64)
    assert "stage it: loraplex models push DIR --name qwen" in await world.until(
        "qwen", "RevisionNotFound", "basemodels"
    )
    world.kube.apply("BaseModel", "qwen", digest=staged.digest)
    await world.until("qwen", "Live", "basemodels")
    assert world.status("qwen", "basemodels")["digest"] == staged.digest
    await world.kube.until(lambda: "Promoted" in world.kube.events("qwen"))
    world.kube.delete("qwen", "basemodels")
    await world.kube.until(lambda: world.kube.get("qwen", "basemodels") is None)


async def test_the_definitions_take_the_guide_s_objects() -> None:
    guide = (CRDS.parents[2] / "docs" / "guides" / "kubernetes.md").read_text()
    objects = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(apiVersion: .*?)```", guide, re.DOTALL)]
    kube = KubernetesApi()
    for one in objects:
        assert one["apiVersion"] == "/".join(next(iter(kube.groups.values())))
        kube.apply(one["kind"], one["metadata"]["name"], one["metadata"]["namespace"], **one["spec"])
    assert sorted(kind for kind, _, _ in kube.objects) == ["basemodels", "loraadapters"]


@pytest.mark.parametrize(
    ("former", "edited", "field"),
    [
        (SPEC, {**SPEC, "tenant": "beta"}, "tenant"),
        (SPEC, {**SPEC, "base": "other"}, "base"),
        (SPEC, {**SPEC, "adapter": "support"}, "adapter"),
        ({**SPEC, "adapter": "support"}, SPEC, "adapter"),
        ({**SPEC, "adapter": "support"}, {**SPEC, "adapter": "tone"}, "adapter"),
    ],
)
async def test_what_an_adapter_is_cannot_change(former: dict[str, Any], edited: dict[str, Any], field: str) -> None:
    """The definition's rules are evaluated: each is broken by an edit here, and by no other."""
    kube = KubernetesApi()
    kube.apply("LoraAdapter", "one", **former)
    with pytest.raises(Refusal) as refused:
        kube.apply("LoraAdapter", "one", **edited)
    assert str(refused.value) == f"spec.{field} cannot change; make another LoraAdapter"
    kube.apply("LoraAdapter", "one", **{**former, "source": "s3://acme/2", "run": "7"})
    assert (kube.get("one") or {})["metadata"]["generation"] == 2
    kube.apply("LoraAdapter", "another", **edited)


async def test_every_rule_of_the_definitions_is_broken_above() -> None:
    definitions = [yaml.safe_load(path.read_text())["spec"]["versions"] for path in sorted(CRDS.glob("*.yaml"))]
    rules = [rule for (version,) in definitions for rule in rules_of(version["schema"]["openAPIV3Schema"])]
    fields = sorted(rule["message"].split()[0] for rule in rules)
    assert fields == ["spec.adapter", "spec.base", "spec.tenant"]


async def test_an_operator_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for namespaces, message in (("llm,llm=acme", "is there with a tenant and without"), ("LLM", "write NAMESPACE or")):
        with pytest.raises(ValueError, match=message):
            OperatorSettings(namespaces=namespaces)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(SettingsError) as refused:
        await run(OperatorSettings(namespaces="llm"))
    assert str(refused.value) == f"KUBECONFIG: there is no file {tmp_path}/none, nor a pod's service account: name one"
