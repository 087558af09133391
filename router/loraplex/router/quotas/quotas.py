"""Reserves tokens for the calls of one router by their tenants' plans, and tells the ledger what they use.

admitted ──reserve──▶ CallBudget ──settle──▶ the account keeps what was used
                        └── told every second what is used so far

What the ledger is to know goes there in rounds, one at a time. A round that finds that Redis has lost data fills the
ledger with what the router and the adapter store know; see broker/ledger.py and docs/guides/quotas.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Protocol, TypeVar

import msgspec
from redis.exceptions import OutOfMemoryError

from loraplex.admin.v1 import accounts_pb2
from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.ledger import (
    Asked,
    Counts,
    Ledger,
    LedgerUnreadyError,
    QuotaReachedError,
    Reservation,
    Room,
)
from loraplex.contracts.broker.messages import Job
from loraplex.contracts.plans import BUDGET_FIELDS, NANO
from loraplex.contracts.plans import LOOK_S as PLANS_LOOK_S
from loraplex.router.catalog.store_client import StoreClient
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.outbox import redis_full
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.metrics import RouterMetrics
from loraplex.router.quotas.plans import Owner, Plans, bounded
from loraplex.runtime.rpc.errors import Aborted, CallError, Exhausted, RateLimits, Unavailable
from loraplex.runtime.rpc.principal import calling_key, known_caller
from loraplex.runtime.rpc.tasks import every
from loraplex.runtime.telemetry.logging import LogOnce

T = TypeVar("T")

log = logging.getLogger(__name__)

# Interval in seconds between renewals, and between saves.
RENEW_S = 1.0
# Time in seconds for which the reservation of a call that ended before its answer is held, so that it may be resumed.
LINGER_S = 5.0
# Timeout in seconds for the settling that the last message of a call waits for.
FINISH_S = 0.5
# Timeout in seconds of a round, while the ledger is filled and opened.
_UNREADY_S = 15.0
# Interval in seconds between tries while a router stops.
_DRAIN_RETRY_S = 0.05


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts about a call, kept with its reservation, so that any router can write its event."""

    tenant: str = ""
    key: str = ""
    # Of the call: parts of a call of Score have ids of their own.
    request_id: str = ""
    model: str = ""
    # The revision's full name, or a weighted set's digest; empty for the base model.
    adapter_revision: str = ""
    cached_tokens: int = 0
    # The currency of the event's cost; empty: there were no prices.
    currency: str = ""
    # Time in seconds from the reservation to the end, at the router that ended it.
    seconds: float = 0.0

    def of_job(self, job: Job) -> Facts:
        """Return the facts with those of one of the call's jobs."""
        revision = job.adapter.revision if job.adapter else ""
        request_id = self.request_id or job.request_id
        return msgspec.structs.replace(self, request_id=request_id, model=job.model, adapter_revision=revision)


NO_FACTS = Facts()


class UsageEvents(Protocol):
    """Sends and writes the events of charges, as loraplex.usage_events does."""

    async def follow(self) -> None:
        """Send and write what waits, again and again; never returns."""

    async def write(self) -> bool:
        """Send and write what waits; returns whether all went."""

    async def close(self, timeout_s: float) -> None:
        """Send and write what waits within a timeout in seconds."""


# Kinds of limits in answers; others are of tokens. A budget is in units of the currency.
_KINDS = {"requests_per_minute": "requests", "budget_per_month": "budget", "budget_warning": "budget-warning"}


def rates_of(answer: CallBudget | QuotaReachedError | None) -> RateLimits:
    """Return the limit of each kind of which the ledger's answer leaves least; a warning once nothing is left of it."""
    rates: dict[str, tuple[float, float, float]] = {}
    for one in sorted(answer.room if answer else (), key=attrgetter("left")):
        kind, part = _KINDS.get(one.limit, "tokens"), NANO if one.limit in BUDGET_FIELDS else 1
        if kind != "budget-warning" or not one.left:
            most, left = (amount / part if part > 1 else amount for amount in (one.most, one.left))
            rates.setdefault(kind, (most, left, round(one.ends_s, 3)))
    return rates


