"""The ledger's decisions in Python, as the scripts broker/lua/ledger_*.lua make them, for simulation and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from bench.ledger_account import DAY_MS, MINUTE_MS, Account
from broker import terms
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
        found, state = account.record(wanted.id, now_ms) or (None, "")
        if found is not None and state == "open":
            return self._hold(tenant, account, replace(found, owner=wanted.owner), limits, now_ms)
        if found is not None and received is None:  # a call that has ended, before the server got to it
            return _granted(found), account.copy
        record = replace(wanted, minute=account.copy.minute, day=account.copy.day, month=account.copy.month)
        if received is not None:
            part, base = (found.part + 1, max(found.base, found.used_output)) if found else (now_ms, received)
            output = 0 if state == "finished" else max(0, wanted.output - base)
            record = replace(record, requests=0, input=0, part=part, base=base, used_output=base, output=output)
        self._check(account, record, limits, resumed=received is not None, now_ms=now_ms)
        account.add(record, record.requests, record.input, record.output)
        return self._hold(tenant, account, record, limits, now_ms)

    def _hold(
        self, tenant: str, account: Account, record: Reservation, limits: TokenLimits, now_ms: int
    ) -> tuple[Reservation, AccountCopy]:
        self._accounts[tenant] = account
        account.write(record, "open", now_ms)
        account.held[record.id] = now_ms + terms.HELD_MS
        if limits.streams is not None:
            account.streams[record.id] = now_ms + terms.HELD_MS
        account.wrote()
        return _granted(record), account.copy

    def _check(self, account: Account, record: Reservation, limits: TokenLimits, *, resumed: bool, now_ms: int) -> None:
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
        if found is None and state == "left" and given.day == 0:  # its reservation never came
            return account.copy, None
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

    def look(self, tenant: str, seen: AccountCopy, reservations: Sequence[Reservation], now_ms: int) -> Look:
        """See broker.ledger.Ledger."""
        account = self._accounts[tenant] = self._account(tenant, now_ms)
        refilled = account.is_behind(seen)
        if refilled:
            account.take_over(seen)
        for given in reservations:
            record, state = account.record(given.id, now_ms) or (given, "open")
            if state == "open" and (record.owner, record.part) == (given.owner, given.part):
                account.write(_with_use(record, given), "open", now_ms)
                account.held[record.id] = now_ms + terms.HELD_MS
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


def _granted(record: Reservation) -> Reservation:
    return replace(record, requests=int(record.part == 0), used_input=0, used_output=record.base)


def _with_use(record: Reservation, given: Reservation) -> Reservation:
    return replace(
        record,
        subject=given.subject or record.subject,
        used_input=max(record.used_input, given.used_input),
        used_output=max(record.used_output, given.used_output),
    )
