"""Looks at LoraAdapter and BaseModel objects, which bring the store to what these ask for.

A look begins with what the store says, and ends after the calls that are needed; nothing is remembered between two of
them. So it does not matter when the operator is killed, or how often a look is repeated. The calls of a LoraAdapter:

    no release of its source yet    ImportRevision without an alias, AbortRelease of open ones, CreateRelease
    verified, no external gates     QualifyRelease
    qualified                       PromoteRelease: by steps, or at once
    canary, live, ended             none: the store goes on by itself, and what people do by hand stays

A release belongs to an object if its origin has the object's source and run. An object makes one release: after its
end, whatever ended it, the object asks for another one by another source or run; or by the same, if another went live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import loraplex_client as sdk
from loraplex.adapters.v1 import adapters_pb2, releases_pb2

from clients.operator.store import (
    IMPORT_FAILED_S,
    REFUSED_S,
    REST_S,
    SOON_S,
    Outcome,
    Refused,
    State,
    Store,
    TenantStore,
    outcome_of,
    reason_of,
)

# The gate that stands in a release for the gates that its object does not ask for.
NO_GATES = "no gates asked for"
_States = releases_pb2.ReleaseState
# States of releases that have not ended and are not live.
_OPEN = {
    _States.RELEASE_STATE_IMPORTED,
    _States.RELEASE_STATE_VERIFIED,
    _States.RELEASE_STATE_QUALIFIED,
    _States.RELEASE_STATE_CANARY,
}
# Is called with the reason and the message of an event beyond the object's states.
Tell = Callable[[str, str], None]


@dataclass(frozen=True)
class LoraAdapter:
    """A LoraAdapter: an adapter of `tenant`, whose requests should get the revision that `source` has."""

    tenant: str
    adapter: str
    base: str
    source: str
    # Tells apart releases of the same source.
    run: str
    # Gates are run by others: `loraplex releases qualify`.
    external_gates: bool
    # None: the release is live at once.
    plan: releases_pb2.RolloutPlan | None
    # The adapter stays in the store when the object is deleted.
    retained: bool

    @classmethod
    def of(cls, name: str, spec: Mapping[str, Any]) -> LoraAdapter:
        """Read an object, which the schema of its definition has checked."""
        release = spec.get("release", {})
        return cls(
            tenant=spec["tenant"],
            adapter=spec.get("adapter", name),
            base=spec["base"],
            source=spec["source"],
            run=spec.get("run", ""),
            external_gates=release.get("gates") == "External",
            plan=_plan(release) if release.get("steps") else None,
            retained=spec.get("deletionPolicy") == "Retain",
        )

    @property
    def name(self) -> str:
        """Return the adapter's full name in the store."""
        return f"tenants/{self.tenant}/adapters/{self.adapter}"

    @property
    def key(self) -> tuple[str, ...]:
        """Return what only one object may ask for."""
        return ("LoraAdapter", self.tenant, self.adapter)

    def owns(self, release: releases_pb2.Release) -> bool:
        """Tell whether a release is one that the object asks for."""
        origin = release.origin
        return bool(origin.source == self.source and (not self.run or origin.run_id == self.run))

    def comes_from_source(self, revision: adapters_pb2.Revision) -> bool:
        """Tell whether a revision was first imported from the source; the store's URIs have no slash at their end."""
        return bool(revision.provenance.uri == self.source.rstrip("/"))


def _plan(release: Mapping[str, Any]) -> releases_pb2.RolloutPlan:
    """Return the plan of a rollout; rules have the defaults of `loraplex releases promote`."""
    rules = release.get("rules", {})
    limits = {
        "max_error_rise": rules.get("maxErrorRise", 0.02),
        "max_ttft_ratio": rules.get("maxTtftRatio"),
        "max_refusal_rise": rules.get("maxRefusalRise"),
        "min_agreement": rules.get("minAgreement"),
    }
    return releases_pb2.RolloutPlan(
        steps=[
            releases_pb2.RolloutStep(
                permille=round(step["percent"] * 10), requests=step.get("requests", 0), seconds=step.get("seconds", 0)
            )
            for step in release["steps"]
        ],
        rules=releases_pb2.RolloutRules(
            min_requests=rules.get("minRequests", 20),
            **{name: value for name, value in limits.items() if value is not None},
        ),
        shadow_permille=round(release.get("shadowPercent", 0) * 10),
        refusal_phrases=release.get("refusals", []),
    )


