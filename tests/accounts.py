"""Reads the accounts that the ledger has in Redis."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
from redis.asyncio import Redis

from loraplex.contracts.broker.keys import LEDGER


async def account_of(redis: Redis, name: str) -> dict[str, int]:
    """Return the counts of an account; 0 for those that it lacks."""
    packed: Any = await redis.get(f"{LEDGER}account:{name}")
    counts = msgspec.msgpack.decode(packed) if packed else {}
    return defaultdict(int, {field: count for field, count in counts.items() if field != "name"})
