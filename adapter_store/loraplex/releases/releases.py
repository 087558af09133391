"""Releases in the catalog: every change is one transaction, which compares the release's state and moves `live` too.

Blocks: call it in a thread. Tenants are the caller's to check.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from loraplex.adapter_store.catalog import point_alias, touch
from loraplex.adapter_store.database import Database
from loraplex.adapter_store.records import Candidate, Row, Rows, adapter_row, read_revision
from loraplex.contracts.artifacts.names import LIVE, AdapterName, RevisionName
from loraplex.contracts.artifacts.outcomes import StepOutcomes
from loraplex.releases.rollouts import (
    ALLOWED,
    GateResult,
    Origin,
    Release,
    ReleaseEvent,
    ReleaseName,
    ReleaseState,
    RolloutPlan,
)
from loraplex.releases.signers import Signers
from loraplex.runtime.rpc.errors import Aborted, AlreadyExists, Exhausted, Mismatch, NotFound
from loraplex.runtime.rpc.principal import known_caller

# Maximum number of releases of an adapter, and of the events of a release that are kept, the last ones.
MOST_RELEASES = 1_000
MOST_EVENTS = 500
# The actor of steps and rollbacks by rule.
STORE = "store"
_SELECT = "SELECT releases.*, tenant, adapter FROM releases JOIN adapters ON adapters.id = adapter_id "


@dataclass(frozen=True, slots=True)
class _Record:
    """The fields of a release that no query needs, kept as JSON."""

    origin: Origin
    signer: str = ""
    gates: tuple[GateResult, ...] = ()
    plan: RolloutPlan | None = None


class Releases:
    """The releases of all adapters, and what they say of revisions to the store's catalog."""

    def __init__(self, database: Database, signers: Signers | None = None) -> None:
        self._database = database
        self.signers = signers or Signers({})

    def check_alias(self, tenant: str) -> None:
        """Raise Mismatch where an upload may not move an alias, since its signature is checked after it."""
        if self.signers.require(tenant):
            message = "revisions of this tenant need a signature before an alias; use: loraplex releases push"
            raise Mismatch("header.alias", message, reason="SIGNATURE_MISSING")

    def check_signed(self, rows: Rows, adapter_id: int, revision: RevisionName) -> None:
        """Raise Mismatch where a revision may have no alias, since its tenant's need a signature."""
        signed = "SELECT 1 FROM releases WHERE adapter_id = ? AND digest = ? AND json_extract(record, '$.signer') != ''"
        if (
            self.signers.require(revision.tenant)
            and rows.execute(signed, (adapter_id, revision.digest)).fetchone() is None
        ):
            message = "needs a signature before an alias; make a signed release of it"
            raise Mismatch(str(revision), message, reason="SIGNATURE_MISSING")

    def candidate(self, rows: Rows, live: RevisionName) -> Candidate | None:
        """Return what is rolled out in the place of a revision."""
        row = rows.execute(
            _SELECT + "WHERE tenant = ? AND adapter = ? AND state = ? AND baseline = ?",
            (live.tenant, live.adapter, ReleaseState.CANARY.value, live.digest),
        ).fetchone()
        if row is None:
            return None
        release = _to_release(rows, row)
        assert release.plan is not None, "a canary has a plan"
        revision = read_revision(rows, RevisionName(live.tenant, live.adapter, release.digest))
        plan, permille = release.plan, release.plan.steps[release.step].permille
        return Candidate(
            *(revision, str(release.name), release.step, permille),
            *(plan.shadow_permille, plan.refusal_phrases, plan.split_key),
        )

    def live_moved(self, rows: Rows, adapter_id: int, digest: str) -> None:
        """Note in the adapter's releases that `live` was moved by other means; an empty digest: it was removed."""
        now, who = time.time_ns(), known_caller()
        actor = STORE if who is None else who.name
        cause = f"live was moved to {digest}" if digest else "live was removed"
        running = _SELECT + "WHERE adapter_id = ? AND digest != ? AND state IN ('live', 'canary')"
        for row in rows.execute(running, (adapter_id, digest)).fetchall():
            release = _to_release(rows, row)
            after = ReleaseState.RETIRED if release.state is ReleaseState.LIVE else ReleaseState.ROLLED_BACK
            _move(rows, release, after, now, actor, cause)
        _make_live(rows, adapter_id, digest, now, actor, cause)

    def create(self, name: RevisionName, origin: Origin, actor: str, signer: str = "") -> Release:
        """Make a release of a revision whose files were verified, and signed where there is a signer.

        Raises NotFound, AlreadyExists where one of the revision has not ended, Exhausted.
        """
        now = time.time_ns()
        with self._database.transaction() as rows:
            revision = read_revision(rows, name)
            adapter_id = adapter_row(rows, name.adapter_name)["id"]
            open_release = _SELECT + "WHERE adapter_id = ? AND digest = ? AND state NOT IN ('retired', 'rolled back')"
            if (row := rows.execute(open_release, (adapter_id, name.digest)).fetchone()) is not None:
                raise AlreadyExists(f"{_name(row)} is {row['state']} and has this revision already")
            if not origin.source and (provenance := revision.provenance) is not None:
                origin = replace(origin, source=provenance.uri, pin=provenance.pin)
            number = _one(rows, "SELECT coalesce(max(number), 0) + 1 FROM releases WHERE adapter_id = ?", adapter_id)
            if number > MOST_RELEASES:
                message = f"{name.adapter_name} has {MOST_RELEASES} releases; use another name for the next"
                raise Exhausted(f"{name.adapter_name}/releases", message, retry_after_s=None, reason="RELEASES_FULL")
            release = Release(
                ReleaseName(name.adapter_name, number),
                adapter_id,
                name.digest,
                revision.base_digest,
                ReleaseState.IMPORTED,
                origin,
                create_ns=now,
                change=0,
                signer=signer,
            )
            rows.execute(
                "INSERT INTO releases (adapter_id, number, digest, base_digest, state, record, baseline, step, "
                "step_ns, create_ns, change) VALUES (?, ?, ?, ?, ?, ?, '', 0, 0, ?, ?)",
                (
                    *(adapter_id, number, name.digest, revision.base_digest, release.state.value),
                    *(_record(release), now, _next_change(rows, now)),
                ),
            )
            _note(rows, release, ReleaseEvent(revision.create_ns or now, None, release.state, actor, "uploaded", {}))
            cause = "its files are what their digests say" + (f", and signed by {signer}" if signer else "")
            return _move(rows, release, ReleaseState.VERIFIED, now, actor, cause)

    def get(self, name: ReleaseName) -> Release:
        """Return a release with its history. Raises NotFound."""
        with self._database.reading() as rows:
            return _with_history(rows, _read(rows, name))

    def page(self, adapter: AdapterName, before: int, limit: int) -> list[Release]:
        """Return an adapter's releases whose numbers are below `before`, newest first. Raises NotFound."""
        with self._database.reading() as rows:
            selected = rows.execute(
                _SELECT + "WHERE adapter_id = ? AND number < ? ORDER BY number DESC LIMIT ?",
                (adapter_row(rows, adapter)["id"], before, limit),
            ).fetchall()
            return [_to_release(rows, row) for row in selected]

    def changes(self, adapter: AdapterName, after: int) -> list[Release]:
        """Return an adapter's releases that changed after a change, in that order, with histories. Raises NotFound."""
        with self._database.reading() as rows:
            selected = rows.execute(
                _SELECT + "WHERE adapter_id = ? AND change > ? ORDER BY change",
                (adapter_row(rows, adapter)["id"], after),
            ).fetchall()
            return [_with_history(rows, _to_release(rows, row)) for row in selected]

    def qualify(self, name: ReleaseName, etag: str, gates: Sequence[GateResult], actor: str) -> Release:
        """Keep the results of gates. Raises NotFound, Aborted on a stale etag, Mismatch in another state."""
        failed = [gate.name for gate in gates if not gate.passed]
        after = ReleaseState.VERIFIED if failed else ReleaseState.QUALIFIED
        cause = f"failed: {', '.join(failed)}" if failed else f"gates passed: {len(gates)}"
        figures = {f"{gate.name}.{key}": value for gate in gates for key, value in gate.figures.items()}
        with self._database.transaction() as rows:
            release = replace(_checked(rows, name, etag), gates=tuple(gates))
            return _move(rows, release, after, time.time_ns(), actor, cause, figures)

    def promote(self, name: ReleaseName, etag: str, plan: RolloutPlan | None, actor: str) -> Release:
        """Begin a rollout, or make the release live at once.

        Raises NotFound, Aborted on a stale etag, and Mismatch in another state, where nothing is live that a canary
        could stand beside, or where another rollout runs.
        """
        now = time.time_ns()
        with self._database.transaction() as rows:
            release = _checked(rows, name, etag)
            live = _live_digest(rows, release.adapter_id)
            if release.state not in {ReleaseState.QUALIFIED, ReleaseState.CANARY}:
                message = f"is {release.state.value}; only a qualified release or a canary can be promoted"
                raise Mismatch(str(name), message, reason="RELEASE_STATE")
            if plan is None:
                return _go_live(rows, release, live, now, actor, "promoted")
            if not live or live == release.digest:
                what = "is live already" if live else "has nothing live to stand beside"
                raise Mismatch(str(name), f"{what}; promote it without steps")
            adapter = name.adapter
            if read_revision(rows, RevisionName(adapter.tenant, adapter.adapter, live)).base_digest != (
                release.base_digest
            ):
                message = "is for another base model than the live revision; promote it without steps"
                raise Mismatch(str(name), message, reason="WRONG_BASE")
            running = _SELECT + "WHERE adapter_id = ? AND state = ? AND number != ?"
            row = rows.execute(running, (release.adapter_id, ReleaseState.CANARY.value, name.number)).fetchone()
            if row is not None:
                message = f"release {row['number']} is a canary; promote, abort or roll back that one first"
                raise Mismatch(str(name), message, reason="ROLLOUT_RUNNING")
            if release.state is ReleaseState.CANARY:
                raise Mismatch(str(name), "is a canary; promote it without steps, or abort it", reason="RELEASE_STATE")
            plan = replace(plan, split_key=secrets.token_hex(16))
            release = replace(release, plan=plan, baseline=live, step=0, step_ns=now)
            return _move(rows, release, ReleaseState.CANARY, now, actor, _share(plan, 0))

    def end(self, name: ReleaseName, etag: str, actor: str, *, live: bool) -> Release:
        """Abort a release, or with `live` roll back a canary or live one.

        Raises NotFound, Aborted on a stale etag, Mismatch in another state.
        """
        now = time.time_ns()
        with self._database.transaction() as rows:
            release = _checked(rows, name, etag)
            if release.state is ReleaseState.CANARY:
                return _move(rows, release, ReleaseState.ROLLED_BACK, now, actor, "rolled back" if live else "aborted")
            if not live:
                if release.state is ReleaseState.LIVE:
                    raise Mismatch(str(name), "is live; roll it back instead", reason="RELEASE_STATE")
                return _move(rows, release, ReleaseState.RETIRED, now, actor, "aborted")
            if release.state is not ReleaseState.LIVE:
                raise Mismatch(str(name), f"is {release.state.value}, not live; abort it", reason="RELEASE_STATE")
            if not release.baseline:
                raise Mismatch(str(name), "nothing to roll back to: no revision was live before it")
            release = _move(rows, release, ReleaseState.ROLLED_BACK, now, actor, "rolled back")
            _point_live(rows, release.adapter_id, release.baseline, now)
            _make_live(rows, release.adapter_id, release.baseline, now, actor, f"release {name.number} was rolled back")
            return release

    def take_outcomes(self, reporter: str, outcomes: Mapping[tuple[ReleaseName, int], StepOutcomes]) -> list[Release]:
        """Keep a router's sums in the place of its former ones; return the releases that changed by them.

        Sums of releases and steps that do not run any more are dropped.
        """
        changed = []
        with self._database.transaction() as rows:
            for (name, step), sums in outcomes.items():
                try:
                    release = _read(rows, name)
                except NotFound:
                    continue
                if release.state is not ReleaseState.CANARY or release.step != step:
                    continue
                rows.execute(
                    "INSERT INTO release_outcomes VALUES (?, ?, ?, ?, ?) "
                    "ON CONFLICT (adapter_id, number, step, reporter) DO UPDATE SET outcomes = excluded.outcomes",
                    (release.adapter_id, name.number, step, reporter, msgspec.json.encode(sums).decode()),
                )
                changed += self._judge(rows, _read(rows, name))
        return changed

    def latest_change(self) -> int:
        """Return the number of the last change of a release, or of what a deletion has left."""
        with self._database.reading() as rows:
            return _one(rows, "SELECT coalesce(max(change), 0) FROM releases")

    def judge_all(self) -> list[Release]:
        """Hold all rollouts against their plans, since a step may end by time; return those that changed."""
        with self._database.reading() as rows:
            running = rows.execute(_SELECT + "WHERE state = ?", (ReleaseState.CANARY.value,)).fetchall()
        changed = []
        for row in running:
            with self._database.transaction() as rows:
                changed += self._judge(rows, _read(rows, _name(row)))
        return changed

    def _judge(self, rows: Rows, release: Release) -> list[Release]:
        """Roll a canary back, or take it to its next step, where its sums say so; returns it if it changed."""
        if release.state is not ReleaseState.CANARY or release.plan is None:
            return []
        now, plan = time.time_ns(), release.plan
        figures = release.outcomes.figures()
        if broken := plan.rules.broken(figures):
            return [_move(rows, release, ReleaseState.ROLLED_BACK, now, STORE, broken, figures)]
        if not plan.steps[release.step].has_passed(release.outcomes, (now - release.step_ns) / 1e9):
            return []
        if (step := release.step + 1) == len(plan.steps):
            return [_go_live(rows, release, release.baseline, now, STORE, "all steps passed", figures)]
        release = replace(release, step=step, step_ns=now)
        return [_move(rows, release, ReleaseState.CANARY, now, STORE, _share(plan, step), figures)]