class Adapters:
    """Brings adapters of the store to what LoraAdapters ask for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # Imports that were told before they began: those that go on, or are tried again.
        self._announced: set[tuple[str, str, str]] = set()

    async def look(self, wanted: LoraAdapter, status: Mapping[str, Any], tell: Tell) -> Outcome:
        """Make the calls that an object needs now, and return how it is. `status` is what the last look has returned.

        From it comes only the digest that the source had, of which the store knows nothing where the look was killed
        between import and release, or where the release was refused.
        """
        found: dict[str, Any] = {}
        try:
            return await self._look(wanted, status, found, tell)
        except (Refused, sdk.LoraplexError) as error:
            return outcome_of(error, found)

    async def _look(self, wanted: LoraAdapter, status: Mapping[str, Any], found: dict[str, Any], tell: Tell) -> Outcome:
        store = self._store.of(wanted.tenant)
        if (base := await self._store.base(wanted.base)) is None:
            raise Refused(
                "BaseNotFound",
                f"spec.base: the store has no base model {wanted.base}; register it: an entry of the chart's models, "
                f"or loraplex models push DIR --name {wanted.base}",
            )
        if not await self._store.knows(wanted.tenant):
            raise Refused(
                "TenantUnknown",
                f"spec.tenant: {wanted.tenant} has neither a plan nor an API key; set it up: "
                f"loraplex tenants create {wanted.tenant}",
            )
        releases, live = await store.releases(wanted.name), await store.revision(wanted.name)
        found["live"] = live.digest if live else None
        release = _current(wanted, releases)
        if release is None and live is not None and not wanted.run and wanted.comes_from_source(live):
            await _abort(store, wanted, releases, tell)
            found |= {"digest": live.digest, "pin": live.provenance.pin, "release": None, "share": None}
            return self._live(live.base_digest, wanted, base, found)
        if release is None:
            release = await self._release(store, wanted, status, releases, found, tell)
            if release is None:
                return Outcome(State.IMPORTING, "False", "Importing", f"the store fetches {wanted.source}", 0.0, found)
        else:
            await _abort(store, wanted, releases, tell)
        release = await _advance(store, wanted, release, live)
        return self._outcome(await store.change("GetRelease", name=release.name), wanted, base, found)

    async def _release(
        self,
        store: TenantStore,
        wanted: LoraAdapter,
        status: Mapping[str, Any],
        releases: Sequence[releases_pb2.Release],
        found: dict[str, Any],
        tell: Tell,
    ) -> releases_pb2.Release | None:
        """Make a release of what the source has; None: the next look imports it."""
        try:
            if (revision := await self._revision(store, wanted, status, found)) is None:
                return None
            await _abort(store, wanted, releases, tell)
            for release in releases:
                if (release.digest, release.state) == (revision.digest, _States.RELEASE_STATE_LIVE):
                    return release  # another run has brought the same bytes
            pin = revision.provenance.pin if wanted.comes_from_source(revision) else ""
            origin = releases_pb2.Origin(source=wanted.source, pin=pin, run_id=wanted.run)
            return await store.change("CreateRelease", revision=revision.name, origin=origin)
        except (sdk.InvalidRequestError, sdk.FailedPreconditionError, sdk.DataLossError) as error:
            raise Refused(reason_of(error), error.message, IMPORT_FAILED_S) from error

    async def _revision(
        self, store: TenantStore, wanted: LoraAdapter, status: Mapping[str, Any], found: dict[str, Any]
    ) -> adapters_pb2.Revision | None:
        """Return what the source has, imported if it was not yet; None: the next look imports it."""
        known = status.get("imported", {})
        if (known.get("source"), known.get("run", "")) == (wanted.source, wanted.run):
            revision = await store.revision(f"{wanted.name}@{known['digest']}")
            if revision is not None:
                return revision
        importing = (wanted.name, wanted.source, wanted.run)
        if importing not in self._announced:
            self._announced.add(importing)
            return None
        request = adapters_pb2.ImportRevisionRequest(
            adapter=wanted.name, base_model=wanted.base, alias="-", source=wanted.source
        )
        revision = await store.fetch(request)
        self._announced.discard(importing)
        found["imported"] = {"source": wanted.source, "run": wanted.run, "digest": revision.digest}
        return revision

    def _outcome(
        self,
        release: releases_pb2.Release,
        wanted: LoraAdapter,
        base: adapters_pb2.BaseModel,
        found: dict[str, Any],
    ) -> Outcome:
        """Return how an object with a release is."""
        cause, number = release.history[-1].cause, release.name.rpartition("/")[2]
        found |= {"digest": release.digest, "pin": release.origin.pin, "release": release.name, "share": None}
        of_tenant = f"{wanted.adapter}#{number} --tenant {wanted.tenant}"
        match release.state:
            case _States.RELEASE_STATE_LIVE:
                found["live"] = release.digest
                return self._live(release.base_digest, wanted, base, found)
            case _States.RELEASE_STATE_CANARY:
                found["share"] = f"{release.rollout.plan.steps[release.rollout.step].permille / 10:g}%"
                return Outcome(State.CANARY, "False", "Canary", f"release {number} is a canary: {cause}", SOON_S, found)
            case _States.RELEASE_STATE_ROLLED_BACK | _States.RELEASE_STATE_RETIRED:
                rolled_back = release.state == _States.RELEASE_STATE_ROLLED_BACK
                state = State.ROLLED_BACK if rolled_back else State.RETIRED
                message = (
                    f"release {number} {'was rolled back' if rolled_back else 'has ended'}: {cause}; change "
                    f"spec.source, or spec.run to release the same again; loraplex releases history {of_tenant}"
                )
                return Outcome(state, "False", state, message, REST_S, found)
        if failed := [gate.name for gate in release.gates if not gate.passed]:
            message = f"gates of release {number} failed: {', '.join(failed)}; change spec.source or spec.run"
            return Outcome(State.VERIFIED, "False", "GatesFailed", message, SOON_S, found)
        message = f"release {number} waits for its gates: loraplex releases qualify {of_tenant} --gates FILE"
        return Outcome(State.VERIFIED, "False", "WaitsForGates", message, SOON_S, found)

    def _live(
        self, base_digest: str, wanted: LoraAdapter, base: adapters_pb2.BaseModel, found: Mapping[str, Any]
    ) -> Outcome:
        message = f"requests of {wanted.tenant} for {wanted.adapter} get it"
        if base_digest == (base.original_digest or base.digest):
            return Outcome(State.LIVE, "True", "Live", message, REST_S, found)
        message = (
            f"it was checked for an earlier revision of {wanted.base}, and is refused once no worker serves that one; "
            "change spec.run to import it for the live one"
        )
        return Outcome(State.LIVE, "False", "BaseReplaced", message, REST_S, found)


def _current(wanted: LoraAdapter, releases: Sequence[releases_pb2.Release]) -> releases_pb2.Release | None:
    """Return the last release of an object, unless another one went live after it, and is."""
    for release in releases:
        if wanted.owns(release):
            return release
        if release.state == _States.RELEASE_STATE_LIVE:
            break
    return None


async def _abort(store: TenantStore, wanted: LoraAdapter, releases: Sequence[releases_pb2.Release], tell: Tell) -> None:
    """End the open releases of other sources: the object owns the adapter."""
    for release in releases:
        if release.state in _OPEN and not wanted.owns(release):
            await store.change("AbortRelease", name=release.name, etag=release.etag)
            tell("Superseded", f"aborted {release.name} of {release.origin.source or release.digest}")


async def _advance(
    store: TenantStore, wanted: LoraAdapter, release: releases_pb2.Release, live: adapters_pb2.Revision | None
) -> releases_pb2.Release:
    """Bring a release as far as its object asks for."""
    if release.state == _States.RELEASE_STATE_VERIFIED and not wanted.external_gates:
        gate = releases_pb2.GateResult(name=NO_GATES, passed=True)
        release = await store.change("QualifyRelease", name=release.name, etag=release.etag, gates=[gate])
    plan = wanted.plan if live is not None and live.digest != release.digest else None
    if release.state == _States.RELEASE_STATE_QUALIFIED or (
        release.state == _States.RELEASE_STATE_CANARY and plan is None
    ):
        release = await store.change("PromoteRelease", name=release.name, etag=release.etag, plan=plan)
    return release


@dataclass(frozen=True)
class BaseModel:
    """A BaseModel: a base model that should be registered, and the digest of the revision that should be live."""

    model: str
    # Empty: whichever is live.
    digest: str

    @classmethod
    def of(cls, name: str, spec: Mapping[str, Any]) -> BaseModel:
        """Read an object, which the schema of its definition has checked."""
        return cls(spec.get("model", name), spec.get("digest", ""))

    @property
    def key(self) -> tuple[str, ...]:
        """Return what only one object may ask for."""
        return ("BaseModel", self.model)


class Bases:
    """Brings base models of the store to what BaseModels ask for."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def look(self, wanted: BaseModel, tell: Tell) -> Outcome:
        """Make the calls that an object needs now, and return how it is."""
        try:
            return await self._look(wanted, tell)
        except (Refused, sdk.LoraplexError) as error:
            return outcome_of(error, {})

    async def _look(self, wanted: BaseModel, tell: Tell) -> Outcome:
        live = await self._store.base(wanted.model)
        if live is None:
            raise Refused(
                "NotRegistered",
                f"the store has no base model {wanted.model}; register it: an entry of the chart's models, or "
                f"loraplex models push DIR --name {wanted.model}",
            )
        if wanted.digest and live.digest != wanted.digest:
            if await self._store.base(f"{wanted.model}@{wanted.digest}") is None:
                raise Refused(
                    "RevisionNotFound",
                    f"spec.digest: the store has no such revision of {wanted.model}, and {live.digest} is live; stage "
                    f"it: loraplex models push DIR --name {wanted.model} --stage",
                    REFUSED_S,
                )
            await self._store.promote_base(wanted.model, wanted.digest)
            tell("Promoted", f"{wanted.digest} is live, and {live.digest} the former revision")
            live = await self._store.base(wanted.model) or live
        fields = {
            "digest": live.digest,
            "architecture": live.architecture,
            "contextLength": live.context_length,
            "quantization": live.quantization,
        }
        return Outcome(State.LIVE, "True", "Live", f"{wanted.model} is registered", REST_S, fields)
