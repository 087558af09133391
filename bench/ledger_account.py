"""A tenant's account in Python, as broker/lua/include/ledger_account.lua keeps it, for the model of the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from broker import ledger_terms as terms
from broker.ledger_records import AccountCopy, Charge, Reservation

DAY_MS, MINUTE_MS = 86_400_000, 60_000


def _month_of(now_ms: int) -> int:
    at = datetime.fromtimestamp(now_ms / 1e3, UTC)
    return at.year * 12 + at.month - 1


@dataclass(frozen=True)
class Record:
    """A reservation as the ledger has it: `again` of its output tokens are charged a second time.

    It was resumed `resumes` times, the last time after `told` output tokens.
    """

    reservation: Reservation
    state: str = "open"
    again: int = 0
    told: int = 0
    resumes: int = 0


@dataclass
class Account:
    """An account; `copy` is its state as routers get it, `born` the time at which it was made."""

    born: int
    copy: AccountCopy
    # Times until which reservations are held, by id.
    held: dict[str, int] = field(default_factory=dict)
    # Time of the last look, and time before which no reservation is ended by one.
    looked: int = 0
    sweep_at: int = 0
    streams: dict[str, int] = field(default_factory=dict)
    # Output tokens that were made again today without a charge.
    repeated: int = 0
    # Reservations, and the time at which their record is dropped.
    records: dict[str, tuple[Record, int]] = field(default_factory=dict)
    reports: bool = False
    unreported: dict[str, Charge] = field(default_factory=dict)

    def begin_windows(self, now_ms: int) -> None:
        """Set back the counts of windows that have passed."""
        copy = self.copy
        if copy.minute < (minute := now_ms // MINUTE_MS):
            copy = replace(copy, minute=minute, requests=0, input=0, output=0)
        if copy.day < (day := now_ms // DAY_MS):
            copy, self.repeated = replace(copy, day=day, day_tokens=0), 0
        if copy.month < (month := _month_of(now_ms)):
            copy = replace(copy, month=month, month_tokens=0)
        self.copy = copy

    def record(self, record_id: str, now_ms: int) -> Record | None:
        """Return a reservation, unless its record is dropped."""
        found = self.records.get(record_id)
        return None if found is None or found[1] <= now_ms else found[0]

    def write(self, record: Record, now_ms: int) -> None:
        """Keep a reservation."""
        kept_ms = terms.OPEN_RECORD_MS if record.state == "open" else terms.ENDED_RECORD_MS
        self.records[record.reservation.id] = (record, now_ms + kept_ms)

    def charged_again(self, tokens: int) -> int:
        """Count output tokens that are made again; return how many of them are charged again."""
        repeated = self.repeated + tokens
        if repeated > terms.REPEATED_TOKENS + self.copy.day_tokens * terms.REPEATED_PERCENT / 100:
            return tokens
        self.repeated = repeated
        return 0

    def is_behind(self, seen: AccountCopy) -> bool:
        """Tell whether a router has seen a later state: data is lost."""
        return seen.epoch > 0 and (self.copy.epoch != seen.epoch or self.copy.version < seen.version)

    def take_over(self, seen: AccountCopy) -> None:
        """Take over a router's copy: a count is the higher of both."""
        copy = self.copy
        found = replace(copy, epoch=max(copy.epoch, seen.epoch), version=max(copy.version, seen.version))
        for window, names in (
            ("minute", ("requests", "input", "output")),
            ("day", ("day_tokens",)),
            ("month", ("month_tokens",)),
        ):
            if getattr(copy, window) == getattr(seen, window):
                found = replace(found, **{name: max(getattr(copy, name), getattr(seen, name)) for name in names})
        self.copy = found

    def add(self, record: Reservation, requests: int, given: int, made: int) -> None:
        """Add to the counts of those windows of a reservation that have not passed."""
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

    def end(self, record: Record, state: str, now_ms: int) -> Charge | None:
        """End a reservation; return the charge to report, if there is one."""
        held = record.reservation
        made = max(0, held.used_output - held.base) + record.again
        requests = held.requests if held.used_input or made else 0
        self.add(held, requests - held.requests, held.used_input - held.input, made - held.output)
        ended = replace(held, requests=requests, input=held.used_input, output=made)
        state = record.state if record.state == "finished" else state
        self.write(replace(record, reservation=ended, state=state), now_ms)
        self.held.pop(held.id, None)
        self.streams.pop(held.id, None)
        if not self.reports or held.used_input + made == 0:
            return None
        charge = Charge(f"{held.id}:{held.part}", held.used_input, made, now_ms, held.subject)
        self.unreported[charge.id] = charge
        return charge

    def wrote(self) -> None:
        """Count a change of the account."""
        self.copy = replace(self.copy, version=self.copy.version + 1)