def _make_live(rows: Rows, adapter_id: int, digest: str, now: int, actor: str, cause: str) -> None:
    """Note that a revision is live in the newest of its releases that was not rolled back."""
    row = rows.execute(
        _SELECT + "WHERE adapter_id = ? AND digest = ? AND state != 'rolled back' ORDER BY number DESC LIMIT 1",
        (adapter_id, digest),
    ).fetchone()
    if row is not None and row["state"] != ReleaseState.LIVE:
        _move(rows, _to_release(rows, row), ReleaseState.LIVE, now, actor, cause)


def _share(plan: RolloutPlan, step: int) -> str:
    return f"step {step + 1} of {len(plan.steps)}: {plan.steps[step].permille / 10:g}%"


def _go_live(
    rows: Rows,
    release: Release,
    live: str,
    now: int,
    actor: str,
    cause: str,
    figures: dict[str, float] | None = None,
) -> Release:
    """Make a release live, in the place of the revision `live`, whose release is retired."""
    for row in rows.execute(
        _SELECT + "WHERE adapter_id = ? AND (state = 'live' OR (state = 'canary' AND number != ?))",
        (release.adapter_id, release.name.number),
    ).fetchall():
        former = _to_release(rows, row)
        if former.state is ReleaseState.CANARY:
            message = f"release {former.name.number} is a canary; promote, abort or roll back that one first"
            raise Mismatch(str(release.name), message, reason="ROLLOUT_RUNNING")
        if former.name != release.name:
            _move(rows, former, ReleaseState.RETIRED, now, actor, f"release {release.name.number} is live")
    release = _move(rows, replace(release, baseline=live), ReleaseState.LIVE, now, actor, cause, figures)
    _point_live(rows, release.adapter_id, release.digest, now)
    return release


