"""The tenants' plans in a chaos run, and the check that clients, usage events and accounts have the same tokens.

A request's tokens are the client's, which the checker compares with the model's; those of the events with its
request id; and, of all requests together, those of the tenant's account in Redis.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from broker.keys import LEDGER, is_key_account
from tests.chaos.history import Account, Charged, Fault, Observation
from tests.chaos.plan import IN_FLIGHT, TENANTS, Kind
from tests.chaos.verdict import Verdict

# Interval in seconds between looks at whether every reservation has ended and every charge is written.
LOOK_S = 0.2
# Tokens of an account that stands for a ledger which did not come to rest.
RESTLESS = -1
# Faults that take data from Redis: accounts are then put back within the bound of docs/quotas.md, not to the token.
LOSSES = frozenset(
    {Kind.REDIS_RESTART, Kind.REDIS_WIPE, Kind.REDIS_FAILOVER, Kind.KEYS_LOST, Kind.REDIS_FULL, Kind.ROUTER_KILL_FULL}
)


def draw_plans(seed: int) -> str:
    """Return a plans file in which each tenant has some limits, which its requests keep to."""
    chance = random.Random(f"plans {seed}")
    lines: list[str] = []
    for tenant in TENANTS:
        limits = {
            "concurrent_streams": 2 * IN_FLIGHT,
            "requests_per_minute": 1_000_000,
            "input_tokens_per_minute": 10**9,
            "output_tokens_per_minute": 10**9,
            "tokens_per_day": 10**12,
            "tokens_per_month": 10**12,
        }
        lines += [f"[tenants.{tenant}]"]
        lines += [f"{name} = {limits[name]}" for name in chance.sample(list(limits), chance.randint(1, len(limits)))]
    return "\n".join(lines) + "\n"


async def read_ledger(redis: Redis, usage: Iterable[Path]) -> list[Charged | Account]:
    """Return what tenants were charged, once every reservation has ended and every charge is written."""
    while await redis.keys(f"{LEDGER}held:*") or await redis.xlen(f"{LEDGER}usage"):  # noqa: ASYNC110 — Redis tells no event
        await asyncio.sleep(LOOK_S)
    accounts: list[Charged | Account] = []
    keys: Any = await redis.keys(f"{LEDGER}account:*")
    for key in sorted(keys):
        name = key.decode().removeprefix(f"{LEDGER}account:")
        if not is_key_account(name):
            accounts.append(Account(name, int(await redis.hget(key, "month_tokens") or 0)))
    return [*read_events(usage), *accounts]


def read_events(usage: Iterable[Path]) -> list[Charged]:
    """Return the charges of usage files, each id once: of two with the same id the larger is right."""
    found: dict[str, Charged] = {}
    for line in (line for path in usage if path.exists() for line in path.read_text().splitlines()):
        event = json.loads(line)
        data, before = event["data"], found.get(event["id"])
        charged = Charged(event["id"], data["tenant"], data["request_id"], data["input_tokens"], data["output_tokens"])
        if before is None or (before.input, before.output) < (charged.input, charged.output):
            found[event["id"]] = charged
    return list(found.values())


def check_ledger(
    verdict: Verdict,
    requests: Mapping[int, Observation],
    charges: Sequence[Charged],
    accounts: Sequence[Account],
    faults: Iterable[Fault],
) -> None:
    """Compare the tokens of clients, events and accounts; to the token unless Redis has lost data."""
    of_request: dict[tuple[str, str], list[Charged]] = defaultdict(list)
    of_tenant: dict[str, int] = defaultdict(int)
    for charge in charges:
        of_request[charge.tenant, charge.request_id].append(charge)
        of_tenant[charge.tenant] += charge.input + charge.output
    for observation in requests.values():
        if observation.completed:
            _check_request(verdict, observation, of_request)
    for account in accounts:
        _check_account(verdict, account, of_tenant.get(account.tenant, 0))
    found = {account.tenant for account in accounts}
    callers = {one.request.revision.tenant for one in requests.values() if one.completed}
    if not any(account.tokens == RESTLESS for account in accounts):
        verdict.miscounted += [f"{tenant} has no account" for tenant in sorted((callers | of_tenant.keys()) - found)]
    if not any(fault.kind in LOSSES for fault in faults):
        verdict.findings += verdict.miscounted


def _check_request(
    verdict: Verdict, observation: Observation, of_request: Mapping[tuple[str, str], Sequence[Charged]]
) -> None:
    request_id = f"{observation.request.number}.{len(observation.refused) + 1}"
    own = of_request.get((observation.request.revision.tenant, request_id), ())
    used = observation.prompt_tokens, observation.completion_tokens
    charged = sum(one.input for one in own), sum(one.output for one in own)
    verdict.client_tokens += sum(used)
    verdict.charged_tokens += sum(charged)
    # A call that was made again from its beginning was computed again.
    times = sum(call.method != "Resume" for call in observation.calls)
    if charged != used and not (times > 1 and sum(used) <= sum(charged) <= times * sum(used)):
        verdict.miscounted.append(
            f"request {request_id} used {used[0]} + {used[1]} tokens, its events have {charged[0]} + {charged[1]}"
        )


def _check_account(verdict: Verdict, account: Account, in_events: int) -> None:
    if account.tokens == RESTLESS:
        verdict.findings.append("the ledger has open reservations, or charges that nobody wrote")
        return
    verdict.account_tokens += account.tokens
    verdict.event_tokens += in_events
    if account.tokens != in_events:
        verdict.miscounted.append(
            f"the account of {account.tenant} has {account.tokens} tokens, its events have {in_events}"
        )
