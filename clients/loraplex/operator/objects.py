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

from loraplex.adapters.v1 import adapters_pb2, releases_pb2

import loraplex_client as sdk
from loraplex.operator.store import (
    IMPORT_FAILED_S,
    REST_S,
    SOON_S,
    Rejected,
    State,
    Status,
    StoreLink,
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


class AdapterLook:
    """A look at a LoraAdapter. `status` is what the last look has returned; `told`: the import was told by that one.

    From the status comes only the digest that the source had, of which the store knows nothing where a look was killed
    between import and release, or where the release was refused.
    """

    def __init__(
        self, store: StoreLink, wanted: LoraAdapter, status: Mapping[str, Any], told: bool, tell: Tell
    ) -> None:
        self._anybody, self._store = store, store.of(wanted.tenant)
        self._wanted, self._status, self._told, self._tell = wanted, status, told, tell
        self._fields: dict[str, Any] = {}

    async def outcome(self) -> Status:
        """Make the calls that the object needs now, and return how it is."""
        try:
            return await self._look()
        except (Rejected, sdk.LoraplexError) as error:
            return outcome_of(error, self._fields)

    async def _look(self) -> Status:
        wanted, store = self._wanted, self._store
        if (base := await self._anybody.base(wanted.base)) is None:
            raise Rejected(
                "BaseNotFound",
                f"spec.base: the store has no base model {wanted.base}; register it: an entry of the chart's models, "
                f"or loraplex models push DIR --name {wanted.base}",
            )
        if not await self._anybody.knows(wanted.tenant):
            raise Rejected(
                "TenantUnknown",
                f"spec.tenant: {wanted.tenant} has neither a plan nor an API key; set it up: "
                f"loraplex tenants create {wanted.tenant}",
            )
        releases, live = await store.releases(wanted.name), await store.revision(wanted.name)
        self._fields["live"] = live.digest if live else None
        release = _current(wanted, releases)
        if release is None and live is not None and not wanted.run and wanted.comes_from_source(live):
            await self._abort_others(releases)
            self._fields |= {"digest": live.digest, "pin": live.provenance.pin, "release": None, "share": None}
            return self._live(live.base_digest, base)
        if release is None:
            revision = await self._known_revision()
            if revision is None and not self._told:
                message = f"the store fetches {wanted.source}"
                return Status(State.IMPORTING, "False", "Importing", message, 0.0, self._fields)
            release = await self._new_release(revision, releases)
        else:
            await self._abort_others(releases)
        release = await self._advance(release, live)
        return self._outcome(await store.change("GetRelease", name=release.name), base)

    async def _known_revision(self) -> adapters_pb2.Revision | None:
        """Return what an earlier look has imported from the source."""
        wanted, known = self._wanted, self._status.get("imported", {})
        if (known.get("source"), known.get("run", "")) != (wanted.source, wanted.run):
            return None
        return await self._store.revision(f"{wanted.name}@{known['digest']}")

    async def _new_release(
        self, revision: adapters_pb2.Revision | None, releases: Sequence[releases_pb2.Release]
    ) -> releases_pb2.Release:
        """Make a release of what the source has, which is imported unless an earlier look did it."""
        wanted = self._wanted
        try:
            if revision is None:
                revision = await self._store.fetch(
                    adapters_pb2.ImportRevisionRequest(
                        adapter=wanted.name, base_model=wanted.base, alias="-", source=wanted.source
                    )
                )
            self._fields["imported"] = {"source": wanted.source, "run": wanted.run, "digest": revision.digest}
            await self._abort_others(releases)
            for release in releases:
                if (release.digest, release.state) == (revision.digest, _States.RELEASE_STATE_LIVE):
                    return release  # another run has brought the same bytes
            pin = revision.provenance.pin if wanted.comes_from_source(revision) else ""
            origin = releases_pb2.Origin(source=wanted.source, pin=pin, run_id=wanted.run)
            return await self._store.change("CreateRelease", revision=revision.name, origin=origin)
        except (sdk.InvalidRequestError, sdk.FailedPreconditionError, sdk.DataLossError) as error:
            raise Rejected(reason_of(error), error.message, IMPORT_FAILED_S) from error

    async def _abort_others(self, releases: Sequence[releases_pb2.Release]) -> None:
        """End the open releases of other sources: the object owns the adapter."""
        for release in releases:
            if release.state in _OPEN and not self._wanted.owns(release):
                await self._store.change("AbortRelease", name=release.name, etag=release.etag)
                self._tell("Superseded", f"aborted {release.name} of {release.origin.source or release.digest}")

    async def _advance(self, release: releases_pb2.Release, live: adapters_pb2.Revision | None) -> releases_pb2.Release:
        """Bring a release as far as the object asks for."""
        if release.state == _States.RELEASE_STATE_VERIFIED and not self._wanted.external_gates:
            gate = releases_pb2.GateResult(name=NO_GATES, passed=True)
            release = await self._store.change("QualifyRelease", name=release.name, etag=release.etag, gates=[gate])
        plan = self._wanted.plan if live is not None and live.digest != release.digest else None
        if release.state == _States.RELEASE_STATE_QUALIFIED or (
            release.state == _States.RELEASE_STATE_CANARY and plan is None
        ):
            release = await self._store.change("PromoteRelease", name=release.name, etag=release.etag, plan=plan)
        return release

    def _outcome(self, release: releases_pb2.Release, base: adapters_pb2.BaseModel) -> Status:
        """Return how an object with a release is."""
        cause, number, fields = release.history[-1].cause, release.name.rpartition("/")[2], self._fields
        fields |= {"digest": release.digest, "pin": release.origin.pin, "release": release.name, "share": None}
        of_tenant = f"{self._wanted.adapter}#{number} --tenant {self._wanted.tenant}"
        match release.state:
            case _States.RELEASE_STATE_LIVE:
                fields["live"] = release.digest
                return self._live(release.base_digest, base)
            case _States.RELEASE_STATE_CANARY:
                fields["share"] = f"{release.rollout.plan.steps[release.rollout.step].permille / 10:g}%"
                message = f"release {number} is a canary: {cause}"
                return Status(State.CANARY, "False", "Canary", message, SOON_S, fields)
            case _States.RELEASE_STATE_ROLLED_BACK | _States.RELEASE_STATE_RETIRED:
                rolled_back = release.state == _States.RELEASE_STATE_ROLLED_BACK
                state = State.ROLLED_BACK if rolled_back else State.RETIRED
                message = (
                    f"release {number} {'was rolled back' if rolled_back else 'has ended'}: {cause}; change "
                    f"spec.source, or spec.run to release the same again; loraplex releases history {of_tenant}"
                )
                return Status(state, "False", state, message, REST_S, fields)
        if failed := [gate.name for gate in release.gates if not gate.passed]:
            message = f"gates of release {number} failed: {', '.join(failed)}; change spec.source or spec.run"
            return Status(State.VERIFIED, "False", "GatesFailed", message, SOON_S, fields)
        message = f"release {number} waits for its gates: loraplex releases qualify {of_tenant} --gates FILE"
        return Status(State.VERIFIED, "False", "WaitsForGates", message, SOON_S, fields)

    def _live(self, base_digest: str, base: adapters_pb2.BaseModel) -> Status:
        wanted = self._wanted
        if base_digest == (base.original_digest or base.digest):
            message = f"requests of {wanted.tenant} for {wanted.adapter} get it"
            return Status(State.LIVE, "True", "Live", message, REST_S, self._fields)
        message = (
            f"it was checked for an earlier revision of {wanted.base}, and is refused once no worker serves that one; "
            "change spec.run to import it for the live one"
        )
        return Status(State.LIVE, "False", "BaseReplaced", message, REST_S, self._fields)


async def delete_adapter(store: StoreLink, wanted: LoraAdapter, status: Mapping[str, Any]) -> bool:
    """Delete the adapter of a LoraAdapter that goes; returns False for one that never was the object's.

    That one's object was refused from its first look on. Where a first look was killed, the store has what it imported.
    """
    of_tenant = store.of(wanted.tenant)
    if not status.get("digest") and not status.get("imported"):
        is_own = any(map(wanted.owns, await of_tenant.releases(wanted.name)))
        if not is_own and not any(map(wanted.comes_from_source, await of_tenant.revisions(wanted.name))):
            return False
    await of_tenant.delete(wanted.name)
    return True


def _current(wanted: LoraAdapter, releases: Sequence[releases_pb2.Release]) -> releases_pb2.Release | None:
    """Return the last release of an object, unless another one went live after it, and is."""
    for release in releases:
        if wanted.owns(release):
            return release
        if release.state == _States.RELEASE_STATE_LIVE:
            break
    return None


@dataclass(frozen=True)
class ModelObject:
    """A BaseModel: a base model that should be registered, and the digest of the revision that should be live."""

    model: str
    # Empty: whichever is live.
    digest: str

    @classmethod
    def of(cls, name: str, spec: Mapping[str, Any]) -> ModelObject:
        """Read an object, which the schema of its definition has checked."""
        return cls(spec.get("model", name), spec.get("digest", ""))

    @property
    def key(self) -> tuple[str, ...]:
        """Return what only one object may ask for; nothing where it only looks."""
        return ("BaseModel", self.model) if self.digest else ()


async def look_at_base(store: StoreLink, wanted: ModelObject, tell: Tell) -> Status:
    """Make the calls that a BaseModel needs now, and return how it is."""
    try:
        return await _look_at_base(store, wanted, tell)
    except (Rejected, sdk.LoraplexError) as error:
        return outcome_of(error, {})


async def _look_at_base(store: StoreLink, wanted: ModelObject, tell: Tell) -> Status:
    if (live := await store.base(wanted.model)) is None:
        raise Rejected(
            "NotRegistered",
            f"the store has no base model {wanted.model}; register it: an entry of the chart's models, or "
            f"loraplex models push DIR --name {wanted.model}",
        )
    if wanted.digest and live.digest != wanted.digest:
        if (staged := await store.base(f"{wanted.model}@{wanted.digest}")) is None:
            raise Rejected(
                "RevisionNotFound",
                f"spec.digest: the store has no such revision of {wanted.model}, and {live.digest} is live; stage it: "
                f"loraplex models push DIR --name {wanted.model} --stage",
            )
        await store.promote_base(wanted.model, wanted.digest)
        tell("Promoted", f"{wanted.digest} is live, and {live.digest} the former revision")
        live = staged
    fields = {
        "digest": live.digest,
        "architecture": live.architecture,
        "contextLength": live.context_length,
        "quantization": live.quantization,
    }
    return Status(State.LIVE, "True", "Live", f"{wanted.model} is registered", REST_S, fields)
