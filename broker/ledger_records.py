"""Dataclasses of what the ledger's calls take and return; broker/ledger.py explains accounts and reservations."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from broker.functions import PreparedCall


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Maximum streams at once, and counts by minute, day and month, in the order of the scripts; None: no limit."""

    streams: int | None = None
    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None


# The limits by the names that the scripts give them.
LIMIT_NAMES = dict(
    zip(("streams", "requests", "input", "output", "day_tokens", "month_tokens"), TokenLimits.__slots__, strict=True)
)


@dataclass(frozen=True, slots=True)
class AccountCopy:
    """A state of an account, in the order of the scripts.

    Windows have numbers by UTC, a month 12 x year + month - 1.
    """

    epoch: int = 0
    version: int = 0
    minute: int = 0
    requests: int = 0
    input: int = 0
    output: int = 0
    day: int = 0
    day_tokens: int = 0
    month: int = 0
    month_tokens: int = 0


COPY_FIELDS = len(fields(AccountCopy))


@dataclass(frozen=True, slots=True)
class Reservation:
    """A request's reservation at its router, in the order of the scripts.

    `base` output tokens of the request belong to earlier parts; `input` and `output` are reserved beyond them, in the
    windows that follow, which are 0 until it is granted; `used_output` counts from the request's first token.
    """

    id: str
    owner: str
    # Facts about the request, for its usage event.
    subject: str = ""
    part: int = 0
    base: int = 0
    requests: int = 1
    input: int = 0
    output: int = 0
    used_input: int = 0
    used_output: int = 0
    minute: int = 0
    day: int = 0
    month: int = 0


@dataclass(frozen=True, slots=True)
class Charge:
    """A part of a request that a tenant was charged for; `subject` as its router gave it."""

    id: str
    input: int
    output: int
    at_ms: int
    subject: str


@dataclass(frozen=True, slots=True)
class Look:
    """A look's answer; `refilled`: the account took over the router's copy."""

    account: AccountCopy
    expired: int
    refilled: bool
    # Charges that no router has reported for a while.
    charges: tuple[Charge, ...] = ()
    # Ids of those of the renewed reservations that another router has by now.
    moved: tuple[str, ...] = ()


@dataclass(slots=True)
class ReserveCall:
    """A call that reserves the tokens of a new request, to be sent with the job's enqueue; `answer` is the ledger's."""

    call: PreparedCall
    # Redis key of the reservation, which exists once it is granted.
    key: str
    answer: Any = None