def _point_live(rows: Rows, adapter_id: int, digest: str, now: int) -> None:
    point_alias(rows, adapter_id, LIVE, digest)
    touch(rows, adapter_id, now)


def _live_digest(rows: Rows, adapter_id: int) -> str:
    row = rows.execute("SELECT digest FROM aliases WHERE adapter_id = ? AND alias = ?", (adapter_id, LIVE)).fetchone()
    return "" if row is None else str(row["digest"])


def _move(
    rows: Rows,
    release: Release,
    after: ReleaseState,
    now: int,
    actor: str,
    cause: str,
    figures: dict[str, float] | None = None,
) -> Release:
    """Write a release with its new state and an event. Raises Mismatch where it cannot go from its state to that."""
    if after not in ALLOWED[release.state]:
        message = f"is {release.state.value}; it cannot become {after.value}"
        raise Mismatch(str(release.name), message, reason="RELEASE_STATE")
    event = ReleaseEvent(now, release.state, after, actor, cause, figures or {})
    moved = replace(release, state=after, change=_next_change(rows, now))
    rows.execute(
        "UPDATE releases SET state = ?, record = ?, baseline = ?, step = ?, step_ns = ?, change = ? "
        "WHERE adapter_id = ? AND number = ?",
        (
            *(after.value, _record(moved), moved.baseline, moved.step, moved.step_ns, moved.change),
            *(moved.adapter_id, moved.name.number),
        ),
    )
    _note(rows, moved, event)
    rows.execute(
        "DELETE FROM release_outcomes WHERE adapter_id = ? AND number = ? AND step != ?",
        (moved.adapter_id, moved.name.number, moved.step),
    )
    return _with_history(rows, _read(rows, moved.name))


