"""The releases of a store: ReleaseService over gRPC, and what follows rollouts: steps by time, watches, webhooks."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from loraplex.adapters.v1 import releases_pb2 as pb
from loraplex.adapters.v1 import releases_pb2_grpc

from loraplex.adapter_store.catalog import Catalog
from loraplex.adapter_store.convert import (
    check_digest,
    check_owner,
    decode_token,
    fill_page,
    page_size,
    refusals,
    timestamp,
)
from loraplex.adapter_store.database import Database
from loraplex.adapter_store.metrics import StoreMetrics
from loraplex.adapter_store.storage import CorruptBlob
from loraplex.contracts.artifacts.names import AdapterName, RevisionName, parse_adapter_name, parse_revision_name
from loraplex.contracts.artifacts.outcomes import Outcomes, ShadowOutcomes, StepOutcomes
from loraplex.releases.budgets import BudgetEvents
from loraplex.releases.bundles import BUNDLE_BYTES
from loraplex.releases.releases import Releases
from loraplex.releases.rollouts import (
    GateResult,
    Origin,
    Release,
    ReleaseEvent,
    ReleaseName,
    ReleaseState,
    RolloutPlan,
    RolloutRules,
    RolloutStep,
)
from loraplex.releases.signers import read_signers
from loraplex.releases.webhooks import Webhooks, read_webhooks
from loraplex.runtime.rpc.errors import CallError, DataLoss, InvalidField
from loraplex.runtime.rpc.interceptors import Context
from loraplex.runtime.rpc.principal import caller, calling_tenant
from loraplex.runtime.rpc.tasks import every
from loraplex.runtime.telemetry.logging import LogOnce

log = logging.getLogger(__name__)

# Interval in seconds between looks at the rollouts, whose steps may end by time, and at what changed.
LOOK_S = 0.5
# Maximum lengths in characters of an origin's texts, of a gate's detail, and of names.
_TEXT, _DETAIL, _NAME = 1_024, 4_000, 128
_DATASETS, _GATES, _FIGURES, _STEPS, _PHRASES, _PHRASE = 32, 64, 32, 20, 32, 100
# Maximum requests and seconds of a step: a week.
_MOST_REQUESTS, _MOST_SECONDS = 10**9, 7 * 86_400
# Maximum number of sums in a router's report.
_REPORTED = 1_000
_NEWEST = 2**62


class ReleaseService(releases_pb2_grpc.ReleaseServiceServicer):
    """Serves loraplex.adapters.v1.ReleaseService. `record` keeps an event of the audit log.

    Raises SignersError, WebhooksError for the files of signers and webhooks; an empty name: there is none.
    """

    def __init__(
        self, database: Database, signers: str, webhooks: str, record: Callable[..., None], metrics: StoreMetrics
    ) -> None:
        self.releases = Releases(database, read_signers(Path(signers)) if signers else None)
        self.budgets = BudgetEvents(database)
        self._webhooks = Webhooks(database, read_webhooks(Path(webhooks)) if webhooks else [])
        self._metrics = metrics
        self._record = record
        self._stands_still = LogOnce(log)
        # The last change of a release that was seen, and what is set at the next one.
        self._latest, self._changed = 0, asyncio.Event()

    def register(self, server: Any, catalog: Catalog) -> None:
        """Let a server serve it, for the revisions of a catalog."""
        self._catalog = catalog
        releases_pb2_grpc.add_ReleaseServiceServicer_to_server(self, server)

    async def follow(self) -> None:
        """Follow the rollouts, and call the webhooks; never returns."""
        await asyncio.gather(every(LOOK_S, self._look), self._webhooks.follow())

    async def CreateRelease(self, request: pb.CreateReleaseRequest, context: Context) -> pb.CreateReleaseResponse:
        """Verify a revision's files, and make a release of it."""
        with refusals("revision"):
            name = parse_revision_name(request.revision)
        check_owner(name.adapter_name, calling_tenant())
        origin = _origin(request.origin)
        if len(request.signature) > BUNDLE_BYTES:
            raise InvalidField("signature", f"{len(request.signature)} bytes; at most {BUNDLE_BYTES}")
        signer = await asyncio.to_thread(self._verify, name, request.signature)
        create = partial(self.releases.create, name, origin, caller().name, signer)
        return pb.CreateReleaseResponse(release=await self._change(create))

    async def GetRelease(self, request: pb.GetReleaseRequest, context: Context) -> pb.GetReleaseResponse:
        """Return a release with its history."""
        release = await asyncio.to_thread(self.releases.get, _own_release(request.name))
        return pb.GetReleaseResponse(release=release_to_pb(release))

    async def ListReleases(self, request: pb.ListReleasesRequest, context: Context) -> pb.ListReleasesResponse:
        """Return a page of an adapter's releases, newest first."""
        adapter, size = _own_adapter(request.parent), page_size(request.page_size)
        before = decode_token(request.page_token, first=(_NEWEST,))[0]
        releases = await asyncio.to_thread(self.releases.page, adapter, before, size + 1)
        page, token = fill_page(releases, release_to_pb, lambda release: (release.name.number,), size)
        return pb.ListReleasesResponse(releases=page, next_page_token=token)

    async def WatchReleases(
        self, request: pb.WatchReleasesRequest, context: Context
    ) -> AsyncIterator[pb.WatchReleasesResponse]:
        """Send an adapter's releases, and then each that changes; ends with NOT_FOUND when the adapter is deleted."""
        adapter, after = _own_adapter(request.parent), 0
        while True:
            changed = self._changed
            for release in await asyncio.to_thread(self.releases.changes, adapter, after):
                after = release.change
                yield pb.WatchReleasesResponse(release=release_to_pb(release))
            await changed.wait()

    async def QualifyRelease(self, request: pb.QualifyReleaseRequest, context: Context) -> pb.QualifyReleaseResponse:
        """Keep the results of gates."""
        name, gates = _own_release(request.name), _gates(request.gates)
        qualify = partial(self.releases.qualify, name, request.etag, gates, caller().name)
        return pb.QualifyReleaseResponse(release=await self._change(qualify))

    async def PromoteRelease(self, request: pb.PromoteReleaseRequest, context: Context) -> pb.PromoteReleaseResponse:
        """Begin a rollout, or make a release live."""
        name, plan = _own_release(request.name), _plan(request.plan) if request.HasField("plan") else None
        promote = partial(self.releases.promote, name, request.etag, plan, caller().name)
        return pb.PromoteReleaseResponse(release=await self._change(promote))

    async def AbortRelease(self, request: pb.AbortReleaseRequest, context: Context) -> pb.AbortReleaseResponse:
        """End a release that is not live."""
        abort = partial(self.releases.end, _own_release(request.name), request.etag, caller().name, live=False)
        return pb.AbortReleaseResponse(release=await self._change(abort))

    async def RollBackRelease(self, request: pb.RollBackReleaseRequest, context: Context) -> pb.RollBackReleaseResponse:
        """End a live release or a canary."""
        roll_back = partial(self.releases.end, _own_release(request.name), request.etag, caller().name, live=True)
        return pb.RollBackReleaseResponse(release=await self._change(roll_back))

    async def ReportOutcomes(self, request: pb.ReportOutcomesRequest, context: Context) -> pb.ReportOutcomesResponse:
        """Keep a router's sums, and hold its rollouts against their rules."""
        if not 1 <= len(request.reporter) <= _NAME:
            raise InvalidField("reporter", f"is not a text of 1 to {_NAME} characters")
        if len(request.outcomes) > _REPORTED:
            raise InvalidField("outcomes", f"{len(request.outcomes)}; at most {_REPORTED}")
        sums = {(_release_name("outcomes.release", one.release), one.step): _sums(one) for one in request.outcomes}
        self._note(await asyncio.to_thread(self.releases.take_outcomes, request.reporter, sums))
        return pb.ReportOutcomesResponse()

    async def _look(self) -> None:
        """Hold all rollouts against their plans, and wake the calls that watch releases; called every LOOK_S."""
        try:
            self._note(await asyncio.to_thread(self.releases.judge_all))
            latest = await asyncio.to_thread(self.releases.latest_change)
        except CallError as error:  # the disk is full, or the database does not answer
            self._stands_still(f"rollouts stand still: {error}")
            return
        self._stands_still.reset()
        if latest != self._latest:
            self._latest, changed, self._changed = latest, self._changed, asyncio.Event()
            changed.set()

    async def _change(self, change: Callable[[], Release]) -> pb.Release:
        release = await asyncio.to_thread(change)
        log.info("%s: %s is %s", caller().name, release.name, release.state.value)
        self._metrics.releases.labels(release.state.value).inc()
        return release_to_pb(release)

    def _note(self, changed: Iterable[Release]) -> None:
        """Log and audit what the store itself has changed."""
        for release in changed:
            event = release.history[-1]
            log.info("%s is %s: %s", release.name, release.state.value, event.cause)
            self._metrics.releases.labels(release.state.value).inc()
            self._record("release", name=str(release.name), state=release.state.value, cause=event.cause)

    def _verify(self, name: RevisionName, signature: bytes) -> str:
        """Read a revision's files; returns who has signed them.

        Raises NotFound, DataLoss where they are not what their digests say, Mismatch on a bad signature.
        """
        try:
            revision, readers = self._catalog.open_revision(name)
        except CorruptBlob as error:
            raise DataLoss("revision", str(name), str(error)) from error
        try:
            for reader in readers.values():
                reader.read()
                while reader.remaining:
                    reader.read()
        except CorruptBlob as error:
            raise DataLoss("revision", str(name), str(error)) from error
        finally:
            for reader in readers.values():
                reader.close()
        return self.releases.signers.check(revision, signature)


