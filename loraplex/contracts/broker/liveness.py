"""Live workers and routers. A worker has a key that expires without beats, a router a score; both by Redis's clock.

A router's census has a row of each worker: the counts that always change, and the version of its card, which has the
rest of what routers need. A router reads the cards whose version it does not know.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from msgspec import DecodeError
from redis.asyncio import Redis

from loraplex.contracts.broker.functions import LIBRARY, Library
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import AdapterTiers, WorkerState, decode_record, encode_record
from loraplex.contracts.broker.terms import ADAPTER_DIGITS

# Interval in ms of a worker's beats.
BEAT_MS = 500
# Maximum states or cards that are read at once: that stops the whole server meanwhile.
_STATES_AT_ONCE = 64
# The counts of a worker's state that its row has, after the digits of the version; newer ones go to the end.
_COUNTS = (
    *("rows_running", "rows_waiting", "slots_used", "slots_pinned"),
    *("blocks_free", "blocks_cached", "blocks_referenced"),
)
_VERSION_DIGITS = 16
# Rows and states by incarnation, ordered by the workers' ids.
_States = dict[bytes, tuple[bytes, WorkerState]]


def _card_of(state: WorkerState) -> WorkerState:
    counts: Any = dict.fromkeys(_COUNTS, 0)
    return replace(_with_digits(state), **counts, steps=0, tiers=AdapterTiers(), sets={})


def _with_digits(state: WorkerState) -> WorkerState:
    return replace(state, adapters=tuple(digest[-ADAPTER_DIGITS:] for digest in state.adapters))


def _row_of(state: WorkerState, card: bytes) -> str:
    version = blake2b(card, digest_size=_VERSION_DIGITS // 2).hexdigest()
    return " ".join([version, *(str(getattr(state, name)) for name in _COUNTS)])


def _with_counts(state: WorkerState, row: bytes) -> WorkerState:
    with suppress(ValueError):  # no worker of this version has written it
        counts: Any = zip(_COUNTS, map(int, row.split()[1:]), strict=False)
        return replace(state, **dict(counts))
    return state


@dataclass(frozen=True, slots=True)
class CellLoad:
    """The load of a cell: its waiting jobs, their work and tenants, and the work that it claims in a second.

    `rate` is 0 where no measurement tells. `arrivals` counts all jobs that have come, from 1 on and from there anew.
    """

    waiting: int = 0
    work: float = 0.0
    rate: float = 0.0
    tenants: int = 0
    arrivals: int = 0


NO_LOAD = CellLoad()


@dataclass(frozen=True, slots=True)
class Census:
    """The live workers, ordered by id. `server` changes with a restart, a failover and the loss of all data.

    Of their adapters it has the last ADAPTER_DIGITS of the digests; `steps`, `tiers` and `sets` are left out.
    """

    server: str
    workers: list[WorkerState]
    # Number of homes of the adapters with several, by the last ADAPTER_DIGITS of their digests (broker/homes.py).
    homes: Mapping[str, int] = field(default_factory=dict)
    load: CellLoad = NO_LOAD


class Liveness:
    """The workers and routers of one cell."""

    def __init__(self, redis: Redis, keys: Keys, *, library: Library = LIBRARY) -> None:
        self._redis, self._keys, self._library = redis, keys, library
        # Of the last census.
        self._known: _States = {}

    async def _answer_of(self, name: str, *arguments: Any) -> Any:
        """Return the answer of a function of broker/lua, whose first argument is the prefix of the cell's keys."""
        return await self._library.function(self._redis, name)(self._keys.workers, [self._keys.prefix, *arguments])

    async def beat(self, state: WorkerState) -> list[str]:
        """Record that a worker lives, for the next WORKER_TTL_MS; return the relay addresses of the live routers."""
        card = encode_record(_card_of(state))
        names = state.incarnation, state.worker_id
        routers = await self._answer_of("beat", *names, encode_record(state), _row_of(state, card), card)
        return [router.decode(errors="replace") for router in routers]

    async def declare_dead(self, incarnation: str) -> None:
        """Record at once that an incarnation lives no more; jobs are not held for its worker."""
        await self._answer_of("declare_dead", incarnation)

    async def take_census(self, router: str = "", busy: float | None = None) -> Census:
        """Return who lives; a router that gives its own address is recorded as alive.

        `busy`: to how many workers' rows the used rows of all add up, which decides how many homes adapters have; None
        changes nothing.
        """
        roll, homes, load = await self._answer_of("census", router, secrets.token_hex(8), "" if busy is None else busy)
        _, server, *rows = roll.split(b"\n")
        self._known = await self._states(rows, self._known)
        names = [name.decode(errors="replace") for name in homes[::2]]
        numbers = dict(zip(names, map(int, homes[1::2]), strict=True))
        waiting, work, rate, tenants, arrivals = load
        workers = [state for _, state in self._known.values()]
        load_now = CellLoad(int(waiting), float(work), float(rate), int(tenants), int(arrivals))
        return Census(server.decode(errors="replace"), workers, numbers, load_now)

    async def live_routers(self) -> list[str]:
        """Return the relay addresses of the live routers."""
        routers = await self._answer_of("live_routers")
        return sorted(router.decode(errors="replace") for router in routers)

    async def live_workers(self) -> list[WorkerState]:
        """Return the live workers with their whole states, ordered by id."""
        roll, *_ = await self._answer_of("census", "", secrets.token_hex(8), "")
        _, _, *rows = roll.split(b"\n")
        states = await self._read_states([line.partition(b" ")[0] for line in rows])
        return sorted((state for state in states if state is not None), key=lambda state: state.worker_id)

    async def other_workers(self, incarnation: str) -> list[WorkerState]:
        """Return the live workers beside an incarnation, of many a part that is drawn; a worker's user may ask so."""
        known: Any = await self._redis.hgetall(self._keys.workers)
        others = [other for other in known if other != incarnation.encode()]
        states = await self._read_states(random.sample(others, min(len(others), _STATES_AT_ONCE)))
        return [state for state in states if state is not None]

    async def _states(self, rows: Sequence[bytes], known: _States) -> _States:
        """Return the states of the workers in these rows; cards whose version is not known are read."""
        states: _States = {}
        unknown: list[tuple[bytes, bytes]] = []
        for line in rows:
            incarnation, _, row = line.partition(b" ")
            former, state = known.get(incarnation, (b"", None))
            if state is None or not row or row[:_VERSION_DIGITS] != former[:_VERSION_DIGITS]:
                unknown.append((incarnation, row))
            else:
                states[incarnation] = row, state if row == former else _with_counts(state, row)
        for at in range(0, len(unknown), _STATES_AT_ONCE):
            some = unknown[at : at + _STATES_AT_ONCE]
            cards: Any = await self._redis.hmget(self._keys.cards, [incarnation for incarnation, _ in some])
            for (incarnation, row), card in zip(some, cards, strict=True):
                if (state := _decoded(card)) is not None:
                    states[incarnation] = row, _with_counts(state, row)
        # Of an older version, or without a card that was lost.
        without = [incarnation for incarnation, _ in unknown if incarnation not in states]
        for incarnation, state in zip(without, await self._read_states(without), strict=True):
            if state is not None:
                states[incarnation] = b"", _with_digits(state)
        return dict(sorted(states.items(), key=lambda item: item[1][1].worker_id))

    async def _read_states(self, incarnations: Sequence[bytes]) -> list[WorkerState | None]:
        """Return whole states; None for one that has died meanwhile, or that this version cannot read."""
        keys = [self._keys.worker("").encode() + incarnation for incarnation in incarnations]
        found: list[WorkerState | None] = []
        for at in range(0, len(keys), _STATES_AT_ONCE):
            records: Any = await self._redis.mget(keys[at : at + _STATES_AT_ONCE])
            found += map(_decoded, records)
        return found


def _decoded(record: bytes | None) -> WorkerState | None:
    with suppress(DecodeError):
        return None if record is None else decode_record(WorkerState, record)
    return None