def _note(rows: Rows, release: Release, event: ReleaseEvent) -> None:
    key = {"adapter_id": release.adapter_id, "number": release.name.number}
    rows.execute(
        "INSERT INTO release_events (adapter_id, number, record) VALUES (:adapter_id, :number, :record)",
        {**key, "record": msgspec.json.encode(event).decode()},
    )
    rows.execute(
        "DELETE FROM release_events WHERE adapter_id = :adapter_id AND number = :number AND event <= ("
        "SELECT event FROM release_events WHERE adapter_id = :adapter_id AND number = :number "
        "ORDER BY event DESC LIMIT 1 OFFSET :most)",
        {**key, "most": MOST_EVENTS},
    )


def _next_change(rows: Rows, now: int) -> int:
    # By the clock, so that a number of a deleted release is not given again.
    return max(now, int(_one(rows, "SELECT coalesce(max(change), 0) + 1 FROM releases")))


def _one(rows: Rows, query: str, *values: Any) -> int:
    return int(rows.execute(query, values).fetchone()[0])


def _record(release: Release) -> str:
    return msgspec.json.encode(_Record(release.origin, release.signer, release.gates, release.plan)).decode()


def _name(row: Row) -> ReleaseName:
    return ReleaseName(AdapterName(row["tenant"], row["adapter"]), row["number"])