def _own_adapter(text: str) -> AdapterName:
    with refusals("parent"):
        name = parse_adapter_name(text, calling_tenant())
    check_owner(name, calling_tenant())
    return name


def _release_name(field: str, text: str, tenant: str = "") -> ReleaseName:
    adapter, separator, number = text.rpartition("/releases/")
    if not separator or not (number.isascii() and number.isdigit()) or len(number) > 9:
        raise InvalidField(field, f"{text[:200]!r} is not a name like tenants/TENANT/adapters/ADAPTER/releases/1")
    with refusals(field):
        return ReleaseName(parse_adapter_name(adapter, tenant), int(number))


def _own_release(text: str) -> ReleaseName:
    name = _release_name("name", text, calling_tenant())
    check_owner(name.adapter, calling_tenant())
    return name


def _check_texts(field: str, texts: Iterable[str], most: int, characters: int, least: int = 0) -> tuple[str, ...]:
    values = tuple(texts)
    if len(values) > most:
        raise InvalidField(field, f"{len(values)}; at most {most}")
    for value in values:
        if not least <= len(value) <= characters or not value.isprintable():
            raise InvalidField(field, f"{value[:80]!r} is not a text of {least} to {characters} printable characters")
    return values


def _origin(message: pb.Origin) -> Origin:
    for field in ("source", "pin", "run_id"):
        _check_texts(f"origin.{field}", [getattr(message, field)], 1, _TEXT)
    if message.parent_digest:
        check_digest("origin.parent_digest", message.parent_digest)
    datasets = _check_texts("origin.datasets", message.datasets, _DATASETS, _TEXT, least=1)
    return Origin(message.source, message.pin, message.parent_digest, message.run_id, datasets)