@dataclass(slots=True, eq=False)
class CallBudget:
    """The reservation of a call: of one job, or of all jobs of a call of Score, Embed or Classify."""

    reservation: Reservation
    quotas: Quotas
    # The tenant and the API key whose plans limit it, and these limits, by the ledger's account.
    owners: Sequence[Owner] = ()
    limits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # Output tokens that the client of a resumed request had, input tokens that were charged before, and cached ones.
    received: int | None = None
    charged_input: int = 0
    cached_before: int = 0
    jobs: list[RoutedJob] = field(default_factory=list)
    # Counts the output tokens that the client got, from the request's first one. None: it got nothing by now, as of a
    # call without a stream, which is made again where its router dies.
    delivered: Callable[[], int] | None = None
    # Facts for the usage event; None: events are not written.
    facts: Facts | None = None
    began_at: float = field(default_factory=time.monotonic)
    # Done once the ledger knows the end.
    end: asyncio.Future[None] | None = None
    # The rest of each limit when it was granted.
    room: Sequence[Room] = ()

    @property
    def asked(self) -> Asked:
        """Return what it asks the ledger for."""
        return Asked(self.quotas.ledger, self.reservation, self.received, self.limits)

    def settle(self) -> asyncio.Future[None]:
        """End it in the background; the answer is done once the ledger knows. Further ends do nothing."""
        return self._end(0.0)

    def leave(self) -> asyncio.Future[None]:
        """End it in LINGER_S, unless the request is resumed; its place among the streams is free at once."""
        return self._end(LINGER_S)

    def _end(self, linger_s: float) -> asyncio.Future[None]:
        if self.end is None:
            self.end = asyncio.get_running_loop().create_future()
            self.quotas.end(self, linger_s)
        return self.end

    async def finish(self) -> None:
        """Settle before the client gets the last message, so that it knows of no token that is not charged.

        A Redis that does not answer delays nobody for long: then the reservation is settled later. A batch waits.
        """
        await asyncio.wait({self.settle()}, timeout=None if self.reservation.once else FINISH_S)

    def count(self, *, ended: bool = False) -> Reservation:
        """Return the reservation with what is used of it by now, as it would stand if this router died."""
        if self.delivered is not None or (ended and not self.reservation.once):
            computed = [one for one in self.jobs if self._is_charged(one, ended=ended)]
            prompts = sum(len(routed.job.prompt_ids) for routed in computed) + (self.received or 0)
            used_input = self.charged_input + (prompts if computed else 0)
            used_output = self.delivered() if self.delivered else 0
            self.reservation.use(min(used_input, self.reservation.input), used_output, self._cached_tokens())
            self.reservation.facts = self.encoded_facts()
        return self.reservation

    def _is_charged(self, routed: RoutedJob, *, ended: bool) -> bool:
        """Return whether the prompt of a job is charged: one that was computed, wholly or until the client left.

        A call that the cluster fails or hands back before its client got anything is made again, and charged then.
        """
        if routed.failure is not None or routed.reader.error is not None:
            return self.delivered is not None and routed.first_token_at is not None
        return routed.first_token_at is not None or (ended and routed.claimed_at is not None)

    def _cached_tokens(self) -> int:
        """Return how much of the prompts a prefix cache had, of a resumed request at its beginning."""
        return self.cached_before or sum(routed.cached_tokens for routed in self.jobs)

    def encoded_facts(self) -> str:
        """Return the facts as a reservation has them."""
        if self.facts is None:
            return ""
        facts = self.facts.of_job(self.jobs[0].job) if self.jobs else self.facts
        seconds = time.monotonic() - self.began_at
        facts = msgspec.structs.replace(facts, cached_tokens=self._cached_tokens(), seconds=round(seconds, 4))
        return msgspec.json.encode(facts).decode()


