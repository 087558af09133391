"""The ledger: what tenants and API keys have used of their quotas, and reservations of what may still come.

    reserve ──▶ open: renewed every second with what is used so far ──▶ settle: charged
                  └──▶ its router has not renewed for HELD_MS: another one's renewal ends it, charged as last renewed

An account is a tenant's, or that of an API key that has a plan. It counts what was charged in the running minute, day
and month of UTC, by Redis's clock; these counts only grow. Open reservations hold more beside them, and both together
stay within the limits. A request counts in the windows of its admission. A charge adds an event to a Redis stream in
the same script, so the sums of events and accounts agree.

Routers save the counts in the adapter store every second. Each state of the ledger has an epoch, and numbers its calls.
A call that knows of another epoch, or of a later call, finds that Redis has lost data: the ledger is filled with the
saved counts, and is closed for RECOVERY_MS until routers have told it their reservations and what they have not saved.
docs/guides/quotas.md gives the bound of what is granted too much.

All keys of the ledger share a hash tag, so that a quota is the same for all models and cells, and one call may reserve
in several accounts and renew the reservations of any.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import OutOfMemoryError, ResponseError

from broker.batched_script import BatchedScript
from broker.functions import PreparedCall
from broker.keys import LEDGER
from broker.scripts import SCRIPTS, Scripts
from broker.wrong_types import set_aside

_T = TypeVar("_T")

# Maximum reservations, or accounts, in one call: a script stops the whole server while it runs.
RESERVATIONS_AT_ONCE = 128
# Types of the keys that all tenants share.
_SHARED = {"state": "hash", "routers": "zset", "usage": "stream"}


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Maximum streams at once, and counts by minute, day and month, in the order of the scripts; None: no limit."""

    streams: int | None = None
    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None


# The limits by the names that the scripts have for them.
_LIMITS = dict(
    zip(("streams", "requests", "input", "output", "day_tokens", "month_tokens"), TokenLimits.__slots__, strict=True)
)


@dataclass(frozen=True, slots=True)
class Counts:
    """The charges of an account in its last windows, in the order of the scripts.

    Windows have numbers by UTC, a month 12 x year + month - 1.
    """

    name: str
    minute: int = 0
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    day: int = 0
    day_tokens: int = 0
    month: int = 0
    month_tokens: int = 0


_NUMBERS = (
    *("open", "minute", "day", "month", "requests", "held_input", "held_output", "streams", "used_input"),
    *("used_output", "paid_input", "paid_output", "charges", "resumes", "sent"),
)
# The numbers with which a router holds a reservation again: what it holds first.
_JOINED = (
    *("requests", "held_input", "held_output", "streams", "minute", "day", "month", "used_input", "used_output"),
    *("paid_input", "paid_output", "charges", "resumes", "sent"),
)


@dataclass(slots=True)
class Reservation:
    """A request's reservation at its router, in one account or more. `input` and `output` tokens are asked for.

    `facts` are those of its usage event, for whoever ends it; empty: no event is written. `numbers` are the ledger's at
    the grant; broker/lua/include/ledger.lua explains them. Tokens that are used count from the request's beginning.
    """

    id: str
    accounts: tuple[str, ...]
    input: int
    output: int
    facts: str = ""
    numbers: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(_NUMBERS, 0))
    # 0 once its call has ended, while it may still be resumed.
    streams: int = 1
    used_input: int = 0
    used_output: int = 0
    # Tokens that the ledger knows of, by the last renewal.
    renewed: tuple[int, int, int] = (0, 0, 1)

    def use(self, used_input: int, used_output: int) -> None:
        """Count what is used by now."""
        self.used_input, self.used_output = max(self.used_input, used_input), max(self.used_output, used_output)

    @property
    def now(self) -> tuple[int, int, int]:
        """Return what a renewal tells."""
        return self.used_input, self.used_output, self.streams


class QuotaReachedError(Exception):
    """A limit leaves no room; `wait_ms` is the time until there is some, None where there never is for this request."""

    def __init__(self, account: str, limit: str, wait_ms: int | None) -> None:
        super().__init__(limit)
        self.account = account
        self.limit = limit
        self.wait_ms = wait_ms


