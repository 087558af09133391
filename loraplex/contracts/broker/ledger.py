"""The ledger: what tenants and API keys have used of their quotas, and reservations of what may still come.

    reserve ──▶ open: its router tells every second what is used so far: charged ──▶ it tells the end: event
                  └──▶ its router has not renewed for HELD_MS: another one's renewal ends it: event

An account, of a tenant or an API key with a plan, counts what was charged in the running minute, day and month. Open
reservations hold more beside that, and both together stay within the limits. Told tokens are charged at once; the end
of a call adds an event to a Redis stream.

The ledger numbers what each router tells. Where it is empty, or has a lower number of a router than the router knows,
Redis has lost data. Then the ledger is closed: each router tells what it knows itself within RECOVERY_MS, and one of
them, by a lease, loads the accounts that the adapter store has. docs/guides/quotas.md has promises and bound.
All keys share a hash tag, so that a quota is the same for all models, and one call may use several accounts.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis

from loraplex.contracts.broker.functions import LIBRARY, BatchedFunction, Library
from loraplex.contracts.broker.keys import LEDGER

_T = TypeVar("_T")

# Maximum reservations, accounts or events of its own that a router tells in one call, which stops the whole server.
_AT_ONCE = 128
# Time in seconds for which charges are kept, to tell a Redis that has lost them. Routers save accounts and write events
# within a second, but another may read the store's accounts before.
_RECENT_S = 10.0
# What an account counts, by the field of a plan that limits it.
COUNTS = {
    "concurrent_streams": "streams",
    "requests_per_minute": "requests",
    "input_tokens_per_minute": "input_tokens",
    "output_tokens_per_minute": "output_tokens",
    "tokens_per_day": "day_tokens",
    "tokens_per_month": "month_tokens",
    "budget_per_month": "month_cost",
    "budget_warning": "month_cost",  # which refuses nothing
}


class Counts(msgspec.Struct, frozen=True, order=True):
    """The charges of an account in its last windows, which have numbers by UTC, a month 12 x year + month - 1.

    Costs are in nano-units of the currency. Charges only grow: of two states of an account the later one is greater.
    """

    name: str
    month: int = 0
    month_tokens: int = 0
    month_cost: int = 0
    day: int = 0
    day_tokens: int = 0
    day_cost: int = 0
    minute: int = 0
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    minute_cost: int = 0


class Room(msgspec.Struct, frozen=True, array_like=True):
    """The rest of a plan's limit, `most` without what is charged and reserved; its window ends in `ends_s` seconds."""

    limit: str
    most: int
    left: int
    ends_s: float = 0.0


class Reservation(msgspec.Struct):
    """A request's reservation at its router, in one account or more, separated by spaces.

    `input` and `output` tokens are asked for, and held once it is granted. `facts` are those of its usage event, for
    whoever ends it; empty: no event is written. broker/lua/ledger.lua explains the numbers. Tokens that are
    used count from the request's beginning.
    """

    id: str
    accounts: str
    input: int
    output: int
    facts: str = ""
    # Name of the call that has it: its router and what sets it apart there.
    holder: str = ""
    open: bool = True
    at_ms: int = 0
    requests: int = 1
    # 0 once its call has ended, while it may still be resumed.
    streams: int = 1
    used_input: int = 0
    # Of these, those that a prefix cache had.
    used_cached: int = 0
    used_output: int = 0
    billed_input: int = 0
    billed_cached: int = 0
    billed_output: int = 0
    events: int = 0
    # 1: a call that has its id is charged once, and once it is complete.
    once: int = 0
    resumes: int = 0
    sent: int = 0
    # Prices of a token in nano-units of the currency.
    input_price: int = 0
    cached_price: int = 0
    output_price: int = 0
    # Tokens that the ledger has confirmed as charged.
    told_input: int = 0
    told_cached: int = 0
    told_output: int = 0
    # The rest of each limit when it was granted.
    room: list[Room] = []

    def use(self, used_input: int, used_output: int, cached: int = 0) -> None:
        """Count what is used by now; input that was counted before stays at the price of computed tokens."""
        self.used_cached += max(0, min(cached - self.used_cached, used_input - self.used_input))
        self.used_input, self.used_output = max(self.used_input, used_input), max(self.used_output, used_output)

    @property
    def has_news(self) -> bool:
        """Return whether more is used than the ledger has charged."""
        return self.used_input > self.told_input or self.used_output > self.told_output

    def told(self, used_input: int, used_cached: int, used_output: int) -> None:
        """Note what the ledger has charged; the first tokens come with the request."""
        if (used_input, used_output) != (self.told_input, self.told_output):
            self.requests = 0
        self.told_input, self.told_cached, self.told_output = used_input, used_cached, used_output