def _read(rows: Rows, name: ReleaseName) -> Release:
    row = rows.execute(
        _SELECT + "WHERE tenant = ? AND adapter = ? AND number = ?",
        (name.adapter.tenant, name.adapter.adapter, name.number),
    ).fetchone()
    if row is None:
        raise NotFound("release", str(name))
    return _to_release(rows, row)


def _checked(rows: Rows, name: ReleaseName, etag: str) -> Release:
    release = _read(rows, name)
    if etag and release.etag != etag:
        raise Aborted(f"{name} has changed since etag {etag} was read; read it again")
    return release


def _to_release(rows: Rows, row: Row) -> Release:
    record = msgspec.json.decode(row["record"], type=_Record)
    outcomes = StepOutcomes()
    if record.plan is not None:
        for (sums,) in rows.execute(
            "SELECT outcomes FROM release_outcomes WHERE adapter_id = ? AND number = ? AND step = ?",
            (row["adapter_id"], row["number"], row["step"]),
        ):
            outcomes.add(msgspec.json.decode(sums, type=StepOutcomes))
    return Release(
        _name(row),
        row["adapter_id"],
        row["digest"],
        row["base_digest"],
        ReleaseState(row["state"]),
        record.origin,
        create_ns=row["create_ns"],
        change=row["change"],
        signer=record.signer,
        gates=record.gates,
        plan=record.plan,
        baseline=row["baseline"],
        step=row["step"],
        step_ns=row["step_ns"],
        outcomes=outcomes,
    )


def _with_history(rows: Rows, release: Release) -> Release:
    events = rows.execute(
        "SELECT record FROM release_events WHERE adapter_id = ? AND number = ? ORDER BY event",
        (release.adapter_id, release.name.number),
    )
    return replace(release, history=tuple(msgspec.json.decode(row["record"], type=ReleaseEvent) for row in events))
