"""The ledger's decisions in Python, as the scripts broker/lua/ledger_*.lua make them, for simulation and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from broker import terms
from broker.ledger import (
    LIMIT_NAMES,
    AccountCopy,
    BehindError,
    Charge,
    Look,
    QuotaReachedError,
    Reservation,
    TokenLimits,
)

_DAY_MS, _MINUTE_MS = 86_400_000, 60_000


def _month_of(now_ms: int) -> int:
    at = datetime.fromtimestamp(now_ms / 1e3, UTC)
    return at.year * 12 + at.month - 1


def _start_of(month: int) -> int:
    return round(datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC).timestamp() * 1e3)


@dataclass
class _Account:
    born: int
    copy: AccountCopy
    # Until when, by id.
    held: dict[str, int] = field(default_factory=dict)
    # Time of the last look, and time before which no reservation is ended by one.
    looked: int = 0
    sweep_at: int = 0
    streams: dict[str, int] = field(default_factory=dict)
    # Reservations with their state, and the time at which their record is dropped.
    records: dict[str, tuple[Reservation, str, int]] = field(default_factory=dict)
    reports: bool = False
    unreported: dict[str, Charge] = field(default_factory=dict)

    def record(self, record_id: str, now_ms: int) -> tuple[Reservation, str] | None:
        found = self.records.get(record_id)
        return None if found is None or found[2] <= now_ms else found[:2]

    def write(self, record: Reservation, state: str, now_ms: int) -> None:
        kept_ms = terms.OPEN_RECORD_MS if state == "open" else terms.ENDED_RECORD_MS
        self.records[record.id] = (record, state, now_ms + kept_ms)

    def is_behind(self, seen: AccountCopy) -> bool:
        return seen.epoch > 0 and (self.copy.epoch != seen.epoch or self.copy.version < seen.version)

    def add(self, record: Reservation, requests: int, given: int, made: int) -> None:
        copy, both = self.copy, given + made
        if record.minute == copy.minute:
            copy = replace(
                copy,
                requests=max(0, copy.requests + requests),
                input=max(0, copy.input + given),
                output=max(0, copy.output + made),
            )
        if record.day == copy.day:
            copy = replace(copy, day_tokens=max(0, copy.day_tokens + both))
        if record.month == copy.month:
            copy = replace(copy, month_tokens=max(0, copy.month_tokens + both))
        self.copy = copy

    def end(self, record: Reservation, before: str, state: str, now_ms: int) -> Charge | None:
        made = max(0, record.used_output - record.base)
        requests = record.requests if record.used_input or made else 0
        self.add(record, requests - record.requests, record.used_input - record.input, made - record.output)
        ended = replace(record, requests=requests, input=record.used_input, output=made)
        self.write(ended, before if before == "finished" else state, now_ms)
        self.held.pop(record.id, None)
        self.streams.pop(record.id, None)
        if not self.reports or record.used_input + made == 0:
            return None
        charge = Charge(f"{record.id}:{record.part}", record.used_input, made, now_ms, record.subject)
        self.unreported[charge.id] = charge
        return charge

    def wrote(self) -> None:
        self.copy = replace(self.copy, version=self.copy.version + 1)


class LedgerModel:
    """The accounts of all tenants in one Redis."""

    def __init__(self, *, reports: bool = False) -> None:
        self._reports = reports
        self._accounts: dict[str, _Account] = {}

    def _account(self, tenant: str, now_ms: int) -> _Account:
        account = self._accounts.get(tenant) or _Account(now_ms, AccountCopy(epoch=now_ms), reports=self._reports)
        copy = account.copy
        if copy.minute < (minute := now_ms // _MINUTE_MS):
            copy = replace(copy, minute=minute, requests=0, input=0, output=0)
        if copy.day < (day := now_ms // _DAY_MS):
            copy = replace(copy, day=day, day_tokens=0)
        if copy.month < (month := _month_of(now_ms)):
            copy = replace(copy, month=month, month_tokens=0)
        account.copy = copy
        return account

    def reserve(
        self,
        tenant: str,
        wanted: Reservation,
        received: int | None,
        limits: TokenLimits,
        seen: AccountCopy,
        now_ms: int,
    ) -> tuple[Reservation, AccountCopy]:
        """See broker.ledger.Ledger."""
        account = self._account(tenant, now_ms)
        if account.is_behind(seen):
            raise BehindError
        found, state = account.record(wanted.id, now_ms) or (None, "")
        if found is not None and state == "open":
            return self._hold(tenant, account, replace(found, owner=wanted.owner), limits, now_ms)
        record = replace(wanted, minute=account.copy.minute, day=account.copy.day, month=account.copy.month)
        if received is not None:
            part, base = (found.part + 1, max(found.base, found.used_output)) if found else (now_ms, received)
            output = 0 if state == "finished" else max(0, wanted.output - base)
            record = replace(record, requests=0, input=0, part=part, base=base, used_output=base, output=output)
        self._check(account, record, limits, resumed=received is not None, now_ms=now_ms)
        account.add(record, record.requests, record.input, record.output)
        return self._hold(tenant, account, record, limits, now_ms)

    def _hold(
        self, tenant: str, account: _Account, record: Reservation, limits: TokenLimits, now_ms: int
    ) -> tuple[Reservation, AccountCopy]:
        self._accounts[tenant] = account
        account.write(record, "open", now_ms)
        account.held[record.id] = now_ms + terms.HELD_MS
        if limits.streams is not None:
            account.streams[record.id] = now_ms + terms.HELD_MS
        account.wrote()
        requests = int(record.part == 0)
        granted = replace(record, requests=requests, used_input=0, used_output=record.base)
        return granted, account.copy

    def _check(
        self, account: _Account, record: Reservation, limits: TokenLimits, *, resumed: bool, now_ms: int
    ) -> None:
        copy, both = account.copy, record.input + record.output
        recovery_ms = account.born + terms.RECOVERY_MS - now_ms
        share = terms.RECOVERY_PERCENT / 100 if recovery_ms > 0 and copy.requests > 0 else 1
        to_minute = (copy.minute + 1) * _MINUTE_MS - now_ms
        rows = (
            ("requests", copy.requests, record.requests, to_minute),
            ("input", copy.input, record.input, to_minute),
            ("output", copy.output, record.output, to_minute),
            ("day_tokens", copy.day_tokens, both, (copy.day + 1) * _DAY_MS - now_ms),
            ("month_tokens", copy.month_tokens, both, _start_of(copy.month + 1) - now_ms),
        )
        refused: list[tuple[str, int]] = []
        for name, count, amount, window_ms in rows:
            most = getattr(limits, LIMIT_NAMES[name])
            if most is None or amount == 0 or count + amount <= most * share:
                continue
            wait_ms = -1 if amount > most else recovery_ms if count + amount <= most else window_ms
            refused.append((name, wait_ms))
        if limits.streams is not None and not resumed:
            account.streams = {one: until for one, until in account.streams.items() if until > now_ms}
            if len(account.streams) >= limits.streams:
                refused.append(("streams", terms.STREAM_RETRY_MS if limits.streams else -1))
        if not refused:
            return
        never = [name for name, wait_ms in refused if wait_ms < 0]
        if never:
            raise QuotaReachedError(LIMIT_NAMES[never[-1]], None)
        name, wait_ms = max(refused, key=lambda one: one[1])
        raise QuotaReachedError(LIMIT_NAMES[name], wait_ms)

    def settle(
        self, tenant: str, given: Reservation, state: str, seen: AccountCopy, now_ms: int
    ) -> tuple[AccountCopy, Charge | None]:
        """See broker.ledger.Ledger."""
        account = self._account(tenant, now_ms)
        found = account.record(given.id, now_ms)
        if found is None and account.is_behind(seen):
            raise BehindError
        record, before = found or (given, "open")
        if (record.owner, record.part) != (given.owner, given.part):
            return account.copy, None
        record, charge = _with_use(record, given), None
        self._accounts[tenant] = account
        if state == "left" and before == "open":
            account.write(record, before, now_ms)
            account.held[record.id] = now_ms + terms.LINGER_MS
            account.streams.pop(record.id, None)
        else:
            charge = account.end(record, before, "finished" if state == "finished" else "ended", now_ms)
        account.wrote()
        return account.copy, charge

    def look(self, tenant: str, seen: AccountCopy, reservations: list[tuple[Reservation, bool]], now_ms: int) -> Look:
        """See broker.ledger.Ledger."""
        account = self._accounts[tenant] = self._account(tenant, now_ms)
        refilled = account.is_behind(seen)
        if refilled:
            account.copy = _higher(account.copy, seen)
        for given, streams in reservations:
            record, state = account.record(given.id, now_ms) or (given, "open")
            if state == "open" and (record.owner, record.part) == (given.owner, given.part):
                account.write(_with_use(record, given), "open", now_ms)
                account.held[record.id] = now_ms + terms.HELD_MS
                if streams:
                    account.streams[record.id] = now_ms + terms.HELD_MS
        if now_ms - (account.looked or now_ms) > terms.HELD_MS / 2:
            account.sweep_at = now_ms + terms.HELD_MS
        account.looked = now_ms
        late = sorted((until, one) for one, until in account.held.items() if until <= now_ms)[: terms.EXPIRED_PER_LOOK]
        expired = 0
        for _, one in late if now_ms >= account.sweep_at else ():
            found = account.record(one, now_ms)
            account.held.pop(one, None)
            if found is not None and found[1] == "open":
                account.end(*found, "ended", now_ms)
                expired += 1
        account.wrote()
        due_ms = now_ms - terms.REPORT_AFTER_MS
        due = tuple(charge for charge in account.unreported.values() if charge.at_ms <= due_ms)
        return Look(account.copy, expired, refilled, due)

    def acknowledge(self, tenant: str, charges: Sequence[str]) -> None:
        """See broker.ledger.Ledger."""
        for charge in charges:
            self._accounts[tenant].unreported.pop(charge, None)


def _with_use(record: Reservation, given: Reservation) -> Reservation:
    return replace(
        record,
        subject=given.subject or record.subject,
        used_input=max(record.used_input, given.used_input),
        used_output=max(record.used_output, given.used_output),
    )


def _higher(account: AccountCopy, seen: AccountCopy) -> AccountCopy:
    found = replace(account, epoch=max(account.epoch, seen.epoch), version=max(account.version, seen.version))
    for window, names in (
        ("minute", ("requests", "input", "output")),
        ("day", ("day_tokens",)),
        ("month", ("month_tokens",)),
    ):
        if getattr(account, window) == getattr(seen, window):
            found = replace(found, **{name: max(getattr(account, name), getattr(seen, name)) for name in names})
    return found
