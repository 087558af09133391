"""A run: a cluster, its clients and its faults, all drawn from one seed; and what was wrong with it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import grpc

from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import Job
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import PROMPT_WEIGHT
from loraplex.contracts.grammars.prover import Prover
from loraplex.router.dispatch import routed_job
from loraplex.router.dispatch.links import Frame, WorkerLink
from loraplex.router.dispatch.outbox import MIB
from loraplex.worker.engine.scheduling.loader_threads import LoaderThreads
from loraplex.worker.io import results
from loraplex.worker.io.engine_client import EngineProcess
from loraplex.worker.io.settings import WorkerSettings
from tests.simulation import engine
from tests.simulation.acts import act
from tests.simulation.channels import Channels
from tests.simulation.charges import Charges
from tests.simulation.clients import ask
from tests.simulation.faults import ACTS, FORGETTING, Cluster, Fault, Kind, happen
from tests.simulation.invariants import Attempts, Shares, service_bound
from tests.simulation.key_shares import KeyShares
from tests.simulation.loop import replaced, virtual_time
from tests.simulation.network import Network
from tests.simulation.queue import SimulatedQueue
from tests.simulation.redis import SimulatedRedis
from tests.simulation.router import MIB_TOKENS, SimulatedRouter, SimulatedStore
from tests.simulation.scenario import MODEL, Scenario, draw
from tests.simulation.stories import End, Story
from tests.simulation.worker import SimulatedFetcher, SimulatedWorker, start_engine

# A request that has not ended by then never does; and so long after the last one everything must be free.
PATIENCE_S, QUIET_S = 120.0, 8.0
# Maximum tokens of a read and of a hand-over to the engine, so few that most resumed answers take several.
READ_TOKENS = STEP_IDS = 7
_REPLACED = (
    (JobQueue, SimulatedQueue),
    (LoaderThreads, engine.VirtualLoads),
    (Prover, engine.InlineProver),
)


@dataclass
class Outcome:
    """`wrong` is empty where every invariant held. `trace` is the same for the same seed."""

    scenario: Scenario
    wrong: list[str] = field(default_factory=list)
    ends: dict[End, int] = field(default_factory=dict)
    tokens: int = 0
    attempts: int = 0
    resumes: int = 0
    seconds: float = 0.0
    # Of each request that got a token, from its start.
    ttft_s: list[float] = field(default_factory=list)
    # Of the refusals after which clients asked again.
    reasons: set[str] = field(default_factory=set)
    difference: float = 0.0
    # Number of comparisons of two API keys' work.
    keys_compared: int = 0
    trace: list[str] = field(default_factory=list)
    fired: list[Kind] = field(default_factory=list)

    def __str__(self) -> str:
        faults = "".join(f"\n    {fault}" for fault in self.scenario.faults)
        return f"seed {self.scenario.seed}:{faults}" + "".join(f"\n  - {line}" for line in self.wrong)


def simulate(seed: int) -> Outcome:
    """Run a seed."""
    return simulate_scenario(draw(seed))


def simulate_scenario(scenario: Scenario) -> Outcome:
    """Run a scenario; its seed decides of the delays."""
    chance = Random(scenario.seed)
    with _exceptions_logged() as logged:
        with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
            directory = Path(name)
            for file in (CONFIG_FILE, WEIGHTS_FILE):
                (directory / file).write_bytes(b"{}")
            network = Network(chance)
            with (
                replaced(_REPLACED),
                mock.patch.object(EngineProcess, "start", start_engine),
                mock.patch.object(grpc.aio, "insecure_channel", Channels(network)),
                mock.patch.object(routed_job, "READ_TOKENS", READ_TOKENS),
                mock.patch.object(results, "STEP_IDS", STEP_IDS),
                virtual_time(chance) as loop,
            ):
                loop.set_exception_handler(lambda _, context: logged.append(_describe(context)))
                outcome = loop.run_until_complete(_run(scenario, chance, network, directory))
                # The end of a run may cause errors.
                outcome.wrong += logged
        return outcome


@contextlib.contextmanager
def _exceptions_logged() -> Iterator[list[str]]:
    """Collect the exceptions that the product logs; lesser records are not even made."""
    root, handler = logging.getLogger(), _Exceptions()
    root.addHandler(handler)
    logging.disable(logging.WARNING)
    try:
        yield handler.found
    finally:
        logging.disable(logging.NOTSET)
        root.removeHandler(handler)


def _describe(context: Mapping[str, Any]) -> str:
    """Describe an error that nobody handles, as asyncio reports it."""
    return f"{context['message']}: {context.get('exception')!r} in {context.get('task') or context.get('future')}"


class _Exceptions(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            line = f"logged by {record.name}: {record.getMessage()}: {record.exc_info[1]!r}"
            if line not in self.found:
                self.found.append(line)


async def _run(scenario: Scenario, chance: Random, network: Network, directory: Path) -> Outcome:
    return await _Run(scenario, chance, network, directory).run()


async def _all_ended(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks)


class _Run:
    def __init__(self, scenario: Scenario, chance: Random, network: Network, directory: Path) -> None:
        engine.VirtualLoads.chance = chance
        self._scenario = scenario
        self._network = network
        self._outcome = Outcome(scenario)
        base = read_base_model(MODEL)
        self._cells = [
            SimulatedRedis(chance, network, Keys(base.name, name), scenario.limits)
            for name in ("main", "second")[: scenario.cells]
        ]
        self._redis = self._cells[0]
        for redis in self._cells:
            redis.seal_s = scenario.seal_s
            redis.enqueued, redis.claimed = self._enqueued, self._claimed
        self._attempts = Attempts()
        self._shares = Shares(self._redis, {"one": 1.0, "two": 1.0, "three": 1.0})
        self._key_shares = KeyShares(self._redis)
        self._redis.scanned = self._key_shares.look
        quotas = directory / "plans.toml"
        quotas.write_text(scenario.quotas)
        keys = {plan.key for plan in scenario.plans if plan.key}
        self._store = SimulatedStore(base, scenario.adapters, keys, scenario.accounts)
        self._routers = [
            SimulatedRouter(f"router-{number}", self._store, self._cells, network, self._accepted, quotas)
            for number in range(scenario.routers)
        ]
        self._workers = [
            SimulatedWorker(
                f"worker-{number}",
                WorkerSettings(
                    model=scenario.model,
                    store="",
                    redis_url="",
                    worker_id=f"worker-{number}",
                    cell=self._cells[number % scenario.cells].cell.cell,
                    rows=scenario.rows,
                    kv_blocks=scenario.kv_blocks,
                    adapter_slots=2,
                    step_tokens=64,
                    drain_s=1.0,
                ),
                self._cells[number % scenario.cells],
                network,
                SimulatedFetcher(chance, base, directory),
            )
            for number in range(scenario.workers)
        ]

    async def run(self) -> Outcome:
        """Run the cluster, its clients and its faults to the end."""
        loop, outcome, scenario = asyncio.get_running_loop(), self._outcome, self._scenario
        stories = [Story(plan) for plan in scenario.plans]
        cluster = Cluster(self._workers, self._routers, self._cells, self._network, self._store)
        faults = [asyncio.create_task(self._fault(fault, cluster)) for fault in scenario.faults]
        watching = [asyncio.create_task(self._network.watch()), asyncio.create_task(self._watch_processes())]
        asking = [asyncio.create_task(ask(story, self._routers, self._network)) for story in stories]
        all_ended = asyncio.create_task(_all_ended([*asking, *faults]))
        await asyncio.wait({all_ended, *watching}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        outcome.seconds = loop.time()
        for ended in (task for task in (all_ended, *watching) if task.done()):
            ended.result()
        await asyncio.sleep(QUIET_S)
        for number, story in enumerate(stories):
            outcome.wrong += [f"request {number}: {line}" for line in story.check()]
            outcome.trace.append(f"{story.ends} {story.transcript.ids} {story.resumes}")
            for end in story.ends:
                outcome.ends[end] = outcome.ends.get(end, 0) + 1
        outcome.tokens = sum(story.transcript.tokens for story in stories)
        outcome.ttft_s = [story.ttft_s for story in stories if story.ttft_s is not None]
        outcome.reasons = {reason for story in stories for reason in story.reasons}
        outcome.resumes = sum(story.resumes for story in stories)
        outcome.attempts, outcome.difference = self._attempts.attempts, self._shares.difference
        outcome.keys_compared = self._key_shares.compared
        outcome.wrong += (
            self._attempts.faults + self._key_shares.faults + self._store.faults + self._unfair() + self._left()
        )
        if (expired := sum(redis.seals_expired for redis in self._cells)) and not scenario.faults:
            outcome.wrong.append(f"{expired} seals expired of jobs that waited for their turn")
        if scenario.quotas:
            outcome.wrong += Charges(self._redis, self._routers[0].plans, scenario.faults).check(stories)
        return outcome

    async def _watch_processes(self) -> None:
        """Raise the error of a process that fails, which is a bug; never returns."""
        while True:
            await asyncio.sleep(1.0)
            for task in (
                *(worker.running for worker in self._workers),
                *(t for r in self._routers for t in r.failed()),
            ):
                if task.done():
                    task.result()

    async def _fault(self, fault: Fault, cluster: Cluster) -> None:
        if await (act if fault.kind in ACTS else happen)(fault, cluster):
            self._outcome.fired.append(fault.kind)
        if fault.kind in FORGETTING:
            self._shares.forget()

    def _enqueued(self, job: Job, leads: bool) -> None:
        self._outcome.trace.append(f"{asyncio.get_running_loop().time():.6f} {job.job_id} {job.attempt}")
        self._attempts.enqueued(job, leads=leads)
        self._shares.look()
        self._key_shares.enqueued(job)

    def _claimed(self, job: Job, resident: str) -> None:
        self._attempts.claimed(job)
        self._shares.claimed(job, resident)
        self._key_shares.claimed(job)

    def _accepted(self, link: WorkerLink, frame: Frame, tokens: int) -> None:
        self._attempts.accepted(link, frame)
        self._shares.made(frame.job_id.partition("/")[0], tokens)

    def _unfair(self) -> list[str]:
        """Check the bound on the difference of two tenants' service."""
        scenario, plans = self._scenario, self._scenario.plans
        if not scenario.backlog or any(fault.kind not in FORGETTING for fault in scenario.faults):
            return []
        longest = max(len(plan.request.prompt) for plan in plans if isinstance(plan.request.prompt, tuple))
        answer = max(len(plan.expected.choices[0].uncut) for plan in plans)
        load = max(ref.weight_bytes for ref in scenario.adapters.values()) / MIB * MIB_TOKENS
        bound = service_bound(PROMPT_WEIGHT * longest + load, answer, scenario.workers * scenario.rows)
        found = self._shares.difference
        return [f"the service of two tenants differs by {found:g}, bound {bound}"] if found > bound else []

    def _left(self) -> list[str]:
        """Return what is still held though nobody asks for anything."""
        left = []
        waiting = sum(redis.waiting for redis in self._cells)
        if waiting:
            left.append(f"{waiting} jobs wait in the queue")
        for router in self._routers:
            if list(router.dispatcher.jobs):
                left.append(f"{router.name} has {len(list(router.dispatcher.jobs))} jobs")
            left += [f"{router.name}: {task} has ended" for task in router.failed()]
        for worker in self._workers:
            stats = worker.engine.engine.stats() if worker.engine else None
            if worker.running.done():
                left.append(f"{worker.name} has ended: {worker.running}")
            if stats is None or stats.rows_running + stats.rows_waiting + stats.blocks_referenced + stats.slots_pinned:
                left.append(f"{worker.name} still holds {stats}")
            if worker.fetcher.pins:
                left.append(f"{worker.name} still pins {worker.fetcher.pins} adapters")
        return left
