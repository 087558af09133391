"""The ledger: how much each tenant was granted of its quotas, and reservations of what may still come.

    reserve ──▶ held ──▶ settle: the account keeps what was used, each token once
                  └──▶ no look for HELD_MS, or left for LINGER_MS: ended with what its router counted last

An account counts requests and tokens in the running minute, day and month of UTC, by Redis's clock; a request counts in
the windows of its admission. Each state of an account has an epoch and a version, and each router keeps a copy of the
last state that it has seen. A call of a router whose copy is later than the account tells that Redis has lost data:
then the copy is taken over first. docs/quotas.md gives the bound of what is granted too much.

A tenant has an account, and an API key that has a plan has one too; a request is reserved in both. The Redis keys of an
account share a hash tag of their own, so that a quota is the same for all models and cells.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import OutOfMemoryError

from broker.batched_script import BatchedScript
from broker.keys import LEDGER_TENANTS, is_key_account, ledger_prefix
from broker.ledger_records import (
    COPY_FIELDS,
    LIMIT_NAMES,
    AccountCopy,
    Charge,
    Look,
    Reservation,
    ReserveCall,
    TokenLimits,
)
from broker.scripts import SCRIPTS, Scripts
from broker.wrong_types import retried

log = logging.getLogger(__name__)

# Maximum reservations that one look renews: a script stops the whole server while it runs.
RENEWALS_AT_ONCE = 128
# Sends a call and notes its answer.
SendReserve = Callable[[ReserveCall], Awaitable[None]]
_NAMES = tuple(field.name for field in fields(Reservation))


class QuotaReachedError(Exception):
    """A limit leaves no room; `wait_ms` is the time until there is some, None where there never is for this request."""

    def __init__(self, limit: str, wait_ms: int | None) -> None:
        super().__init__(limit)
        self.limit = limit
        self.wait_ms = wait_ms


class BehindError(Exception):
    """Redis has lost data of the account: a look must come first."""


class LedgerFullError(Exception):
    """Redis has no memory for another reservation."""


class Ledger:
    """The accounts of all tenants and keys, by name. Errors of broker.connection.REDIS_DOWN pass through."""

    def __init__(self, redis: Redis, scripts: Scripts = SCRIPTS, *, reports: bool = False) -> None:
        """Use a server; with `reports` it keeps each charge of a tenant until `acknowledge`."""
        self._redis = redis
        self._reports = reports
        self._reserve = BatchedScript(redis, scripts.register(redis, "ledger_reserve"))
        self._reserve_when_full = BatchedScript(redis, scripts.register(redis, "ledger_reserve", when_full=True))
        self._settle = BatchedScript(redis, scripts.register(redis, "ledger_settle"))
        self._look = BatchedScript(redis, scripts.register(redis, "ledger_look"))

    async def reserve(
        self,
        account: str,
        wanted: Reservation,
        received: int | None,
        limits: TokenLimits,
        seen: AccountCopy,
        send: SendReserve | None = None,
    ) -> tuple[Reservation, AccountCopy]:
        """Reserve the tokens of a request, or take over its reservation where it is resumed with `received` tokens.

        Idempotent by id. `send` sends the call of a new request together with another, where Redis is no cluster; its
        errors pass through. Raises QuotaReachedError, BehindError or LedgerFullError.
        """
        prefix = ledger_prefix(account)
        had = -1 if received is None else received
        sizes = [wanted.id, wanted.owner, wanted.subject, wanted.input, wanted.output, had]
        most = (getattr(limits, name) for name in TokenLimits.__slots__)
        arguments = [prefix, *sizes, seen.epoch, seen.version, *(-1 if one is None else one for one in most)]
        try:
            if send is None or isinstance(self._redis, RedisCluster):
                answer = await self._reserve(arguments, prefix)
            else:
                call = self._reserve.prepare((prefix,), arguments)
                answer = await _sent(ReserveCall(call, f"{prefix}of:{wanted.id}"), send)
        except OutOfMemoryError as error:
            if received is None:
                raise LedgerFullError("Redis is out of memory") from error
            answer = await self._reserve_when_full(arguments, prefix)
        if answer[0] == b"refused":
            raise QuotaReachedError(LIMIT_NAMES[answer[1].decode()], None if answer[2] < 0 else answer[2])
        if answer[0] == b"behind":
            raise BehindError
        part, base, given, made, minute, day, month = answer[1 + COPY_FIELDS :]
        granted = replace(
            wanted,
            part=part,
            base=base,
            requests=int(part == 0),
            input=given,
            output=made,
            used_output=base,
            minute=minute,
            day=day,
            month=month,
        )
        return granted, _account(answer)

    async def settle(
        self, account: str, reservation: Reservation, state: str, seen: AccountCopy
    ) -> tuple[AccountCopy, Charge | None]:
        """End a reservation: `finished`, or `ended` before its end; `left`: unless it is resumed soon. Idempotent.

        Returns the account and the charge to report. Raises BehindError.
        """
        prefix = ledger_prefix(account)
        arguments = [prefix, state, seen.epoch, seen.version, self._reports_of(account), *_arguments(reservation)]
        answer = await self._settle(arguments, prefix)
        if answer[0] == b"behind":
            raise BehindError
        charges = _charges(answer[1 + COPY_FIELDS :])
        return _account(answer), charges[0] if charges else None

    async def acknowledge(self, tenant: str, charges: Sequence[str]) -> None:
        """Forget charges, which have been reported, by their ids."""
        await self._redis.hdel(ledger_prefix(tenant) + "unreported", *charges)

    async def add_tenant(self, tenant: str) -> None:
        """Note that a tenant's charges are reported."""
        await retried(self._redis, LEDGER_TENANTS, "set", lambda: self._redis.sadd(LEDGER_TENANTS, tenant))

    async def forget_tenant(self, tenant: str) -> tuple[int, int]:
        """Forget that a tenant's charges are reported, once none waits; its account stays until its month has passed.

        Returns how many records were removed, and how many stay: open reservations and unreported charges.
        """
        prefix = ledger_prefix(tenant)
        kept = await self._redis.hlen(prefix + "unreported") + await self._redis.zcard(prefix + "held")
        removed = 0 if kept else await self._redis.srem(LEDGER_TENANTS, tenant)
        return int(removed), int(kept)

    async def some_tenants(self, count: int) -> list[str]:
        """Return some tenants whose charges are reported, drawn by chance."""
        drawn: Any = await retried(
            self._redis, LEDGER_TENANTS, "set", lambda: self._redis.srandmember(LEDGER_TENANTS, count)
        )
        return [name.decode(errors="replace") for name in drawn or ()]

    async def look(self, account: str, seen: AccountCopy, reservations: Sequence[Reservation] = ()) -> Look:
        """Compare a router's copy with the account, and renew its reservations."""
        prefix, found = ledger_prefix(account), Look(seen, 0, refilled=False)
        for at in range(0, max(1, len(reservations)), RENEWALS_AT_ONCE):
            some = reservations[at : at + RENEWALS_AT_ONCE]
            copy = [getattr(found.account, name) for name in AccountCopy.__slots__]
            renewed = [argument for one in some for argument in _arguments(one)]
            answer = await self._look([prefix, *copy, len(some), self._reports_of(account), *renewed], prefix)
            expired, refilled, moved, charges = answer[1 + COPY_FIELDS :]
            found = Look(
                _account(answer),
                found.expired + expired,
                found.refilled or bool(refilled),
                (*found.charges, *_charges(charges)),
                (*found.moved, *(one.decode() for one in moved)),
            )
        return found

    def _reports_of(self, account: str) -> int:
        return int(self._reports and not is_key_account(account))


async def _sent(call: ReserveCall, send: SendReserve) -> Any:
    await send(call)
    if isinstance(call.answer, Exception):
        raise call.answer
    return call.answer


def _account(answer: Sequence[Any]) -> AccountCopy:
    return AccountCopy(*answer[1 : 1 + COPY_FIELDS])


def _charges(answer: Sequence[bytes]) -> list[Charge]:
    charges: list[Charge] = []
    for name, value in zip(answer[::2], answer[1::2], strict=True):
        try:
            stored = json.loads(value)
            facts = (stored[field] for field in ("input", "output", "at_ms", "subject"))
            charges.append(Charge(name.decode(), *facts))
        except (ValueError, KeyError, RecursionError):  # no UTF-8, or nested arrays: something else has written it
            log.warning("cannot read a charge of %d bytes", len(value))
    return charges


def _arguments(reservation: Reservation) -> list[str | int]:
    return [getattr(reservation, name) for name in _NAMES]