class Quotas:
    """The quotas of tenants and keys, as one router keeps them. `store` keeps the accounts when Redis loses them."""

    def __init__(
        self,
        ledger: Ledger,
        plans: Plans,
        metrics: RouterMetrics | None = None,
        usage: UsageEvents | None = None,
        store: StoreClient | None = None,
    ) -> None:
        self.ledger = ledger
        self._plans = plans
        self._metrics = metrics or RouterMetrics()
        self._usage = usage
        self._store = store
        # Accounts whose budget has refused a call, until the store knows.
        self._spent = set[str]()
        # Those that the ledger has, and those of which it is to be told at once.
        self._budgets: set[CallBudget] = set()
        self._urgent: set[CallBudget] = set()
        self._telling = asyncio.Lock()
        # The round that has not begun yet, and whether it renews.
        self._next_round: asyncio.Task[Exception | None] | None = None
        self._renews = False
        # Whether a ledger that this router fills or loads may have lost something that a router had told it.
        self._has_lost = True
        self._log_once = LogOnce(log)

    def apply_plan(self, job: Job, *, is_open_ended: bool = False) -> Job:
        """Return a new job within the plans of its tenant and the calling key. Raises Exhausted where it can't be.

        An answer whose request sets no maximum is open ended: it is bounded to what the plans have room for.
        """
        owners = self._plans.owners(job.tenant, calling_key())
        if is_open_ended:
            _, price = self._plans.price_of(job.model, job.adapter.revision if job.adapter else "")
            job = bounded(job, [owner.plan for owner in owners], price)
        for owner in owners:
            for name, size, most in (
                ("context_tokens", job.tokens, owner.plan.context_tokens),
                ("answers_per_request", job.n, owner.plan.answers_per_request),
            ):
                if most is not None and size > most:
                    raise self._refusal(owner, name, f"the request has {size}")
            ceiling = owner.plan.priority_ceiling
            job = job if ceiling is None or job.priority <= ceiling else replace(job, priority=ceiling)
        return job

    def check_allowed(self, job: Job) -> None:
        """Raise PermissionDenied where the plans of the current call do not allow what a job uses."""
        if refusal := self._plans.refusal(job.model, job.adapter):
            raise refusal

    def _refusal(self, owner: Owner, limit: str, why: str, wait_ms: int | None = None) -> Exhausted:
        """Count a call that a limit refuses; return its error. Without `wait_ms` waiting does not help."""
        label, named = f"key_{limit}" if owner.key_id else limit, owner.holder
        self._metrics.quota_refusals.labels(self._metrics.tenants.bounded(owner.tenant), label).inc()
        most = getattr(owner.plan, limit)
        if wait_ms is None:
            message, after_s = f"the plan of {named} has {limit} {most}: {why}", None
        else:  # clients of a tenant must not all come at the same moment
            message, after_s = f"{named} has used its quota: {limit} is {most}", wait_ms / 1e3 + random.random()
        return Exhausted(f"{owner.name}/quotas/{limit}", message, retry_after_s=after_s, reason="QUOTA_EXCEEDED")

    async def admit(
        self, dispatcher: Dispatcher, job: Job, facts: Facts, resumed: tuple[str, int] | None
    ) -> tuple[RoutedJob, CallBudget | None]:
        """Dispatch a job with its reservation, which ends where the queue does not take the job; see `reserve`."""
        answer = job.n * job.stopping.max_tokens
        budget = self._budget(job.tenant, len(job.prompt_ids), answer, facts.of_job(job), resumed)
        if budget is None:
            return await dispatcher.dispatch(job), None
        with self._asking(budget):
            routed = await self._once_ready(lambda: dispatcher.dispatch(job, budget.asked))
            assert routed.reservation is not None, "it was asked for"
            self._grant(budget, routed.reservation)
        budget.jobs.append(routed)
        return routed, budget

    async def reserve(
        self,
        tenant: str,
        prompt_tokens: int,
        output_tokens: int,
        *,
        facts: Facts = NO_FACTS,
        resumed: tuple[str, int] | None = None,
    ) -> CallBudget | None:
        """Reserve tokens of prompts and answers for a call; None for a call without limits.

        `facts`: those known by now, for the usage event. `resumed`: the reservation's id and the tokens that the client
        has. Raises Exhausted or Unavailable.
        """
        budget = self._budget(tenant, prompt_tokens, output_tokens, facts, resumed)
        if budget is not None:
            with self._asking(budget):
                self._grant(budget, await self._once_ready(budget.asked.reserve))
        return budget

    def _budget(
        self, tenant: str, prompt_tokens: int, output_tokens: int, facts: Facts, resumed: tuple[str, int] | None
    ) -> CallBudget | None:
        """Return a call's budget, which is not granted yet; None for a call without limits."""
        owners = self._plans.owners(tenant, calling_key())
        limits = {owner.account: one for owner in reversed(owners) if (one := self._plans.limits_of(owner.account))}
        call_facts, (currency, price) = None, self._plans.price_of(facts.model, facts.adapter_revision)
        if self._usage is not None:  # the ledger is where usage is counted
            call_facts = msgspec.structs.replace(facts, tenant=tenant, key=calling_key(), currency=currency)
            limits = {tenant: {}, **limits}
        if not limits:
            return None
        if facts.adapter_revision.startswith("tenants/"):  # what it uses is counted, and not limited
            limits[facts.adapter_revision.partition("/revisions/")[0]] = {}
        reservation_id, received = resumed or ("", None)
        asked = Reservation(reservation_id or secrets.token_hex(8), " ".join(limits), prompt_tokens, output_tokens)
        if (principal := known_caller()) is not None and principal.for_batch:
            asked.id, asked.once = hashlib.sha256(f"{tenant} {facts.request_id}".encode()).hexdigest()[:32], 1
        asked.input_price, asked.cached_price, asked.output_price = price.input, price.cached, price.output
        asked.used_cached = facts.cached_tokens
        budget = CallBudget(asked, self, owners, limits, received, cached_before=facts.cached_tokens, facts=call_facts)
        asked.facts = budget.encoded_facts()
        return budget

    @contextmanager
    def _asking(self, budget: CallBudget) -> Iterator[None]:
        """Raise the ledger's errors as those of the call, whose budget ends unless the ledger refused it."""
        try:
            with self._metrics.reserve_time.time():
                yield
        except QuotaReachedError as error:
            owner = next(one for one in budget.owners if one.account == error.account)
            if error.limit == "budget_per_month" and error.wait_ms is not None:
                self._spent.add(owner.account)
            refusal = self._refusal(owner, error.limit, "the request alone is more", error.wait_ms)
            refusal.rate_limits = rates_of(error)
            raise refusal from error
        except OutOfMemoryError as error:
            raise redis_full() from error
        except BaseException as error:
            # The ledger may hold the reservation though its answer was lost or not awaited.
            budget.settle() if budget.received is None else budget.leave()
            if isinstance(error, REDIS_DOWN):
                log.warning("the ledger does not answer: %r", error)
                raise Unavailable("the ledger of quotas does not answer", reason="LEDGER_DOWN") from error
            raise

    async def _once_ready(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the ledger, again once it is filled where it has lost data."""
        while True:
            try:
                return await ask()
            except LedgerUnreadyError:
                if error := await asyncio.shield(self._round()):
                    raise error from None

    def _grant(self, budget: CallBudget, reservation: Reservation) -> None:
        budget.reservation, budget.charged_input = reservation, reservation.used_input
        budget.room, reservation.room = reservation.room, []  # which the ledger is not told
        if reservation.open:  # else it is of a line of a batch that was charged before
            self._budgets.add(budget)

    def end(self, budget: CallBudget, linger_s: float = 0.0) -> None:
        """Tell the ledger until it has answered that a budget's call has ended, and then or later the budget itself."""
        if not budget.reservation.open:
            if budget.end is not None and budget not in self._budgets and not budget.end.done():
                budget.end.set_result(None)
            return
        reservation = budget.count(ended=True)
        reservation.streams, reservation.open = 0, linger_s > 0
        if linger_s:
            asyncio.get_running_loop().call_later(linger_s, self.end, budget)
        self._budgets.add(budget)
        self._urgent.add(budget)
        self._round()

    def _round(self) -> asyncio.Task[Exception | None]:
        """Return the next round, which begins once the one that is under way has ended."""
        if self._next_round is None:
            self._next_round = asyncio.create_task(self._tell())
        return self._next_round

    async def _tell(self) -> Exception | None:
        """Tell the ledger what it does not know. Returns what keeps it from that: an error of Redis or of the store."""
        async with self._telling:
            self._next_round, renews, self._renews = None, self._renews, False
            until = time.monotonic() + _UNREADY_S
            try:
                while time.monotonic() < until:
                    try:
                        await self._tell_news(renews)
                        return None
                    except LedgerUnreadyError as error:
                        unready = error
                    if unready.loads:
                        await self._load()
                    elif unready.closed_s:
                        await asyncio.sleep(unready.closed_s)
                    else:
                        await self._fill()
            except (*REDIS_DOWN, CallError) as error:
                return error
        return Unavailable("the ledger of quotas is being filled", reason="LEDGER_BEHIND")

    async def _tell_news(self, renews: bool) -> None:
        urgent, self._urgent = self._urgent, set()
        running = {budget for budget in self._budgets if budget.reservation.open} - urgent if renews else ()
        # Of one whose call has left it the answer tells whether another router goes on with the request.
        news = [*urgent, *(budget for budget in running if budget.end is not None or budget.count().has_news)]
        ended = [budget for budget in urgent if not budget.reservation.open]
        try:
            expired, moved = await self.ledger.tell([budget.reservation for budget in news], renews=renews)
        except BaseException:
            self._urgent |= urgent
            raise
        self._metrics.reservations_expired.inc(expired)
        for budget in (one for one in news if one.reservation.holder in moved):
            for routed in budget.jobs:
                routed.end_reader(Aborted("another router goes on with the request", reason="TAKEN_OVER"))
            if budget.end is not None:
                self.end(budget)
        for budget in ended:
            self._budgets.discard(budget)
            if budget.end is not None and not budget.end.done():
                budget.end.set_result(None)

    async def _fill(self) -> None:
        """Tell a ledger that has lost data, or has never had any, what this router knows."""
        self._has_lost = self.ledger.number != 0
        budgets = [budget.count() for budget in self._budgets]
        await self.ledger.fill(budgets, closes=self._has_lost or self._store is not None)
        if self._has_lost:
            self._metrics.ledger_refills.inc()
            log.warning("Redis lost data of the ledger; this router told it of %d reservations", len(budgets))

    async def _load(self) -> None:
        """Load the store's accounts into a closed ledger, in place of all routers."""
        count = 0
        if self._store is not None:
            async for page in self._store.account_pages():
                await self.ledger.load([msgspec.convert(one, Counts, from_attributes=True) for one in page])
                count += len(page)
        await self.ledger.loaded(at_once=not count and not self._has_lost)
        log.warning("the ledger was filled with %d accounts of the store", count)

    async def renew(self) -> None:
        """Renew the reservations, with what is used of them by now, and end calls whose request another router has."""
        self._renews = True
        if error := await asyncio.shield(self._round()):
            self._log_once(f"the ledger of quotas waits: {error!r}")

    async def save(self) -> None:
        """Save the accounts that calls of this router have changed; a store that does not answer gets them later."""
        unsaved, spent = dict(self.ledger.unsaved), set(self._spent)
        if self._store is None or not (unsaved or spent):
            return
        accounts = [accounts_pb2.Account(**msgspec.structs.asdict(one)) for one in unsaved.values()]
        accounts += [accounts_pb2.Account(name=name, budget_spent=True) for name in spent]
        try:
            await self._store.save_accounts(accounts)
        except CallError as error:
            self._log_once(f"accounts of quotas wait to be saved: {error.message}")
            return
        self._spent -= spent
        for name, counts in unsaved.items():
            if self.ledger.unsaved.get(name) is counts:
                del self.ledger.unsaved[name]

    async def forget_tenant(self) -> None:
        """Write the usage events that wait."""
        if self._usage is not None:
            await self._usage.write()

    async def follow(self) -> None:
        """Renew and save every second, while quotas or usage are kept, and follow plans and usage; never returns."""

        def if_needed(work: Callable[[], Awaitable[None]]) -> Awaitable[None] | None:
            return work() if self._plans.has_limits or self._usage is not None else None

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(every(PLANS_LOOK_S, self._plans.look))
            tasks.create_task(every(RENEW_S, partial(if_needed, self.renew)))
            tasks.create_task(every(RENEW_S, partial(if_needed, self.save)))
            if self._usage is not None:
                tasks.create_task(self._usage.follow())

    async def drain(self, timeout_s: float) -> None:
        """Settle what has ended, save, and write the usage events; other routers end later what is not settled then."""
        until = time.monotonic() + timeout_s
        while True:
            await self.renew()
            await self.save()
            is_done = not self._urgent and (self._store is None or not self.ledger.unsaved)
            if is_done or time.monotonic() > until:
                break
            await asyncio.sleep(_DRAIN_RETRY_S)
        if self._usage is not None:
            await self._usage.close(timeout_s)
