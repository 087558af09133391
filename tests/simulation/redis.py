"""Redis as the cluster sees it: the queue's policy (bench.queue_model), who lives, and all that can happen to a
server.

Calls take time, wait while the server is stopped, and fail while it is down; an answer may be lost though the call was
carried out, which clients then repeat as the real ones do. Everybody who waits for work is woken by every job: which of
them the scripts wake is for tests of the scripts.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable, Collection
from random import Random
from typing import TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError

from bench.queue_model.queue_model import QueueModel
from broker.commands import Command
from broker.messages import DeadJob, Job, WorkerState
from broker.terms import SEALED_JOB_S, QueueLimits, UsageReport
from tests.simulation.ledger import LuaLedger
from tests.simulation.loop import NODE, Node
from tests.simulation.network import Network

T = TypeVar("T")

# Maximum number of retries, and seconds between them: those of broker.connection.
_RETRIES = 3
_RETRY_S = 0.05


class _Data:
    """A server's data; all of it can be wiped, or rolled back."""

    def __init__(self, limits: QueueLimits, born: int = 0) -> None:
        self.queue = QueueModel(limits)
        self.ledger = LuaLedger()
        self.born = born
        self.bodies: dict[str, bytes] = {}
        # Times at which the waiting jobs were sealed.
        self.sealed_ms: dict[str, int] = {}
        # Until when, by incarnation.
        self.living: dict[str, tuple[int, WorkerState]] = {}
        self.claimed_ms: dict[str, int] = {}
        self.commands: dict[str, list[Command]] = {}
        self.dead: list[DeadJob] = []


class SimulatedRedis:
    """A server. `node` is its process: frozen, it answers later; `enqueued` is called with every attempt that comes."""

    def __init__(self, chance: Random, network: Network, limits: QueueLimits | None = None) -> None:
        self.node = Node("redis")
        self.down = False
        # Seconds that each call and each answer takes beside the network's delay.
        self.slow_s = 0.0
        # Processes that do not reach it.
        self.cut_off: set[Node] = set()
        # Workers that refuse the seals of all jobs that they claim.
        self.refusing: set[str] = set()
        # Time in seconds for which a job's seal is valid, and number of seals that were older at the claim.
        self.seal_s = SEALED_JOB_S
        self.seals_expired = 0
        # Which start of which server it is.
        self.run = 0
        self.enqueued: Callable[[Job], None] = lambda job: None
        # Called with each claimed job and the adapters that its worker has.
        self.claimed: Callable[[Job, Collection[str]], None] = lambda job, resident: None
        # Called after each claim.
        self.scanned: Callable[[], None] = lambda: None
        self.made: Callable[[UsageReport], None] = lambda report: None
        # Reservations of tokens, in their order: accounts, times, amounts and routers.
        self.granted: list[tuple[str, int, int, str]] = []
        # Losses of data: the times since which it is gone, and at which it was lost.
        self.losses: list[tuple[int, int]] = []
        # Tokens of usage events, by id, and the accounts that they are of.
        self.events: dict[str, tuple[int, frozenset[str]]] = {}
        # Times of the loop at which routers counted what they last told of reservations, by router and id.
        self.told_s: dict[tuple[Node, str], float] = {}
        # Time in ms that the server's clock is ahead.
        self.ahead_ms = 0
        self._limits = limits or QueueLimits()
        self._chance = chance
        self._network = network
        self._saved: _Data | None = None
        self._saved_ms = 0
        self._woken = asyncio.Event()
        self.data = _Data(self._limits)

    @property
    def now_ms(self) -> int:
        """Return the server's own time."""
        return self.ms_of(asyncio.get_running_loop().time()) + self.ahead_ms

    @staticmethod
    def ms_of(time_s: float) -> int:
        """Return the time of a right clock at a time of the loop."""
        return 1_700_000_000_000 + round(time_s * 1e3)

    def wipe(self) -> None:
        """Remove all data."""
        self.losses.append((self.now_ms, self.now_ms))
        self.data = _Data(self._limits, self.now_ms)

    def read_usage(self) -> None:
        """Take the events of the stream; of two with the same id the larger counts."""
        for name, tokens, accounts in self.data.ledger.take_events():
            self.events[name] = max(
                self.events.get(name, (0, accounts)), (tokens, accounts), key=lambda event: event[0]
            )

    def restart(self) -> None:
        """Start again, with the data."""
        self.down = False
        self.run += 1

    def save(self) -> None:
        """Keep what a replica has that lags from now on."""
        self._saved, self._saved_ms = copy.deepcopy(self.data), self.now_ms

    def roll_back(self) -> None:
        """A failover to that replica."""
        if self._saved is not None:
            self.losses.append((self._saved_ms, self.now_ms))
            self.data, self._saved = self._saved, None
        self.run += 1

    async def call(self, work: Callable[[], T]) -> T:
        """Carry something out at the server, even if the caller is cancelled meanwhile, as broker.batched_script does.

        Raises RedisConnectionError.
        """
        outcome = await asyncio.shield(asyncio.get_running_loop().create_task(self._outcome(work)))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _outcome(self, work: Callable[[], T]) -> T | Exception:
        """Return the answer, or an error that nobody may be left to hear of."""
        for retry in range(_RETRIES + 1):
            try:
                return await self._try(work)
            except RedisConnectionError as error:
                if retry == _RETRIES:
                    return error
                await asyncio.sleep(_RETRY_S * 2**retry)
            except Exception as error:
                return error
        raise AssertionError

    async def _try(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(self._network.delay_s() + self.slow_s)
        if self._is_away():
            raise RedisConnectionError("refused")
        result = await self.node.start(self._carry_out(work))
        await asyncio.sleep(self._network.delay_s() + self.slow_s)
        if self._is_away():
            raise RedisConnectionError("the answer was lost")
        return result

    def _is_away(self) -> bool:
        """Tell whether the process that calls does not reach it now."""
        return self.down or NODE.get() in self.cut_off

    async def _carry_out(self, work: Callable[[], T]) -> T:
        return work()

    def wake_all(self) -> None:
        """There may be work."""
        self._woken.set()
        self._woken = asyncio.Event()

    async def work_within(self, timeout_s: float) -> bool:
        """Tell whether there may be work, waiting for it for a while."""
        if self._is_away():
            raise RedisConnectionError("refused")
        woken = self._woken
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(woken.wait(), timeout_s)
        return woken.is_set()