class QuotaReachedError(Exception):
    """A limit leaves no room; `wait_ms` is the time until there is some, None where there never is for this request.

    `room` is the rest of each limit.
    """

    def __init__(self, account: str, limit: str, wait_ms: float, room: Sequence[Room] = ()) -> None:
        super().__init__(limit)
        self.account, self.limit, self.room = account, limit, room
        self.wait_ms = int(wait_ms) if wait_ms < 2**53 else None


class LedgerUnreadyError(Exception):
    """The ledger has lost data, and this router is to fill it; or others do that, and it is closed for `closed_s`."""

    def __init__(self, closed_ms: float = 0, *, loads: bool = False) -> None:
        super().__init__("the ledger has lost data")
        self.closed_s = closed_ms / 1e3
        # Whether this router is to load the store's accounts.
        self.loads = loads


class _Answer(msgspec.Struct):
    """The answer of each function."""

    behind: bool = False
    closed_ms: float = 0
    loads: bool = False
    refused: tuple[str, str, float] | None = None
    reservation: Reservation | None = None
    room: list[Room] = []
    now: int = 0
    number: int = 0
    ended: int = 0
    moved: list[str] = []
    accounts: list[Counts] = []
    events: list[list[str]] = []


class Ledger:
    """The ledger as one router uses it. Errors of broker.connection.REDIS_DOWN pass through."""

    def __init__(self, redis: Redis, library: Library = LIBRARY, router: str = "") -> None:
        self.redis = redis
        names = ("ledger_reserve", "ledger_reserve_when_full", "ledger_tell")
        self._functions = {
            name: BatchedFunction(redis, library.function(redis, name), LEDGER + "state") for name in names
        }
        self.router = router or secrets.token_hex(6)
        # Number of the last call in which this router told something; 0: it has never used the ledger.
        self.number = 0
        # Charges of accounts that calls of this router have changed, by name, until they are saved.
        self.unsaved: dict[str, Counts] = {}
        # Those of the last seconds, saved or not, and the events.
        self._recent: deque[tuple[float, Counts | list[str]]] = deque()

    async def reserve(
        self,
        reservation: Reservation,
        received: int | None,
        limits: Mapping[str, Mapping[str, int]],
    ) -> Reservation:
        """Reserve the tokens of a request, or go on with its reservation where it is resumed with `received` tokens.

        Returns the reservation as the ledger has it. `limits` are by account, and by field of a plan. Raises
        QuotaReachedError, LedgerUnreadyError or OutOfMemoryError.
        """
        # What has begun is not refused by a full Redis.
        name = "ledger_reserve" if received is None else "ledger_reserve_when_full"
        return self.granted(await self._functions[name]([self.pack_reserve(reservation, received, limits)]))

    def pack_reserve(
        self, reservation: Reservation, received: int | None, limits: Mapping[str, Mapping[str, int]]
    ) -> bytes:
        """Return the argument of the function that reserves; see `reserve`."""
        reservation.holder = reservation.holder or f"{self.router}:{secrets.token_hex(4)}"
        rows = [(name, limit, COUNTS[limit], most) for name, of in limits.items() for limit, most in of.items()]
        return self._pack(reservation=reservation, received=-1 if received is None else received, limits=rows)

    def granted(self, packed: bytes) -> Reservation:
        """Return the reservation of the function's answer. Raises QuotaReachedError or LedgerUnreadyError."""
        answer = self._take(packed)
        if answer.closed_ms:
            raise LedgerUnreadyError(answer.closed_ms, loads=answer.loads)
        room = [
            msgspec.structs.replace(one, ends_s=_window_left_ms(answer.now, one.limit) / 1e3)
            for one in answer.room
            if one.limit != "concurrent_streams"
        ]
        if answer.refused is not None:
            raise QuotaReachedError(*answer.refused, room)
        assert answer.reservation is not None, "what is not refused is granted"
        granted = answer.reservation
        granted.told_input, granted.told_output, granted.room = granted.used_input, granted.used_output, room
        granted.told_cached = granted.used_cached
        return granted

    async def tell(self, reservations: Sequence[Reservation], *, renews: bool = False) -> tuple[int, set[str]]:
        """Tell what is used of this router's reservations, and which have ended; idempotent.

        With `renews` end those of routers that died. Returns how many of these were ended, and the holders of the told
        ones that other calls have by now. Raises LedgerUnreadyError, while the ledger is closed once it knows all.
        """
        ended, moved = 0, set[str]()
        for some in _chunks(reservations) or [()]:
            counts = [(one.used_input, one.used_cached, one.used_output) for one in some]
            answer = await self._tell(reservations=some, renews=renews)
            if answer.closed_ms:
                raise LedgerUnreadyError(answer.closed_ms, loads=answer.loads)
            for one, count in zip(some, counts, strict=True):
                one.told(*count)
            ended, moved = ended + answer.ended, moved.union(answer.moved)
        return ended, moved

    async def fill(self, reservations: Sequence[Reservation], *, closes: bool) -> None:
        """Tell a ledger that has lost data of reservations, and of accounts and events that Redis may have lost.

        With `closes` it opens once the store's accounts are loaded, and others had the time to tell theirs.
        """
        recent = [one for _, one in self._recent]  # which may be longer ago after the first call
        counts = sorted([*self.unsaved.values(), *(one for one in recent if isinstance(one, Counts))])
        accounts = {one.name: one for one in counts}  # the latest of each
        events = [one for one in recent if isinstance(one, list)]
        await self._tell(step="restart")
        for part, told in (("reservations", reservations), ("accounts", [*accounts.values()]), ("events", events)):
            for some in _chunks(told):
                await self._tell(step="fill", **{part: some})
        await self._tell(step="close" if closes else "open")

    async def load(self, saved: Sequence[Counts]) -> None:
        """Load a page of the store's accounts, for all routers: the one whose error said that it `loads`."""
        await self._tell(step="load", accounts=saved)

    async def loaded(self, *, at_once: bool = False) -> None:
        """Let the ledger open, which has all accounts of the store: `at_once` where nothing was lost."""
        await self._tell(step="open" if at_once else "loaded")

    async def _tell(self, **parts: Any) -> _Answer:
        nothing: dict[str, Any] = {"reservations": (), "renews": False, "step": "", "accounts": (), "events": ()}
        return self._take(await self._functions["ledger_tell"]([self._pack(**{**nothing, **parts})]))

    def _pack(self, **message: Any) -> bytes:
        return msgspec.msgpack.encode({"router": self.router, "number": self.number, **message})

    def _take(self, packed: bytes) -> _Answer:
        """Note what an answer has of accounts and events. Raises LedgerUnreadyError."""
        answer = msgspec.msgpack.decode(packed, type=_Answer)
        if answer.behind:
            raise LedgerUnreadyError
        self.number = max(self.number, answer.number)
        for one in answer.accounts:
            self.unsaved[one.name] = max(one, self.unsaved.get(one.name, one))
        now = time.monotonic()
        self._recent.extend((now, one) for one in answer.accounts)
        self._recent.extend((now, one) for one in answer.events)
        while self._recent and self._recent[0][0] < now - _RECENT_S:
            self._recent.popleft()
        return answer


@dataclass(frozen=True, slots=True)
class Asked:
    """The tokens that a call asks a ledger for; see Ledger.reserve."""

    ledger: Ledger
    reservation: Reservation
    received: int | None
    limits: Mapping[str, Mapping[str, int]]

    async def reserve(self) -> Reservation:
        """Reserve them alone. Raises as Ledger.reserve does."""
        return await self.ledger.reserve(self.reservation, self.received, self.limits)


def _window_left_ms(now_ms: int, limit: str) -> int:
    """Return the time in milliseconds until the window of a limit ends, by UTC, such as tokens_per_day."""
    if COUNTS[limit].startswith("month_"):
        day = datetime.fromtimestamp(now_ms / 1e3, UTC).date().replace(day=1)
        next_month = (day + timedelta(days=31)).replace(day=1)
        return int(datetime.combine(next_month, datetime.min.time(), UTC).timestamp() * 1e3) - now_ms
    size_ms = 86_400_000 if limit.endswith("_day") else 60_000
    return size_ms - now_ms % size_ms


def _chunks(items: Sequence[_T]) -> list[Sequence[_T]]:
    return [items[at : at + _AT_ONCE] for at in range(0, len(items), _AT_ONCE)]
