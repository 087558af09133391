"""The cells of a router: their Redis, the workers that live in them, and which are drained."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from redis.asyncio import Redis

from loraplex.contracts.broker.cells import CellAddress, CellSight
from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.liveness import NO_LOAD, CellLoad, Census, Liveness
from loraplex.contracts.broker.messages import WorkerPhase, WorkerState
from loraplex.contracts.broker.startup import connect_once_up, open_client
from loraplex.contracts.broker.terms import ADAPTER_DIGITS, WORKER_TTL_MS

log = logging.getLogger(__name__)

# Interval in seconds between looks at the workers, and at the store.
LOOK_S = 0.5
# Time in seconds without an answer after which the router's health says that Redis is away: a worker's time to live.
AWAY_S = WORKER_TTL_MS / 1e3
# Timeout in seconds for a model's census: one that hangs ends AWAY_S after the last answer. A census over a new
# connection takes several round trips, and one that is given up closes its connection: a short timeout would go on for
# as long as Redis is slow.
ANSWER_S = AWAY_S - LOOK_S
# Time in seconds without an answer to a look after which a cell gets no new jobs, where another one answers.
LATE_S = 2 * LOOK_S
# Time in seconds after an outage or a loss of data during which no worker counts as dead: all must beat again first.
NO_LAPSE_S = WORKER_TTL_MS / 1e3
# Time in seconds after the last worker of a base model has gone, without a drain, in which new jobs wait for it to come
# back: an engine that hangs is replaced, or a worker starts again.
GONE_S = 10.0
# Time in seconds over which a cell's jobs are counted for its rate.
RATE_S = 10.0

# A model's name and a cell's.
CellKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class CellServer:
    """A cell and the client of its Redis."""

    name: str
    redis: Redis


@dataclass(frozen=True, slots=True)
class CellServers:
    """The cells, and the client of the Redis that has what is no queue's: ledger, resume keys, drained cells."""

    home: Redis
    cells: Sequence[CellServer]

    @property
    def names(self) -> list[str]:
        """Return the cells' names."""
        return [cell.name for cell in self.cells]

    @property
    def clients(self) -> set[Redis]:
        """Return the client of each server."""
        return {self.home, *(cell.redis for cell in self.cells)}


async def connect_cells(redis_url: str, addresses: Sequence[CellAddress]) -> CellServers:
    """Connect to the Redis of `redis_url` once it is up, and to those of the cells; a cell's may be away.

    Raises RedisUnreachableError for errors that waiting cannot fix.
    """
    home = await connect_once_up(redis_url)
    clients = {"": home, redis_url: home}
    for cell in addresses:
        if cell.url not in clients:
            clients[cell.url] = await open_client(cell.url, f"--cells {cell.name}")
    return CellServers(home, [CellServer(cell.name, clients[cell.url]) for cell in addresses])


class _Server:
    """The looks at one cell: whether its Redis answers, and until when none of its workers counts as dead."""

    def __init__(self, now: float) -> None:
        # True after a failed look; and the time of the last one that succeeded.
        self.failed, self.answered_at = False, now
        self.no_lapse_before = 0.0
        self.asking: asyncio.Task[None] | None = None
        self.asked_at = now

    def late(self, now: float) -> bool:
        """Tell whether the last look failed, or its answer is late."""
        waits = self.asking is not None and not self.asking.done()
        return self.failed or (waits and now - self.asked_at >= LATE_S)


@dataclass(slots=True)
class _Cell:
    """A cell of a model at its last census."""

    workers: list[WorkerState] = field(default_factory=list)
    homes: Mapping[str, int] = field(default_factory=dict)
    load: CellLoad = NO_LOAD
    # Server and data that the census came from.
    server: str = ""
    # Times of the last censuses, and numbers of the last arrivals.
    arrivals: deque[tuple[float, int]] = field(default_factory=deque)

    def count_arrivals(self, now: float, arrivals: int) -> None:
        """Take the number of the last arrival, which begins anew with Redis's data."""
        if self.arrivals and arrivals < self.arrivals[-1][1]:
            self.arrivals.clear()
        self.arrivals.append((now, arrivals))
        while len(self.arrivals) > 2 and self.arrivals[1][0] <= now - RATE_S:
            self.arrivals.popleft()

    @property
    def jobs_per_s(self) -> float:
        """Return how many jobs have come in a second, over the last RATE_S."""
        if len(self.arrivals) < 2:
            return 0.0
        (since, first), (until, last) = self.arrivals[0], self.arrivals[-1]
        return (last - first) / max(until - since, LOOK_S)