def _gates(messages: Iterable[pb.GateResult]) -> list[GateResult]:
    gates: dict[str, GateResult] = {}
    for index, message in enumerate(messages):
        field = f"gates[{index}]"
        _check_texts(f"{field}.name", [message.name], 1, _NAME, least=1)
        _check_texts(f"{field}.figures", message.figures, _FIGURES, _NAME, least=1)
        if not all(map(math.isfinite, message.figures.values())):
            raise InvalidField(f"{field}.figures", "are not finite numbers")
        if len(message.detail) > _DETAIL:
            raise InvalidField(f"{field}.detail", f"has more than {_DETAIL} characters")
        if message.name in gates:
            raise InvalidField(f"{field}.name", f"{message.name} is there twice")
        gates[message.name] = GateResult(message.name, message.passed, dict(message.figures), message.detail)
    if not 1 <= len(gates) <= _GATES:
        raise InvalidField("gates", f"{len(gates)} gates; give 1 to {_GATES}")
    return list(gates.values())


def _plan(message: pb.RolloutPlan) -> RolloutPlan:
    if not 1 <= len(message.steps) <= _STEPS:
        raise InvalidField("plan.steps", f"{len(message.steps)} steps; give 1 to {_STEPS}")
    before = -1
    for index, step in enumerate(message.steps):
        field = f"plan.steps[{index}]"
        if not before < step.permille < 1000:
            raise InvalidField(f"{field}.permille", f"{step.permille}; shares must rise, from 0 to 999")
        if step.requests > _MOST_REQUESTS or step.seconds > _MOST_SECONDS:
            raise InvalidField(field, f"at most {_MOST_REQUESTS} requests and {_MOST_SECONDS} seconds")
        before = step.permille
    if message.shadow_permille > 1000:
        raise InvalidField("plan.shadow_permille", f"{message.shadow_permille}; at most 1000")
    if not message.steps[0].permille and not message.shadow_permille:
        raise InvalidField("plan.steps[0].permille", "0 needs shadow requests")
    rules = RolloutRules(**{field.name: value for field, value in message.rules.ListFields()})
    for field, value in asdict(rules).items():
        if value is not None and not 0 <= value < math.inf:
            raise InvalidField(f"plan.rules.{field}", f"{value:g} is negative or not finite")
    if rules.min_agreement is not None and not message.shadow_permille:
        raise InvalidField("plan.rules.min_agreement", "needs shadow requests")
    phrases = _check_texts("plan.refusal_phrases", message.refusal_phrases, _PHRASES, _PHRASE, least=1)
    if rules.max_refusal_rise is not None and not phrases:
        raise InvalidField("plan.rules.max_refusal_rise", "needs refusal_phrases")
    steps = tuple(RolloutStep(step.permille, step.requests, step.seconds) for step in message.steps)
    return RolloutPlan(steps, rules, message.shadow_permille, phrases)


