"""The ledger's decisions in Python, as the scripts broker/lua/ledger_*.lua make them, for simulation and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from bench.ledger_account import DAY_MS, MINUTE_MS, Account, Record
from broker import ledger_terms as terms
from broker.keys import is_key_account
from broker.ledger import BehindError, QuotaReachedError
from broker.ledger_records import LIMIT_NAMES, AccountCopy, Charge, Look, Reservation, TokenLimits


def _start_of(month: int) -> int:
    return round(datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC).timestamp() * 1e3)


class LedgerModel:
    """The accounts of all tenants in one Redis."""

    def __init__(self, *, reports: bool = False) -> None:
        self._reports = reports
        self._accounts: dict[str, Account] = {}

    def _account(self, tenant: str, now_ms: int) -> Account:
        account = self._accounts.get(tenant) or Account(
            now_ms, AccountCopy(epoch=now_ms), reports=self._reports and not is_key_account(tenant)
        )
        account.begin_windows(now_ms)
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
        found = account.record(wanted.id, now_ms)
        if found is not None and received is None:  # the same call again, or one that has ended before
            if found.state != "open":
                return _granted(found.reservation), account.copy
            moved = replace(found, reservation=replace(found.reservation, owner=wanted.owner))
            return self._hold(tenant, account, moved, limits, now_ms)
        wanted = replace(wanted, minute=account.copy.minute, day=account.copy.day, month=account.copy.month)
        streams = limits.streams
        repeated = account.repeated
        if received is None:
            record, new = Record(wanted), wanted
        elif found is None:
            new = replace(wanted, part=now_ms, base=received, used_output=received)
            new = replace(new, output=max(0, wanted.output - received))
            record = Record(new, told=received, resumes=1)
        else:
            record, new = _resumed(account, found, wanted, received)
            if found.state == "open" and streams is not None:
                streams = None if wanted.id in account.streams else 2 * streams
        try:
            self._check(account, new, limits, streams, now_ms)
        except QuotaReachedError:
            account.repeated = repeated
            raise
        account.add(record.reservation, new.requests, new.input, new.output)
        return self._hold(tenant, account, record, limits, now_ms)

    def _hold(
        self, tenant: str, account: Account, record: Record, limits: TokenLimits, now_ms: int
    ) -> tuple[Reservation, AccountCopy]:
        self._accounts[tenant] = account
        account.write(record, now_ms)
        account.held[record.reservation.id] = now_ms + terms.HELD_MS
        if limits.streams is not None:
            account.streams[record.reservation.id] = now_ms + terms.HELD_MS
        account.wrote()
        return _granted(record.reservation), account.copy

    def _check(
        self, account: Account, record: Reservation, limits: TokenLimits, streams: int | None, now_ms: int
    ) -> None:
        """Raise QuotaReachedError where there is no room for what a record adds, or `streams` are open."""
        copy, both = account.copy, record.input + record.output
        recovery_ms = account.born + terms.RECOVERY_MS - now_ms
        share = terms.RECOVERY_PERCENT / 100 if recovery_ms > 0 and copy.requests > 0 else 1
        to_minute = (copy.minute + 1) * MINUTE_MS - now_ms
        rows = (
            ("requests", copy.requests, record.requests, to_minute),
            ("input", copy.input, record.input, to_minute),
            ("output", copy.output, record.output, to_minute),
            ("day_tokens", copy.day_tokens, both, (copy.day + 1) * DAY_MS - now_ms),
            ("month_tokens", copy.month_tokens, both, _start_of(copy.month + 1) - now_ms),
        )
        refused: list[tuple[str, int]] = []
        for name, count, amount, window_ms in rows:
            most = getattr(limits, LIMIT_NAMES[name])
            if most is None or amount == 0 or count + amount <= most * share:
                continue
            wait_ms = -1 if amount > most else recovery_ms if count + amount <= most else window_ms
            refused.append((name, wait_ms))
        if streams is not None:
            account.streams = {one: until for one, until in account.streams.items() if until > now_ms}
            if len(account.streams) >= streams:
                refused.append(("streams", terms.STREAM_RETRY_MS if streams else -1))
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
        if found is None and state == "left" and given.day == 0:  # its reservation never came
            return account.copy, None
        record = found or Record(given, told=given.used_output)
        if record.reservation.owner != given.owner:
            _settle_late(account, record, given, now_ms)
            return account.copy, None
        if record.reservation.part != given.part:
            return account.copy, None
        record, charge = _with_use(record, given), None
        self._accounts[tenant] = account
        if state == "left" and record.state == "open":
            account.write(record, now_ms)
            account.held[given.id] = now_ms + terms.LINGER_MS
            account.streams.pop(given.id, None)
        else:
            charge = account.end(record, "finished" if state == "finished" else "ended", now_ms)
        account.wrote()
        return account.copy, charge

    def look(self, tenant: str, seen: AccountCopy, reservations: Sequence[Reservation], now_ms: int) -> Look:
        """See broker.ledger.Ledger."""
        account = self._accounts[tenant] = self._account(tenant, now_ms)
        refilled = account.is_behind(seen)
        if refilled:
            account.take_over(seen)
        moved: list[str] = []
        for given in reservations:
            record = account.record(given.id, now_ms) or Record(given, told=given.used_output)
            held = record.reservation
            if record.state == "open" and (held.owner, held.part) == (given.owner, given.part):
                account.write(_with_use(record, given), now_ms)
                account.held[given.id] = now_ms + terms.HELD_MS
                account.streams[given.id] = now_ms + terms.HELD_MS
            elif held.owner != given.owner:
                moved.append(given.id)
        if now_ms - (account.looked or now_ms) > terms.HELD_MS / 2:
            account.sweep_at = now_ms + terms.HELD_MS
        account.looked = now_ms
        late = sorted((until, one) for one, until in account.held.items() if until <= now_ms)[: terms.EXPIRED_PER_LOOK]
        expired = 0
        for _, one in late if now_ms >= account.sweep_at else ():
            found = account.record(one, now_ms)
            account.held.pop(one, None)
            if found is not None and found.state == "open":
                account.end(found, "ended", now_ms)
                expired += 1
        account.wrote()
        due_ms = now_ms - terms.REPORT_AFTER_MS
        due = tuple(charge for charge in account.unreported.values() if charge.at_ms <= due_ms)
        return Look(account.copy, expired, refilled, due, tuple(moved))

    def acknowledge(self, tenant: str, charges: Sequence[str]) -> None:
        """See broker.ledger.Ledger."""
        for charge in charges:
            self._accounts[tenant].unreported.pop(charge, None)


def _granted(record: Reservation) -> Reservation:
    return replace(record, requests=int(record.part == 0), used_input=0, used_output=record.base)


def _resumed(account: Account, found: Record, wanted: Reservation, received: int) -> tuple[Record, Reservation]:
    """Return the record of a request that goes on, and what is reserved now."""
    held = found.reservation
    fresh = found.resumes >= terms.FREE_RESUMES
    again = account.charged_again(max(0, held.used_output - received))
    told = max(held.used_output, received)
    new = replace(wanted, requests=int(fresh), input=wanted.input if fresh else 0, output=again)
    if found.state == "open":
        reservation = replace(
            held,
            owner=wanted.owner,
            requests=held.requests + new.requests,
            input=held.input + new.input,
            output=held.output + again,
            used_input=held.input,
            used_output=told,
        )
    else:
        base = max(held.base, held.used_output)
        new = replace(new, part=held.part + 1, base=base, used_output=base, output=max(0, wanted.output - base) + again)
        reservation, found = new, replace(found, again=0)
    record = Record(reservation, "open", again=found.again + again, told=told, resumes=found.resumes + 1)
    return record, new


def _settle_late(account: Account, record: Record, given: Reservation, now_ms: int) -> None:
    """Count what an earlier router sent beyond what the client told the later one: it is made again there."""
    late = given.used_output - record.told
    if late <= 0:
        return
    again = account.charged_again(late)
    record = replace(record, told=given.used_output, again=record.again + again)
    if again and record.state != "open":
        account.end(record, record.state, now_ms)
    else:
        held = record.reservation
        account.add(held, 0, 0, again)
        account.write(replace(record, reservation=replace(held, output=held.output + again)), now_ms)
    account.wrote()


def _with_use(record: Record, given: Reservation) -> Record:
    held = record.reservation
    held = replace(
        held,
        subject=given.subject or held.subject,
        used_input=max(held.used_input, given.used_input),
        used_output=max(held.used_output, given.used_output),
    )
    return replace(record, reservation=held)