class LiveWorkers:
    """The live workers of each cell, at most one look's interval stale."""

    def __init__(self, clock: Callable[[], float], answer_s: float = ANSWER_S) -> None:
        self._clock = clock
        self._answer_s = answer_s
        self._servers: dict[str, _Server] = {}
        # Those whose first census has come.
        self._cells: dict[CellKey, _Cell] = {}
        # The workers of all cells by model; and the sizes of those that take new jobs or will in a moment: maximum
        # tokens and rank, by base digest.
        self._workers: dict[str, list[WorkerState]] = {}
        self._sizes: dict[str, dict[str, set[tuple[int, int]]]] = {}
        # Time of the first look without a worker that a look saw before, infinite for those that are there; by model,
        # base digest and its id; without those that drain since. A look may be late, so the last one with it won't do.
        self._gone_at: dict[tuple[str, str, str], float] = {}

    def of(self, model: str) -> list[WorkerState] | None:
        """Return a model's live workers; None before its first census."""
        return self._workers.get(model)

    def in_cell(self, model: str, cell: str) -> Sequence[WorkerState]:
        """Return the live workers of a cell of a model."""
        return known.workers if (known := self._cells.get((model, cell))) else ()

    def homes_of(self, model: str, cell: str, digest: str) -> int:
        """Return how many homes an adapter has in a cell: workers that its jobs prefer."""
        known = self._cells.get((model, cell))
        return known.homes.get(digest[-ADAPTER_DIGITS:], 1) if known else 1

    def sizes(self, model: str, base_digest: str) -> set[tuple[int, int]] | None:
        """Return the sizes of the workers that take new jobs of a base model, or will in a moment; None: none does."""
        return self._sizes.get(model, {}).get(base_digest)

    def expects(self, model: str, base_digest: str) -> bool:
        """Tell whether a worker that takes new jobs of a base model lives, or may be back in a moment."""
        now = self._clock()
        return any(now - at < GONE_S for key, at in self._gone_at.items() if key[:2] == (model, base_digest))

    def jobs_per_s(self, model: str, cell: str) -> float:
        """Return how many jobs have lately come into a cell in a second."""
        return known.jobs_per_s if (known := self._cells.get((model, cell))) else 0.0

    def is_away(self, cell: str) -> bool:
        """Tell whether a cell's Redis has answered no census for AWAY_S."""
        server = self._servers.get(cell)
        return server is not None and self._clock() - server.answered_at >= AWAY_S

    @property
    def redis_is_away(self) -> bool:
        """Tell whether no cell's Redis has answered for AWAY_S."""
        return bool(self._servers) and all(map(self.is_away, self._servers))

    def sights(self) -> dict[CellKey, CellSight]:
        """Return each cell of each model at its last look."""
        now = self._clock()
        late = {name: server.late(now) for name, server in self._servers.items()}
        return {
            key: CellSight(known.workers, known.load, answers=not late[key[1]], away=self.is_away(key[1]))
            for key, known in self._cells.items()
        }

    async def look(self, cells: Mapping[CellKey, Liveness], reply_to: str) -> set[str] | None:
        """Take a census of each; return the live incarnations, or None while no worker may count as dead.

        Where there are several cells, one that is slow is not waited for. `reply_to`: the address of this router's
        relay, which is registered as live.
        """
        by_cell: dict[str, dict[str, Liveness]] = {}
        for (model, cell), liveness in cells.items():
            by_cell.setdefault(cell, {})[model] = liveness
        asking: set[asyncio.Task[None]] = set()
        for cell, models in by_cell.items():
            server = self._servers.setdefault(cell, _Server(self._clock()))
            if server.asking is None or server.asking.done():
                server.asking = asyncio.create_task(self._look_at(cell, server, models, reply_to))
                server.asked_at = self._clock()
            asking.add(server.asking)
        try:
            if asking:
                await asyncio.wait(asking, timeout=LOOK_S if len(asking) > 1 else None)
        except asyncio.CancelledError:
            for task in asking:
                task.cancel()
            raise
        for task in asking:
            if task.done():
                task.result()
        return self._living()

    def _living(self) -> set[str] | None:
        """Return the incarnations that count as alive; None while all do.

        Of a cell that is away while another is not, none does: those that still answer over their links go on.
        """
        now = self._clock()
        if all(now < server.no_lapse_before for server in self._servers.values()) and self._servers:
            return None
        return {s.incarnation for (_, cell), of in self._cells.items() if not self.is_away(cell) for s in of.workers}

    async def _look_at(self, cell: str, server: _Server, models: Mapping[str, Liveness], reply_to: str) -> None:
        failures = await asyncio.gather(*(self._ask((name, cell), one, reply_to) for name, one in models.items()))
        if "" in failures:
            server.answered_at = self._clock()
        named = f"cell {cell}: " if len(self._servers) > 1 else ""
        if failure := next(filter(None, failures), ""):
            server.no_lapse_before = self._clock() + NO_LAPSE_S
            if not server.failed:
                log.warning("%sRedis does not answer: %s", named, failure)
        elif server.failed:
            log.info("%sRedis answers again", named)
        server.failed = bool(failure)
        self._merge(models)

    async def _ask(self, key: CellKey, liveness: Liveness, reply_to: str) -> str:
        """Take the census of a cell of a model; return why that failed, or nothing."""
        try:
            async with asyncio.timeout(self._answer_s):
                self._count(key, await liveness.take_census(reply_to, self._busy(key)))
        except REDIS_DOWN as error:  # a timeout is one of them
            return str(error) or type(error).__name__
        return ""

    def _busy(self, key: CellKey) -> float | None:
        """Return to how many workers' rows the used rows of all add up; None before the first census."""
        known = self._cells.get(key)
        if known is None:
            return None
        return sum((state.rows_running + state.rows_waiting) / max(1, state.rows_limit) for state in known.workers)

    def _count(self, key: CellKey, census: Census) -> None:
        """Take a census. Another server, or one that has lost its data, knows no worker yet: none counts as dead."""
        known, server, now = self._cells.setdefault(key, _Cell()), self._servers[key[1]], self._clock()
        if known.server not in {"", census.server}:
            log.warning("Redis restarted, failed over or lost its data: no worker counts as dead for %g s", NO_LAPSE_S)
            server.no_lapse_before = now + NO_LAPSE_S
        known.server, known.homes, known.load = census.server, census.homes, census.load
        known.count_arrivals(now, census.load.arrivals)
        workers = census.workers
        if now < server.no_lapse_before:
            seen = {state.incarnation for state in workers}
            workers = [*workers, *(state for state in known.workers if state.incarnation not in seen)]
        known.workers = workers

    def _merge(self, models: Mapping[str, Liveness]) -> None:
        """Bring the workers of these models together; without those of a cell that is away, while another is not."""
        everywhere, now = self.redis_is_away, self._clock()
        self._gone_at = {key: min(at, now) for key, at in self._gone_at.items() if now - at < GONE_S}
        for model in models:
            cells = [(cell, known) for (name, cell), known in self._cells.items() if name == model]
            if not cells:
                continue
            reached = [known for cell, known in cells if everywhere or not self.is_away(cell)]
            workers = [state for known in reached for state in known.workers]
            self._workers[model] = workers
            sizes = self._sizes[model] = dict[str, set[tuple[int, int]]]()
            for state in workers:
                key = model, state.base_digest, state.worker_id
                if state.phase is WorkerPhase.SERVING or state.returns:
                    sizes.setdefault(state.base_digest, set()).add((state.max_tokens, state.max_rank))
                    self._gone_at[key] = math.inf
                elif state.phase is WorkerPhase.DRAINING:
                    self._gone_at.pop(key, None)
