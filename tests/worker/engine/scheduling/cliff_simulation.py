"""A closed loop of requests for many adapters on few slots: the real scheduler and cache, virtual time, no threads."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine.scheduling.adapter_cache import AdapterCache, SwapBudget
from loraplex.worker.engine.scheduling.batch import Batch
from loraplex.worker.engine.scheduling.loader_threads import LoaderThreads
from loraplex.worker.engine.scheduling.scheduler import Scheduler
from loraplex.worker.engine_api import AdapterSource, EngineLimits, NewSequence

SLOTS = 32
ROWS = 32
IN_FLIGHT = 64
# In steps: reading an adapter from files, beside the batch, and copying it into a slot, between two steps.
READ = 3.0
INSTALL = 0.1
LENGTHS = (8, 64)
MEAN_TOKENS = (LENGTHS[0] + LENGTHS[1] - 1) / 2


class VirtualMemory(LoaderThreads[str]):
    """Adapter memory and loads that take virtual time. An adapter is its digest and has one byte."""

    transfers = False

    def __init__(self) -> None:
        self.most = 4
        self.now = 0.0
        self._under_way: list[tuple[float, str, Callable[[], str]]] = []

    def start(self, digest: str, work: Callable[[], str]) -> None:
        self._under_way.append((self.now + READ, digest, work))

    def has_ended(self) -> bool:
        return any(at <= self.now for at, _, _ in self._under_way)

    def ended(self) -> list[tuple[str, str | Exception]]:
        ended = [(digest, work()) for at, digest, work in self._under_way if at <= self.now]
        self._under_way = [load for load in self._under_way if load[0] > self.now]
        return list(ended)

    def close(self) -> None:
        pass

    def read(self, source: AdapterSource) -> str:
        return source.digest

    def transfer(self, prepared: str) -> str:
        return prepared

    def install(self, prepared: str, slot: int) -> None:
        self.now += INSTALL

    def size(self, prepared: str) -> int:
        return 1


@dataclass
class Asked:
    """A request: when it came, and when its first token did."""

    number: int
    digest: str
    came: float
    passed_over: int = 0
    first: float = -1.0


@dataclass
class Result:
    """Of the requests that came after the warm-up. Times are in steps."""

    tokens_per_step: float
    waits: list[float]
    passed_over_most: int
    swaps: int
    unserved: int


@dataclass
class Simulation:
    """`next_adapter` draws what each request asks for; lengths are those of bench.adapters."""

    seed: int
    requests: int
    next_adapter: Callable[[random.Random], str]
    host: int = 2000
    slots: int = SLOTS
    in_flight: int = IN_FLIGHT
    waiting: dict[str, Asked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = VirtualMemory()
        self.cache: AdapterCache[str] = AdapterCache(
            self.slots, self.memory, self.memory, self.host, SwapBudget(lambda: self.memory.now)
        )
        limits = EngineLimits(
            rows=ROWS, max_tokens=128, max_rank=8, vocab_size=2, block_size=16, blocks=1024, adapter_slots=self.slots
        )
        self.scheduler = Scheduler(limits, [], 512, self.cache)
        self.random = random.Random(self.seed)
        self.asked: list[Asked] = []

    def run(self) -> Result:
        tokens, ended, began, swaps = 0, 0, 0.0, 0
        warm = self.requests // 3
        for _ in range(self.in_flight):
            self._ask()
        for _ in range(100 * self.requests):
            if ended >= self.requests:
                break
            outputs = self.scheduler.take_arrivals()
            lacking = {asked.number for asked in self.waiting.values() if asked.digest in self.cache.demand.lacking}
            batch = self.scheduler.schedule()
            self._admit(batch, lacking)
            self.memory.now += 1.0
            if batch:
                outputs += self.scheduler.commit(batch, [1 for row in batch.rows if row.samples])
            for output in outputs:
                asked = self.asked[int(output.sequence_id)]
                tokens += len(output.token_ids)
                if asked.first < 0:
                    asked.first = self.memory.now
                if output.finish:
                    ended += 1
                    if ended == warm:
                        tokens, began, swaps = 0, self.memory.now, self.cache.tiers.swaps
                    if len(self.asked) < self.requests:
                        self._ask()
        return Result(
            tokens / (self.memory.now - began),
            [asked.first - asked.came for asked in self.asked[warm:] if asked.first >= 0],
            max(asked.passed_over for asked in self.asked),
            self.cache.tiers.swaps - swaps,
            self.requests - ended,
        )

    def _ask(self) -> None:
        number = len(self.asked)
        digest = self.next_adapter(self.random)
        name = str(number)
        self.asked.append(Asked(number, digest, self.memory.now))
        self.waiting[name] = self.asked[-1]
        prompt = tuple(self.random.randrange(2) for _ in range(self.random.randrange(*LENGTHS)))
        stopping = StoppingParams(max_tokens=self.random.randrange(*LENGTHS), ignore_eos=True)
        self.scheduler.add_sequence(
            NewSequence(name, prompt, adapter=AdapterSource(digest, "/"), stopping=stopping, tenant=name)
        )

    def _admit(self, batch: Batch | None, lacking: set[int]) -> None:
        """Count who passed over each that waits; `lacking` only a slot were these, before anyone was admitted."""
        names = [row.sequence.sequence_id for row in batch.rows] if batch else []
        admitted = [self.waiting.pop(name).number for name in names if name in self.waiting]
        for asked in self.waiting.values():
            if asked.number in lacking:
                asked.passed_over += sum(number > asked.number for number in admitted)