class LedgerBehindError(Exception):
    """The ledger has another `epoch`, 0 for none, than the router knows, or fewer calls: it has to be told first."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"the ledger is of epoch {epoch}")
        self.epoch = epoch


class LedgerClosedError(Exception):
    """The ledger has lost data, and is closed for `wait_ms` until routers have told what they know."""

    def __init__(self, wait_ms: int) -> None:
        super().__init__(f"the ledger is closed for {wait_ms} ms")
        self.wait_ms = wait_ms


class LedgerFullError(Exception):
    """Redis has no memory for another reservation."""


@dataclass(slots=True)
class ReserveCall:
    """A call that reserves the tokens of a new request, to be sent with the job's enqueue; `answer` is the ledger's."""

    call: PreparedCall
    # Redis key of the reservation, which exists once it is granted.
    key: str
    answer: Any = None


# Sends a call and notes its answer.
SendReserve = Callable[[ReserveCall], Awaitable[None]]


class LedgerCalls:
    """Calls of the ledger's scripts on a server."""

    def __init__(self, redis: Redis, scripts: Scripts = SCRIPTS) -> None:
        self._redis = redis
        self._scripts = scripts
        self._batched: dict[str, BatchedScript] = {}

    async def __call__(self, name: str, arguments: Sequence[Any], send: SendReserve | None = None) -> Any:
        """Return a script's answer; `send` sends the call with another, where Redis is no cluster.

        Raises an error of broker.connection.REDIS_DOWN.
        """
        try:
            return await self._call(name, arguments, send)
        except ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
        for key, wanted in _SHARED.items():
            await set_aside(self._redis, LEDGER + key, wanted)
        return await self._call(name, arguments, None)

    async def _call(self, name: str, arguments: Sequence[Any], send: SendReserve | None) -> Any:
        script = self._batched.get(name)
        if script is None:
            base, when_full = name.removesuffix("_when_full"), name.endswith("_when_full")
            function = self._scripts.register(self._redis, base, when_full=when_full)
            script = self._batched[name] = BatchedScript(self._redis, function, LEDGER + "state")
        if send is None or isinstance(self._redis, RedisCluster):
            return await script(arguments)
        key = f"{LEDGER}of:{arguments[2]}"
        call = ReserveCall(script.prepare((key,), arguments), key)
        await send(call)
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer


