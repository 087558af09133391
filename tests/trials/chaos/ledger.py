"""The tenants' plans in a chaos run, and the check that clients, usage events and accounts have the same tokens.

A request's tokens are the client's, which the checker compares with the model's; those of the events with its
request id; and, of all requests together, those of the tenant's account in Redis. Most tenants have the default plan,
whose quota, in tokens or in their price, a few requests use up: those that are refused must be, and what clients got
stays within the bound of docs/guides/quotas.md. What events and accounts have in money is compared too.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis

from loraplex.contracts.broker.keys import LEDGER, is_key_account
from loraplex.contracts.broker.ledger import Ledger, Reservation
from loraplex.contracts.broker.terms import HELD_MS, RECOVERY_MS
from loraplex.contracts.plans import money
from loraplex.router.catalog.store_client import StoreClient
from loraplex.router.quotas.plans import Plans
from loraplex.router.quotas.quotas import LINGER_S, RENEW_S, Facts, Quotas
from tests.accounts import account_of
from tests.trials.chaos.history import Account, Charged, Fault, Idle, Observation, Quota, Request, Revision
from tests.trials.chaos.oracle import prompt_tokens
from tests.trials.chaos.plan import ADAPTERS, IN_FLIGHT, MODEL_NAME, TENANTS, Kind, Plan
from tests.trials.chaos.verdict import Verdict

# Lines of a history that tell of the ledger.
LedgerLine = Charged | Account | Quota | Idle
# Prices by model or adapter, in nano-units: of a token of a prompt, of one that a prefix cache had, and of an answer.
Prices = Mapping[str, tuple[int, int, int]]
# Maximum tokens of a choice on their way from a router to a client when the link between them breaks.
AGAIN_TOKENS = 50
# Reason of the refusal of a request whose tenant's quota has no room for it.
OVER_QUOTA = "QUOTA_EXCEEDED"
# Tokens a day of the default plan, and of the plans of some tenants that send more requests. A request asks for about
# a hundred, at most for twelve hundred.
DEFAULT_QUOTA, OWN_QUOTA = 1_500, 5_000
_OWN = tuple(f"small-{number}" for number in range(4))
# Price in nano-units of each token of the base model, and the prices that adapters may have: of a token of a prompt, of
# one that a prefix cache had, of one of an answer.
PRICE, ADAPTER_PRICES = 600, ((150, 75, 600), (2_000, 0, 1_999))
_DEAREST = max(PRICE, *map(max, ADAPTER_PRICES))
# Interval in seconds between looks at whether every reservation has ended and every charge is written.
LOOK_S = 0.2
# Time in seconds in which Redis's commands for an idle cluster are counted, and their maximum in a second.
IDLE_S, IDLE_COMMANDS_S = 5.0, 500
# Tokens of an account that stands for a ledger which did not come to rest.
RESTLESS = -1
# Faults that take some data from Redis: docs/guides/quotas.md says what is granted and charged then.
LOSSES = frozenset({Kind.REDIS_RESTART, Kind.REDIS_FAILOVER, Kind.KEYS_LOST, Kind.REDIS_FULL, Kind.ROUTER_KILL_FULL})
# Faults that take all data, which routers and store put back.
_WIPES = frozenset({Kind.REDIS_WIPE, Kind.RESTART_WIPE})
# Maximum time in seconds between two reports of a router, and until reservations end of one that died.
_REPORT_S, _ENDED_S = RENEW_S + 0.5, HELD_MS / 1e3 + 2.0
# Time in seconds after a wipe in which nothing is charged, because the ledger is filled.
_CLOSED_S = RECOVERY_MS / 1e3 + 1.0


def draw_quotas(plan: Plan) -> list[Quota]:
    """Return the tenants that have a quota, which some of them have used in part or nearly as a whole."""
    chance = random.Random(f"quotas {plan.seed}")
    used = (1, DEFAULT_QUOTA // 2, DEFAULT_QUOTA - 150, DEFAULT_QUOTA - 1)
    defaults = [Quota(f"tenant-{number}", DEFAULT_QUOTA, chance.choice(used)) for number in range(plan.tenants)]
    return [*(Quota(tenant, OWN_QUOTA) for tenant in _OWN), *defaults]


def draw_prices(plan: Plan) -> dict[str, tuple[int, int, int]]:
    """Return the prices of the base model, and of some adapters of the busy tenants."""
    own = random.Random(f"prices {plan.seed}")
    adapters = [f"tenants/{tenant}/adapters/{name}" for tenant in TENANTS for name in ADAPTERS]
    priced = {name: own.choice(ADAPTER_PRICES) for name in adapters if own.random() < 0.5}
    return {MODEL_NAME: (PRICE, PRICE, PRICE), **priced}


def draw_plans(plan: Plan) -> str:
    """Return prices and plans, as TOML, in which the busy tenants have some limits, which their requests keep to."""
    chance, own = random.Random(f"plans {plan.seed}"), random.Random(f"money {plan.seed}")
    lines = ["[prices]", *(f'"{name}" = {list(price)}' for name, price in draw_prices(plan).items())]

    def limit(tokens: int) -> str:
        """Return a limit of tokens, or of the money that they cost at the base model."""
        return own.choice((f"tokens_per_day = {tokens}", f"budget_per_month = {money(tokens * PRICE)}"))

    lines += ["[default]", limit(DEFAULT_QUOTA)]
    for tenant in _OWN:
        lines += [f"[tenants.{tenant}]", limit(OWN_QUOTA)]
    for tenant in TENANTS:
        limits = {
            "concurrent_streams": 2 * IN_FLIGHT,
            "requests_per_minute": 1_000_000,
            "input_tokens_per_minute": 10**9,
            "output_tokens_per_minute": 10**9,
            "tokens_per_day": 10**12,
            "tokens_per_month": 10**12,
            "budget_per_month": 10**6,
        }
        lines += [f"[tenants.{tenant}]"]
        lines += [f"{name} = {limits[name]}" for name in chance.sample(list(limits), chance.randint(1, len(limits)))]
    return "\n".join(lines) + "\n"


def callers(plan: Plan, number: int, revisions: Sequence[Revision]) -> Sequence[Revision]:
    """Return what a request may be for: some are of a tenant with a quota, which asks the base model."""
    chance = random.Random(f"caller {plan.seed} {number}")
    kind = chance.random()
    if not plan.ledger or kind < 0.6:
        return revisions
    return (Revision(chance.choice(_OWN) if kind < 0.75 else f"tenant-{chance.randrange(plan.tenants)}"),)


async def use_quotas(quotas: Iterable[Quota], redis: Redis, store: str) -> None:
    """Charge what was used before the run, as a router that has stopped since."""
    ledger, client = Ledger(redis), StoreClient(store)

    async def charge(quota: Quota) -> None:
        facts = msgspec.json.encode(Facts(quota.tenant, request_id="earlier", currency="EUR")).decode()
        wanted = Reservation(f"of-{quota.tenant}", quota.tenant, quota.used, 0, facts, input_price=PRICE)
        reservation = await ledger.reserve(wanted, None, {quota.tenant: {}})
        reservation.use(quota.used, 0)
        reservation.open = False
        await ledger.tell([reservation])

    earlier = Quotas(ledger, Plans(), store=client)
    try:
        await earlier.renew()
        await asyncio.gather(*(charge(quota) for quota in quotas if quota.used))
        await earlier.save()
    finally:
        await client.close()


async def read_ledger(redis: Redis, usage: Iterable[Path], prices: Prices) -> list[Charged | Account]:
    """Return what tenants were charged, once every reservation has ended and every charge is written."""
    while await redis.keys(f"{LEDGER}held:*") or await redis.xlen(f"{LEDGER}usage"):  # noqa: ASYNC110 — Redis tells no event
        await asyncio.sleep(LOOK_S)
    accounts: list[Charged | Account] = []
    keys: Any = await redis.keys(f"{LEDGER}account:*")
    for key in sorted(keys):
        name = key.decode().removeprefix(f"{LEDGER}account:")
        if not is_key_account(name):
            counts = await account_of(redis, name)
            accounts.append(Account(name, counts["month_tokens"], counts["month_cost"]))
    return [*read_events(usage, prices), *accounts]


def read_events(usage: Iterable[Path], prices: Prices) -> list[Charged]:
    """Return the charges of usage files, each id once: of two with the same id the larger is right."""
    found: dict[str, Charged] = {}
    for line in (line for path in usage if path.exists() for line in path.read_text().splitlines()):
        event = json.loads(line)
        data, before = event["data"], found.get(event["id"])
        adapter, is_revision, _ = data["adapter_revision"].partition("/revisions/")  # not a weighted set
        tokens, cached = (data["input_tokens"], data["output_tokens"]), data["cached_tokens"]
        price = prices.get(adapter) or prices[MODEL_NAME]
        due = (tokens[0] - cached) * price[0] + cached * price[1] + tokens[1] * price[2]
        money_part = int(data.get("cost", "0").replace(".", "")), due
        name = adapter if is_revision else ""
        charged = Charged(event["id"], data["tenant"], data["request_id"], *tokens, name, *money_part)
        if before is None or (before.input, before.output) < (charged.input, charged.output):
            found[event["id"]] = charged
    return list(found.values())


async def commands_s(redis: Redis) -> float:
    """Return the commands that Redis carries out in a second, those of scripts included."""

    async def count() -> int:
        found: Any = await redis.info("commandstats")
        return sum(one["calls"] for one in found.values())

    before = await count()
    await asyncio.sleep(IDLE_S)
    return (await count() - before) / IDLE_S


def check_ledger(
    verdict: Verdict,
    model: str,
    requests: Mapping[int, Observation],
    lines: Sequence[LedgerLine],
    faults: Sequence[Fault],
) -> None:
    """Compare the tokens of clients, events, accounts and quotas; docs/guides/quotas.md says where to the token."""
    _LedgerCheck(verdict, model, requests, lines, faults).check()
    for idle in (line for line in lines if isinstance(line, Idle)):
        verdict.idle_commands_s = idle.commands_s
        if idle.commands_s > IDLE_COMMANDS_S:
            verdict.findings.append(f"an idle cluster costs {idle.commands_s:.0f} commands/s, over {IDLE_COMMANDS_S}")


class _LedgerCheck:
    """Compares the lines of a run. `_unsure` requests had a router that stood still, or died and was forgotten."""

    def __init__(
        self,
        verdict: Verdict,
        model: str,
        requests: Mapping[int, Observation],
        lines: Sequence[LedgerLine],
        faults: Sequence[Fault],
    ) -> None:
        self._verdict, self._model, self._faults = verdict, model, faults
        self._requests = list(requests.values())
        self._of_request: dict[tuple[str, str], list[Charged]] = defaultdict(list)
        self._of_tenant: dict[str, list[Observation]] = defaultdict(list)
        self._in_events: dict[str, int] = defaultdict(int)
        self._cost_in_events: dict[str, int] = defaultdict(int)
        self._accounts = {line.tenant: line.tokens for line in lines if isinstance(line, Account)}
        self._costs = {line.tenant: line.cost for line in lines if isinstance(line, Account)}
        self._quotas = {line.tenant: line for line in lines if isinstance(line, Quota)}
        self._is_lossy = any(fault.kind in LOSSES for fault in faults)
        for charge in (line for line in lines if isinstance(line, Charged)):
            self._of_request[charge.tenant, charge.request_id].append(charge)
            for account in filter(None, (charge.tenant, charge.adapter)):
                self._in_events[account] += charge.input + charge.output
                self._cost_in_events[account] += charge.cost
            if charge.cost != charge.due:
                what = f"event {charge.id} has {money(charge.cost)}, its tokens cost {money(charge.due)}"
                verdict.findings.append(what)
        for observation in self._requests:
            self._of_tenant[observation.request.revision.tenant].append(observation)
        self._unsure = {one.request.number for one in self._requests if self._is_unsure(one)}

    def check(self) -> None:
        """Add what is wrong to the verdict."""
        verdict, exact = self._verdict, not self._is_lossy
        for observation in self._requests:
            if observation.completed:
                self._check_request(observation, exact=exact and observation.request.number not in self._unsure)
        if RESTLESS in self._accounts.values():
            verdict.findings.append("the ledger has open reservations, or charges that nobody wrote")
            return
        callers = {tenant for tenant, own in self._of_tenant.items() if any(one.completed for one in own)}
        for tenant in sorted((callers | self._in_events.keys()) - self._accounts.keys()):
            self._miscount(f"{tenant} has no account", exact=exact)
        for tenant in sorted(self._accounts):
            self._check_account(tenant, exact=exact)
        for tenant, own in sorted(self._of_tenant.items()):
            if quota := self._quotas.get(tenant):
                self._check_quota(quota, own)

    def _miscount(self, what: str, *, exact: bool) -> None:
        self._verdict.miscounted.append(what)
        if exact:
            self._verdict.findings.append(what)

    def _is_unsure(self, observation: Observation) -> bool:
        """Tell whether a router of the request stood still, or lost with its life what a wipe took from Redis.

        What such a router charged in its last second is not in the store, and its reservations may end unknown. A
        router that another one has taken the request from may charge its part again if a wipe comes before it knows.
        """
        wipes = [fault for fault in self._faults if fault.kind in _WIPES]
        for call in (call for call in observation.calls if call.method == "Resume"):
            if any(call.at <= wipe.mended <= call.at + _REPORT_S + _CLOSED_S for wipe in wipes):
                return True
        for fault in self._faults:
            if fault.kind == Kind.ROUTER_STOP and observation.request.number in fault.hit:
                return True
            if fault.kind not in {Kind.ROUTER_KILL, Kind.ROUTER_STOP}:
                continue
            until, since = _end_of(fault) if fault.kind == Kind.ROUTER_STOP else math.inf, self._saved_until(fault)
            wiped = any(since <= wipe.mended <= until for wipe in wipes)
            if wiped and observation.calls[0].at <= _end_of(fault) and observation.ended >= since:
                return True
        return False

    def _saved_until(self, fault: Fault) -> float:
        """Return the time up to which a router had saved its charges when the fault came: the store may have been away
        then, and after a wipe calls that have ended are charged once the ledger is filled.
        """
        since = fault.began - _REPORT_S
        for one in sorted(self._faults, key=lambda one: one.mended, reverse=True):
            if one.began < fault.began and one.kind == Kind.STORE_KILL and one.mended >= since - _REPORT_S:
                since = min(since, one.began - _REPORT_S)
            elif one.began < fault.began and one.kind in _WIPES and one.mended >= since - _CLOSED_S:
                since = min(since, one.mended - _REPORT_S)
        return since

    def _check_request(self, observation: Observation, *, exact: bool) -> None:
        request_id = f"{observation.request.number}.{len(observation.refused) + 1}"
        own = self._of_request.get((observation.request.revision.tenant, request_id), ())
        used = observation.prompt_tokens, observation.completion_tokens
        charged = sum(one.input for one in own), sum(one.output for one in own)
        self._verdict.client_tokens += sum(used)
        self._verdict.charged_tokens += sum(charged)
        # A call that was made again from its beginning was computed again.
        times = sum(call.method != "Resume" for call in observation.calls)
        if charged == used or (times > 1 and sum(used) <= sum(charged) <= times * sum(used)):
            return
        # Tokens on their way to a client that resumes are made and charged again; of ranked answers that is all.
        resumes, request = len(observation.calls) - times, observation.request
        again = used[1] if request.best_of else AGAIN_TOKENS * request.n
        if charged[0] == used[0] and 0 < charged[1] - used[1] <= resumes * again:
            return
        far = abs(sum(charged) - sum(used)) > (times + 1) * _asked(self._model, observation.request)
        what = f"request {request_id} used {used[0]} + {used[1]} tokens, its events have {charged[0]} + {charged[1]}"
        self._miscount(what, exact=exact or (far and not self._is_lossy))

    def _check_account(self, tenant: str, *, exact: bool) -> None:
        tokens, in_events = self._accounts[tenant], self._in_events.get(tenant, 0)
        owner = tenant.split("/")[1] if "/" in tenant else tenant  # of an adapter's account
        if owner == tenant:
            self._verdict.account_tokens += tokens
            self._verdict.event_tokens += in_events
        unsure = [one.request for one in self._of_tenant.get(owner, ()) if one.request.number in self._unsure]
        most = sum(_asked(self._model, request) for request in unsure)
        if tokens != in_events:
            what = f"the account of {tenant} has {tokens} tokens, its events have {in_events}"
            self._miscount(what, exact=exact and abs(tokens - in_events) > most)
        cost, of_events = self._costs[tenant], self._cost_in_events.get(tenant, 0)
        if cost != of_events:
            what = f"the account of {tenant} has {money(cost)}, its events have {money(of_events)}"
            self._miscount(what, exact=exact and abs(cost - of_events) > most * _DEAREST)

    def _check_quota(self, quota: Quota, own: Sequence[Observation]) -> None:
        """Compare what clients got with a quota, and find refusals though there was room."""
        got = quota.used + sum(self._got(observation) for observation in own)
        most = quota.tokens + self._bound(own)
        if got > most and not self._is_lossy:
            self._verdict.findings.append(f"{quota.tenant} got {got} tokens of {quota.tokens}, {most} with the bound")
        for refused in (one for one in own if one.error == OVER_QUOTA):
            beside = [one for one in own if refused.calls[0].at - _ENDED_S - LINGER_S <= one.ended]
            wanted = sum(
                (len(one.refused) + len(one.calls)) * _asked(self._model, one.request)
                for one in beside
                if one.calls[0].at <= refused.ended
            )
            if self._accounts.get(quota.tenant, 0) + wanted <= quota.tokens:
                number = refused.request.number
                self._verdict.findings.append(f"request {number} of {quota.tenant} was refused though there was room")

    def _got(self, observation: Observation) -> int:
        """Return the tokens of a request that its client got, with its prompt if it got any."""
        if observation.completed:
            return observation.prompt_tokens + observation.completion_tokens
        ends: dict[int, int] = defaultdict(int)
        for delta in observation.deltas:
            ends[delta.choice] = max(ends[delta.choice], delta.offset + len(delta.token_ids))
        return sum(ends.values()) + (prompt_tokens(self._model, observation.request) if ends else 0)

    def _bound(self, own: Sequence[Observation]) -> int:
        """Return the tokens beyond its quota that a tenant may get; D and L of docs/guides/quotas.md."""
        bound = 0
        for observation in own:
            if observation.request.number in self._unsure:
                bound += _asked(self._model, observation.request)
                continue
            for fault in self._faults:
                if fault.kind == Kind.ROUTER_KILL and observation.request.number in fault.hit:
                    bound += _last(self._model, observation, fault)
        return bound


def _end_of(fault: Fault) -> float:
    """Return the time at which the reservations of the fault's router have ended."""
    return max(fault.mended, fault.began + _ENDED_S)


def _last(model: str, observation: Observation, fault: Fault) -> int:
    """Return the tokens that a client got in its router's last second, with the prompt if that was computed in it."""
    since = fault.began - _REPORT_S
    tokens = sum(len(delta.token_ids) for delta in observation.deltas if since <= delta.at <= fault.mended)
    is_new = not any(delta.at < since for delta in observation.deltas)
    return tokens + (prompt_tokens(model, observation.request) if is_new else 0)


def _asked(model: str, request: Request) -> int:
    """Return the tokens that a request reserves."""
    return prompt_tokens(model, request) + request.max_tokens * (request.best_of or request.n)
