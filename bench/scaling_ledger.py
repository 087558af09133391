"""Measures how long many routers wait for a ledger that has lost its data, with a real server and adapter store."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from bench.store import running_store
from bench.valkey import running_valkey
from loraplex.admin.v1.accounts_pb2 import Account
from loraplex.contracts.broker.connection import connect
from loraplex.contracts.broker.ledger import Ledger
from loraplex.contracts.plans import Plan
from loraplex.router.catalog.store_client import StoreClient
from loraplex.router.quotas.plans import Plans
from loraplex.router.quotas.quotas import RENEW_S, Quotas
from loraplex.runtime.rpc.tasks import every


def measure_recovery(accounts: int, routers: int) -> float:
    """Return the seconds until calls at so many routers are admitted again, where the store has so many accounts."""
    with running_valkey() as url, tempfile.TemporaryDirectory(prefix="lp-") as name:
        return asyncio.run(_measure_recovery(url, Path(name), accounts, routers))


async def _measure_recovery(url: str, directory: Path, accounts: int, routers: int) -> float:
    async with running_store(directory) as (_, address, _):
        redis, store = [await connect(url) for _ in range(routers)], StoreClient(address)
        now = datetime.now(UTC)
        month, day = 12 * now.year + now.month - 1, int(now.timestamp()) // 86_400
        await store.save_accounts(
            [
                Account(name=f"tenant{number:06}", month=month, month_tokens=29_935_000, day=day, day_tokens=20_785)
                for number in range(accounts)
            ]
        )
        plans = Plans()
        plans.put({f"tenants/tenant{number:06}": Plan(tokens_per_month=1 << 40) for number in range(accounts)})
        each = [Quotas(Ledger(one), plans, store=store) for one in redis]

        async def renew(quotas: Quotas) -> None:
            await asyncio.sleep(random.random() * RENEW_S)
            await every(RENEW_S, quotas.renew)

        async def call(number: int) -> None:
            if (budget := await each[number].reserve(f"tenant{number:06}", 10, 100)) is None:
                raise RuntimeError("a call of a tenant with a plan has no reservation")
            await budget.settle()

        renewing = [asyncio.create_task(renew(quotas)) for quotas in each]
        try:
            await asyncio.gather(*map(call, range(routers)))  # which fills the ledger for the first time
            await asyncio.sleep(2 * RENEW_S)
            await redis[0].flushall()
            start = time.monotonic()
            await asyncio.gather(*map(call, range(routers)))
            return time.monotonic() - start
        finally:
            for task in renewing:
                task.cancel()
            await asyncio.gather(*renewing, return_exceptions=True)
            await store.close()
            await asyncio.gather(*(one.aclose() for one in redis))