def _sums(message: pb.StepOutcomes) -> StepOutcomes:
    def side(counts: pb.Outcomes) -> Outcomes:
        return Outcomes(counts.requests, counts.errors, counts.refusals, dict(counts.ttft_buckets))

    shadow = ShadowOutcomes(**{field.name: getattr(message.shadow, field.name) for field in fields(ShadowOutcomes)})
    return StepOutcomes(side(message.live), side(message.candidate), shadow)


def release_to_pb(release: Release) -> pb.Release:
    """Return a release's message."""
    return pb.Release(
        name=str(release.name),
        digest=release.digest,
        base_digest=release.base_digest,
        state=_state(release.state),
        origin=pb.Origin(**asdict(release.origin)),
        gates=[pb.GateResult(**asdict(gate)) for gate in release.gates],
        rollout=None if release.plan is None else _rollout(release, release.plan),
        create_time=timestamp(release.create_ns),
        etag=release.etag,
        signer=release.signer,
        history=map(_event, release.history),
    )


def _rollout(release: Release, plan: RolloutPlan) -> pb.Rollout:
    outcomes = release.outcomes
    rules = {name: value for name, value in asdict(plan.rules).items() if value is not None}
    return pb.Rollout(
        plan=pb.RolloutPlan(
            steps=[pb.RolloutStep(**asdict(step)) for step in plan.steps],
            rules=pb.RolloutRules(**rules),
            shadow_permille=plan.shadow_permille,
            refusal_phrases=plan.refusal_phrases,
        ),
        step=release.step,
        step_time=timestamp(release.step_ns),
        live_digest=release.baseline,
        live=pb.Outcomes(**asdict(outcomes.live)),
        candidate=pb.Outcomes(**asdict(outcomes.candidate)),
        shadow=pb.ShadowOutcomes(**asdict(outcomes.shadow)),
        figures=outcomes.figures(),
    )


def _event(event: ReleaseEvent) -> pb.ReleaseEvent:
    return pb.ReleaseEvent(
        time=timestamp(event.time_ns),
        before=pb.RELEASE_STATE_UNSPECIFIED if event.before is None else _state(event.before),
        after=_state(event.after),
        actor=event.actor,
        cause=event.cause,
        figures=event.figures,
    )


def _state(state: ReleaseState) -> pb.ReleaseState.ValueType:
    return pb.ReleaseState.Value(f"RELEASE_STATE_{state.name}")