class Ledger:
    """The ledger as one router, by its name, uses it. Errors of broker.connection.REDIS_DOWN pass through."""

    def __init__(self, calls: LedgerCalls, router: str) -> None:
        self._calls = calls
        self.router = router
        # Epoch of the ledger that this router has told what it knows, and number of the last call that it knows of.
        self.epoch, self._number = 0, 0
        # Charges of accounts that calls of this router have changed, by name, until they are saved.
        self.unsaved: dict[str, Counts] = {}

    async def reserve(
        self,
        wanted: Reservation,
        received: int | None,
        limits: Mapping[str, TokenLimits],
        send: SendReserve | None = None,
    ) -> None:
        """Reserve the tokens of a request, or go on with its reservation where it is resumed with `received` tokens.

        Idempotent by id. `limits` are by account. `send` sends the call of a new request together with another; its
        errors pass through. Raises QuotaReachedError, LedgerBehindError, LedgerClosedError or LedgerFullError.
        """
        arguments: list[Any] = [wanted.id, self.router, wanted.facts, wanted.input, wanted.output]
        arguments.append(-1 if received is None else received)
        for name in wanted.accounts:
            most = (getattr(limits[name], limit) for limit in TokenLimits.__slots__)
            arguments += [name, *(-1 if one is None else one for one in most)]
        try:
            answer = await self._ask("ledger_reserve", arguments, send)
        except OutOfMemoryError as error:
            if received is None:
                raise LedgerFullError("Redis is out of memory") from error
            answer = await self._ask("ledger_reserve_when_full", arguments)
        if answer[0] == b"refused":
            account, limit, wait_ms = answer[3:6]
            raise QuotaReachedError(account.decode(), _LIMITS[limit.decode()], None if wait_ms < 0 else wait_ms)
        wanted.numbers = dict(zip(_NUMBERS, map(int, answer[3]), strict=True))
        wanted.use(wanted.numbers["used_input"], wanted.numbers["used_output"])
        wanted.renewed = wanted.now

    async def settle(self, ended: Reservation, router: str = "") -> list[bytes]:
        """End a reservation, charged with what was used. Idempotent. Returns the fields of its event, if it has one.

        Raises LedgerBehindError or LedgerClosedError.
        """
        numbers, (renewed_input, renewed_output, _) = ended.numbers, ended.renewed
        arguments = [ended.id, router or self.router, ended.facts, ended.used_input, ended.used_output]
        arguments += [" ".join(ended.accounts), numbers["minute"], numbers["day"], numbers["month"]]
        answer = await self._ask("ledger_settle", [*arguments, renewed_input, renewed_output])
        return list(answer[3]) if len(answer) > 3 else []

    async def renew(self, changed: Sequence[Reservation]) -> tuple[int, list[str]]:
        """Renew this router's reservations, and tell what is used of those that have changed.

        Returns how many reservations of routers that died were ended, and the ids of those of this router that other
        routers have by now. Raises LedgerBehindError or LedgerClosedError.
        """
        ended, moved = 0, list[str]()
        for some in _chunks(changed):
            told = [one.now for one in some]
            first = [not one.renewed[0] and one.used_input for one in some]  # facts are known with the first token
            arguments: list[Any] = [self.router]
            for one, now, is_first in zip(some, told, first, strict=True):
                arguments += [one.id, *now, one.facts if is_first else ""]
            answer = await self._ask("ledger_renew", arguments)
            for one, now in zip(some, told, strict=True):
                one.renewed = now
            ended, moved = ended + int(answer[3]), [*moved, *(one.decode() for one in answer[4])]
        return ended, moved

    async def fill(self, counts: Sequence[Counts]) -> None:
        """Fill accounts of a ledger that has lost data."""
        for some in filter(None, _chunks(counts)):
            await self._calls("ledger_fill", [getattr(one, name) for one in some for name in Counts.__slots__])

    async def join(self, closed_ms: int, reservations: Sequence[Reservation]) -> None:
        """Use a filled ledger from now on, with these reservations; it is closed for so long if it has no epoch yet."""
        stage = "first"
        for some in _chunks(reservations):
            arguments: list[Any] = [self.epoch, closed_ms, self.router, stage]
            for one in some:
                numbers = {**one.numbers, "used_input": one.used_input, "used_output": one.used_output}
                numbers["streams"] = one.streams
                arguments += [one.id, " ".join(one.accounts), one.facts, *(numbers[name] for name in _JOINED)]
            epoch, number = await self._calls("ledger_join", arguments)
            stage = "more"
        self.epoch, self._number = int(epoch), int(number)

    async def report(self, events: Sequence[Sequence[bytes]]) -> None:
        """Add events again, which a ledger that has lost data may not have."""
        for some in filter(None, _chunks(events)):
            await self._calls("ledger_report", [part for event in some for part in event])

    async def _ask(self, name: str, arguments: Sequence[Any], send: SendReserve | None = None) -> Sequence[Any]:
        epoch = self.epoch
        answer: Sequence[Any] = await self._calls(name, [epoch, self._number, *arguments], send)
        if answer[0] == b"behind":
            raise LedgerBehindError(int(answer[1]))
        if answer[0] == b"closed":
            raise LedgerClosedError(int(answer[1]))
        if epoch == self.epoch:
            self._number = max(self._number, int(answer[1]))
        values = answer[2]
        for at in range(0, len(values), len(Counts.__slots__)):
            counts = Counts(values[at].decode(), *map(int, values[at + 1 : at + len(Counts.__slots__)]))
            self.unsaved[counts.name] = counts
        return answer


def _chunks(items: Sequence[_T]) -> Iterable[Sequence[_T]]:
    """Yield so many at a time, and none once where there are none."""
    return (items[at : at + RESERVATIONS_AT_ONCE] for at in range(0, max(1, len(items)), RESERVATIONS_AT_ONCE))
