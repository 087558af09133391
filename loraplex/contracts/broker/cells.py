"""The cells of a model: which one gets a job, and which are drained.

A cell is one set of queues on one Redis, with workers of its own. A router sends a job to the first cell in a ranking,
passing over cells in which the job would clearly wait longer than in another:

    a job with an adapter   ranked by the adapter's digest: its jobs meet in one cell, whose workers have it
    a job of the base model ranked by its own id, so that jobs go to cells by their free rows

The ranking is weighted rendezvous hashing (Schindelhauer and Schomaker, Weighted distributed hash tables, 2005), with a
cell's rows as its weight: a cell that comes or goes moves only its own part of the adapters.

The wait is that of the job's tenant. A tenant whose jobs wait in one cell has its next ones go to another, so that a
tenant with a backlog has one in every cell, and gets its share of each: the same share as with one cell, however many
adapters it has. Counters of service are each cell's own.

Operators drain a cell: the names of drained cells are in the routers' own Redis (--redis-url).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, log
from typing import cast

from redis.asyncio import Redis

from loraplex.contracts.broker.functions import LIBRARY
from loraplex.contracts.broker.homes import hash_of, mixed
from loraplex.contracts.broker.keys import DRAINED_CELLS
from loraplex.contracts.broker.liveness import NO_LOAD, CellLoad
from loraplex.contracts.broker.messages import WorkerState

# Time in seconds by which a job may wait longer in the first cell of its ranking than in another, about that of loading
# its adapter there, and how many times as long: estimates are rough.
LONGER_S = 0.5
LONGER = 1.5
# Guess of the work that a row of a worker claims in a second, in charged tokens, where none was measured.
ROW_RATE = 100.0
# Jobs a second that 70% of the core of one cell's Redis serves, on the slower of two processors (bench.scaling).
CELL_JOBS = 3_013.0
_NAME = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class CellAddress:
    """A cell's name and the URL of its Redis; empty: the one of --redis-url."""

    name: str
    url: str = ""


def parse_cells(text: str, flag: str = "--cells") -> tuple[CellAddress, ...]:
    """Return the cells of `NAME[=URL] ...`. Raises ValueError."""
    cells: list[CellAddress] = []
    for word in text.split():
        name, given, url = word.partition("=")
        if "://" in name:  # it may have a password
            raise ValueError(f"{flag}: write NAME=URL for a cell with a Redis of its own")
        if not is_cell_name(name):
            raise ValueError(f"{flag} {name!r}: a cell's name has letters, digits, '-', '_' and '.'")
        if given and not url:
            raise ValueError(f"{flag} {name}=: give the URL of its Redis, or leave out the =")
        if any(cell.name == name for cell in cells):
            raise ValueError(f"{flag} {name}: two cells have this name")
        cells.append(CellAddress(name, url))
    if not cells:
        raise ValueError(f"{flag} {text!r}: name at least one cell, such as main")
    return tuple(cells)


def is_cell_name(text: str) -> bool:
    """Tell whether a cell may have this name, which is a part of Redis keys and of patterns of them."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class CellSight:
    """A cell of a model at a router's last look: its live workers, its load, and whether its Redis answers.

    `answers` is False as soon as a look fails or its answer is late; `away` is True after some seconds without any.
    """

    workers: Sequence[WorkerState]
    load: CellLoad = NO_LOAD
    answers: bool = True
    away: bool = False


@dataclass(slots=True)
class Backlog:
    """The waiting work of a cell of a model: at the last look, and what this router has placed since.

    `own` is the work of this router's waiting jobs by tenant.
    """

    load: CellLoad = NO_LOAD
    own: dict[str, float] = field(default_factory=dict)
    placed_rows: int = 0
    placed_work: float = 0.0
    # Work of all routers' jobs for each unit of this one's.
    scale: float = 1.0

    @classmethod
    def of(cls, load: CellLoad, own: Mapping[str, float]) -> Backlog:
        """Return the backlog at a look."""
        total = sum(own.values())
        return cls(load, dict(own), scale=max(1.0, load.work / total) if total else 1.0)

    def place(self, tenant: str, rows: int, work: float) -> None:
        """Count a job that is sent there."""
        self.placed_rows += rows
        self.placed_work += work
        self.own[tenant] = self.own.get(tenant, 0.0) + work

    def work_before_turn(self, tenant: str, work: float) -> float:
        """Return the work that the cell claims up to a job of the tenant, at the tenant's share of it."""
        own = self.own.get(tenant, 0.0)
        tenants = max(1, self.load.tenants + (own == 0))
        return min(self.load.work + self.placed_work + work, (own * self.scale + work) * tenants)


@dataclass(frozen=True, slots=True)
class CellView:
    """A cell as a router sees it: the rows of its workers that take jobs of a base model, and those in use."""

    name: str
    rows: int
    used: int
    backlog: Backlog

    @property
    def free_rows(self) -> int:
        """Return the rows that no job has or waits for."""
        return max(0, self.rows - self.used - self.backlog.load.waiting - self.backlog.placed_rows)

    def wait_s(self, tenant: str, work: float) -> float:
        """Return for about how many seconds a job of the tenant would wait."""
        if not self.rows:
            return inf
        if self.free_rows:
            return 0.0
        return self.backlog.work_before_turn(tenant, work) / (self.backlog.load.rate or ROW_RATE * self.rows)


def choose_cell(cells: Sequence[CellView], digest: str, job_id: str, tenant: str, work: float) -> CellView:
    """Choose a job's cell; `digest` is its adapter's, empty without one."""
    if len(cells) == 1:
        return cells[0]
    waits = [cell.wait_s(tenant, work) for cell in cells]
    bound = LONGER * min(waits) + LONGER_S
    names = tuple([cell.name for cell in cells])
    if digest:
        ranking = _ranking(digest, names, tuple([cell.rows for cell in cells]))
    else:
        free = [cell.free_rows for cell in cells]
        ranking = _ranked(hash_of(job_id), names, free if any(free) else [cell.rows for cell in cells])
    return cells[next(place for place in ranking if waits[place] <= bound)]


@lru_cache(maxsize=16_384)
def _ranking(digest: str, names: tuple[str, ...], rows: tuple[int, ...]) -> tuple[int, ...]:
    return _ranked(hash_of(digest), names, rows)


def _ranked(key: int, names: Sequence[str], weights: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the cells in the order of their ranking for a key."""
    pairs = zip(names, weights, strict=True)
    places = [-log((mixed(key ^ _hash(name)) + 1) / 2**64) / weight if weight else inf for name, weight in pairs]
    # By name where places are equal, as without rows anywhere: every router then chooses the same.
    return tuple(sorted(range(len(places)), key=lambda at: (places[at], names[at])))


@lru_cache(maxsize=64)
def _hash(name: str) -> int:
    return hash_of(name)


class DrainedCells:
    """The names of the drained cells in Redis, with the times in ms since which they are."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def read(self) -> frozenset[str]:
        """Return the names."""
        names = await self._redis.hgetall(DRAINED_CELLS)
        return frozenset(name.decode(errors="replace") for name in cast(dict[bytes, bytes], names))

    async def drain(self, name: str, others: Sequence[str]) -> bool:
        """Drain a cell; False where all `others` are drained, which leaves it open."""
        return bool(await LIBRARY.function(self._redis, "drain_cell")(DRAINED_CELLS, [name, *others]))

    async def open(self, name: str) -> None:
        """Open a drained cell again."""
        await LIBRARY.function(self._redis, "open_cell")(DRAINED_CELLS, [name])
