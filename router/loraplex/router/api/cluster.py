"""The gRPC service for operators: workers, queues, jobs, traffic, and commands about workers and adapters."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from dataclasses import asdict, dataclass

from prometheus_client import Counter as Total
from prometheus_client import Histogram
from redis.exceptions import OutOfMemoryError

from loraplex.cluster.v1 import cluster_pb2 as pb
from loraplex.cluster.v1 import cluster_pb2_grpc
from loraplex.contracts.broker.commands import COMMAND_TTL_MS, DRAIN, Command, PinnedAdapters, Verb
from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.messages import AdapterRequest, DeadJob, WorkerPhase, WorkerState
from loraplex.router.api.cells import CellCommands
from loraplex.router.catalog.adapters import check_fitness, check_rank
from loraplex.router.catalog.models import Living, ModelCell, Models, ServedModel, asking_redis, redis_is_silent
from loraplex.router.catalog.store_client import ResolvedAdapter, StoreClient
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.outbox import redis_full
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.generation.resume import ResumeKeys
from loraplex.router.metrics import RouterMetrics
from loraplex.router.purge import CellPurge, purged_tenant
from loraplex.runtime.rpc.errors import Exhausted, InvalidField, Mismatch, NotFound, Unavailable
from loraplex.runtime.rpc.interceptors import Context
from loraplex.runtime.rpc.principal import caller, calling_tenant

log = logging.getLogger(__name__)

# Maximum number of tenants that pin the same bytes: each has a record in Redis, which workers read when they start.
PIN_TENANTS = 64
# Maximum number of warms of one tenant within so many seconds, the time that a command waits for its worker.
WARMS = 64
_WARMS_S = COMMAND_TTL_MS / 1e3


class AdapterCommands:
    """Sends the commands of operators; an adapter's name becomes a revision here, as in a request."""

    def __init__(self, models: Models, store: StoreClient) -> None:
        self._models = models
        self._store = store
        self._warms = _WarmRate()

    async def send(self, verb: Verb, tenant: str, name: str, worker_id: str) -> None:
        """Send a command to one worker, or to all of the adapter's base; a pin on all holds for later workers too.

        Raises InvalidField, NotFound, Mismatch, Exhausted or Unavailable.
        """
        if not name:
            raise InvalidField("adapter", "name an adapter")
        resolved = await self._store.resolve(tenant, name)
        if verb is Verb.WARM:
            self._warms.take(tenant)
        request = AdapterRequest(resolved.ref, tenant)
        try:
            if verb is not Verb.UNPIN:
                await self._check(verb, resolved, request, worker_id)
            if not worker_id and verb is not Verb.WARM:
                # Before the look at live workers: a worker that starts meanwhile is seen, or reads the pin itself.
                self._check_cells_answer()
                for pins in self._pins_of(resolved):
                    await (pins.pin(request) if verb is Verb.PIN else pins.unpin(request.adapter))
            for _, cell, state in await self._workers(resolved, worker_id):
                if verb is Verb.UNPIN or resolved.ref.rank <= state.max_rank:
                    await cell.queue.commands.send(state.incarnation, Command(verb, request))
        except OutOfMemoryError as error:
            raise redis_full(
                "Redis is out of memory: it cannot keep the pin; raise its maxmemory, or try again"
            ) from error
        except REDIS_DOWN as error:
            raise Unavailable("Redis does not answer", reason="QUEUE_DOWN") from error

    async def _check(self, verb: Verb, resolved: ResolvedAdapter, request: AdapterRequest, worker_id: str) -> None:
        workers = await self._workers(resolved, worker_id)
        for model, _, _ in workers:
            check_fitness(resolved, model.manifest)
        states = [state for _, _, state in workers]
        if verb is Verb.WARM and not states:
            raise Unavailable("no worker of the adapter's base model lives", reason="NO_WORKER")
        check_rank(resolved.ref, max((state.max_rank for state in states), default=None))
        if verb is Verb.PIN and states:
            most = max(state.slots_total for state in states) - 1
            for pins in self._pins_of(resolved):
                _check_slots(request, await pins.list(), most)

    def _models_of(self, resolved: ResolvedAdapter) -> list[ServedModel]:
        known = (model for live in self._models.served for model in self._models.revisions(live.manifest.name))
        models = [model for model in known if model.manifest.adapted_digest == resolved.base_digest]
        if not models:
            raise Mismatch(resolved.ref.revision, "made for a base model that is not served here", reason="WRONG_BASE")
        return models

    def _check_cells_answer(self) -> None:
        """Raise Unavailable where a cell is away: its pins would differ from the others'."""
        for model in self._models.served:
            reached = {cell.name for cell in self._models.reached(model)}
            if silent := sorted(model.cells.keys() - reached):
                raise redis_is_silent(silent)

    def _pins_of(self, resolved: ResolvedAdapter) -> list[PinnedAdapters]:
        """Return the pins of each cell of each model, which its revisions share."""
        models = {model.manifest.name: model for model in self._models_of(resolved)}.values()
        return [cell.queue.pins for model in models for cell in model.cells.values()]

    async def _workers(
        self, resolved: ResolvedAdapter, worker_id: str
    ) -> list[tuple[ServedModel, ModelCell, WorkerState]]:
        """Return the live workers with the adapter's base; only the named one, if a name is given."""
        of = {(model.manifest.name, model.manifest.digest): model for model in self._models_of(resolved)}
        found = await self._models.living()
        living = named_worker(found, worker_id) if worker_id else found.workers
        keys = (((model.manifest.name, state.base_digest), cell, state) for model, cell, state in living)
        workers = [(of[key], cell, state) for key, cell, state in keys if key in of]
        if worker_id and not workers:
            raise Mismatch(
                resolved.ref.revision, f"made for another base model than worker {worker_id}'s", reason="WRONG_BASE"
            )
        return workers


def named_worker(living: Living, worker_id: str) -> list[tuple[ServedModel, ModelCell, WorkerState]]:
    """Return the incarnations of a worker. Raises NotFound, or Unavailable where it may be in a silent cell."""
    if named := [place for place in living.workers if place[2].worker_id == worker_id]:
        return named
    if living.silent:
        raise redis_is_silent(living.silent)
    raise NotFound("worker", worker_id)


class _WarmRate:
    """Counts the warms of each tenant: a worker's queue of commands is short, and drops the oldest."""

    def __init__(self) -> None:
        self._sent: dict[str, deque[float]] = {}

    def take(self, tenant: str) -> None:
        """Count a warm. Raises Exhausted for one too many."""
        now = time.monotonic()
        self._sent = {name: sent for name, sent in self._sent.items() if now - sent[-1] < _WARMS_S}
        sent = self._sent.setdefault(tenant, deque(maxlen=WARMS))
        if len(sent) == WARMS and (left_s := sent[0] + _WARMS_S - now) > 0:
            message = f"{tenant} has warmed {WARMS} adapters within {_WARMS_S:g} s"
            raise Exhausted(f"tenants/{tenant}/warms", message, retry_after_s=left_s, reason="WARMS_FULL")
        sent.append(now)


def _check_slots(request: AdapterRequest, pinned: list[AdapterRequest], most: int) -> None:
    """Raise Mismatch where every worker would refuse a pin, too many have it, or the tenant would have too many.

    `most` is how many the largest worker keeps.
    """
    ref = request.adapter
    tenants = {pin.tenant for pin in pinned if pin.adapter.digest == ref.digest}
    if tenants:  # it is pinned already, and stays so for them
        if request.tenant not in tenants and len(tenants) >= PIN_TENANTS:
            message = f"{len(tenants)} tenants have pinned it, the maximum; it is on all workers"
            raise Mismatch(ref.revision, message, reason="PIN_SHARED")
        return
    others = {pin.adapter.digest for pin in pinned}
    own = len({pin.adapter.digest for pin in pinned if pin.tenant == request.tenant})
    if len(others) < most <= len(others) + own:
        raise Mismatch(
            ref.revision,
            f"{request.tenant} has pinned {own} adapters, and {most - len(others)} more can be pinned, by other "
            "tenants only; unpin one",
            reason="SLOTS_SHARED",
        )
    if len(others) >= most:
        raise Mismatch(
            ref.revision,
            f"{len(others)} adapters are pinned on all workers, which keep at most {most}; unpin one",
            reason="SLOTS_PINNED",
        )


Whose = tuple[str, str]


class Traffic:
    """Sums one router's metrics over their labels."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._began = time.monotonic()

    def response(self, open_requests: int) -> pb.GetTrafficResponse:
        """Return the totals now."""
        metrics = self._metrics
        return pb.GetTrafficResponse(
            uptime=time.monotonic() - self._began,
            open=open_requests,
            requests={labels["code"]: int(value) for labels, value in _values(metrics.requests)},
            prompt_tokens=_total(metrics.prompt_tokens),
            completion_tokens=_total(metrics.generation_tokens),
            time_to_first_token=_distribution(metrics.ttft),
            inter_token_latency=_distribution(metrics.itl),
            queue_time=_distribution(metrics.queue_time),
            redispatches=_total(metrics.redispatches),
            workers_lost=_total(metrics.workers_lost),
            adapters=self._adapters(),
        )

    def _adapters(self) -> list[pb.AdapterTraffic]:
        metrics = self._metrics
        traffics: dict[Whose, pb.AdapterTraffic] = {}
        for labels, value in _values(metrics.tenant_requests):
            whose = (labels["tenant"], labels["adapter"])
            traffics[whose] = pb.AdapterTraffic(tenant=whose[0], adapter=whose[1], requests=int(value))
        for name, counter in (
            ("prompt_tokens", metrics.tenant_prompt_tokens),
            ("completion_tokens", metrics.tenant_generation_tokens),
            ("time_to_first_token", metrics.tenant_ttft),
        ):
            for labels, value in _values(counter):
                # An adapter that was counted after the requests were read comes with the next answer.
                traffic = traffics.get((labels["tenant"], labels["adapter"]))
                if traffic is not None:
                    setattr(traffic, name, value if name == "time_to_first_token" else int(value))
        return list(traffics.values())


def _values(counter: Total) -> list[tuple[dict[str, str], float]]:
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return [(sample.labels, sample.value) for sample in samples if sample.name.endswith("_total")]


def _total(counter: Total) -> int:
    return int(sum(value for _, value in _values(counter)))


def _distribution(histogram: Histogram) -> pb.Distribution:
    """Sum a histogram over its labels. Prometheus's buckets are cumulative; the last has no bound."""
    upto: dict[float, float] = defaultdict(float)
    total = 0.0
    for metric in histogram.collect():
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                upto[float(sample.labels["le"])] += sample.value
            elif sample.name.endswith("_sum"):
                total += sample.value
    bounds = sorted(upto)
    counts = [int(upto[bound] - (upto[bounds[at - 1]] if at else 0.0)) for at, bound in enumerate(bounds)]
    return pb.Distribution(bounds=bounds[:-1], counts=counts, sum=total)


_PHASES = {phase: pb.WorkerPhase.Value(f"WORKER_PHASE_{phase.name}") for phase in WorkerPhase}


@dataclass(eq=False)
class ClusterService(cluster_pb2_grpc.ClusterServiceServicer):
    """Serves loraplex.cluster.v1.ClusterService."""

    models: Models
    dispatcher: Dispatcher
    metrics: RouterMetrics
    commands: AdapterCommands
    purge: CellPurge
    resume_keys: ResumeKeys
    cells: CellCommands

    def __post_init__(self) -> None:
        """Count traffic from now on."""
        self._traffic = Traffic(self.metrics)

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Context) -> pb.ListWorkersResponse:
        """List the live workers of all models, as they last reported."""
        living = (await self.models.living()).workers
        return pb.ListWorkersResponse(workers=[worker_message(state, cell.name) for _, cell, state in living])

    async def ListQueues(self, request: pb.ListQueuesRequest, context: Context) -> pb.ListQueuesResponse:
        """List what waits, for how long, and how many jobs run, by model and cell."""
        return pb.ListQueuesResponse(queues=await self.cells.queues())

    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsResponse:
        """List the jobs that this router owns, of those tenants whose jobs the caller may see."""
        who = caller()
        return pb.ListJobsResponse(
            jobs=[_job(routed) for routed in self.dispatcher.jobs if who.sees_tenant(routed.job.tenant)]
        )

    async def ListDeadJobs(self, request: pb.ListDeadJobsRequest, context: Context) -> pb.ListDeadJobsResponse:
        """List the last jobs that were ended because they killed engines, the newest first."""
        dead: list[DeadJob] = []
        with asking_redis():
            for model in self.models.served:
                for cell in self.models.reached(model):
                    dead += await cell.queue.dead.list()
        dead.sort(key=lambda job: job.died_at_ms, reverse=True)
        who = caller()
        return pb.ListDeadJobsResponse(jobs=[dead_job_message(job) for job in dead if who.sees_tenant(job.tenant)])

    async def ListQuarantine(self, request: pb.ListQuarantineRequest, context: Context) -> pb.ListQuarantineResponse:
        """List the tenants and adapters whose jobs are refused, of those tenants whose jobs the caller may see."""
        who, subjects = caller(), list[pb.QuarantinedSubject]()
        with asking_redis():
            for model in self.models.served:
                name, longest = model.manifest.name, dict[Whose, int]()
                for cell in self.models.reached(model):
                    for whose, left_ms in (await cell.queue.quarantined()).items():
                        longest[whose] = max(left_ms, longest.get(whose, 0))
                subjects += [
                    pb.QuarantinedSubject(model=name, tenant=tenant, adapter=digest, left=left_ms / 1e3)
                    for (tenant, digest), left_ms in longest.items()
                    if who.sees_tenant(tenant)
                ]
        return pb.ListQuarantineResponse(subjects=subjects)

    async def LiftQuarantine(self, request: pb.LiftQuarantineRequest, context: Context) -> pb.LiftQuarantineResponse:
        """Take a tenant's jobs again, for all models."""
        tenant = purged_tenant(request.tenant)
        with asking_redis():
            cells = [cell for model in self.models.served for cell in model.cells.values()]
            removed = [await cell.queue.lift_quarantine(tenant) for cell in cells]
        return pb.LiftQuarantineResponse(removed_count=sum(removed))

    async def RotateResumeKeys(
        self, request: pb.RotateResumeKeysRequest, context: Context
    ) -> pb.RotateResumeKeysResponse:
        """Make a new key of resume tokens."""
        with asking_redis():
            return pb.RotateResumeKeysResponse(valid_count=await self.resume_keys.rotate())

    async def WithdrawResumeKeys(
        self, request: pb.WithdrawResumeKeysRequest, context: Context
    ) -> pb.WithdrawResumeKeysResponse:
        """Remove the former keys of resume tokens."""
        with asking_redis():
            return pb.WithdrawResumeKeysResponse(removed_count=await self.resume_keys.withdraw())

    async def GetTraffic(self, request: pb.GetTrafficRequest, context: Context) -> pb.GetTrafficResponse:
        """Return what this router has served since its start."""
        return self._traffic.response(len(tuple(self.dispatcher.jobs)))

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        """Make a worker drain and stop, as SIGTERM does."""
        if not request.worker_id:
            raise InvalidField("worker_id", "name a worker")
        named = named_worker(await self.models.living(), request.worker_id)
        with asking_redis():
            for _, cell, state in named:
                await cell.queue.commands.send(state.incarnation, DRAIN)
        return pb.DrainWorkerResponse()

    async def DrainCell(self, request: pb.DrainCellRequest, context: Context) -> pb.DrainCellResponse:
        """Send no more jobs to a cell; what waits there goes to others."""
        await self.cells.drain(request.cell)
        return pb.DrainCellResponse()

    async def OpenCell(self, request: pb.OpenCellRequest, context: Context) -> pb.OpenCellResponse:
        """Send jobs to a cell again."""
        return pb.OpenCellResponse(pins=await self.cells.open(request.cell))

    async def WarmAdapter(self, request: pb.WarmAdapterRequest, context: Context) -> pb.WarmAdapterResponse:
        """Load an adapter on every worker of its base, or on the named one."""
        await self.commands.send(Verb.WARM, calling_tenant(), request.adapter, request.worker_id)
        return pb.WarmAdapterResponse()

    async def PinAdapter(self, request: pb.PinAdapterRequest, context: Context) -> pb.PinAdapterResponse:
        """Load an adapter and keep it loaded; without a worker's name also on workers that start later."""
        await self.commands.send(Verb.PIN, calling_tenant(), request.adapter, request.worker_id)
        return pb.PinAdapterResponse()

    async def PurgeTenant(self, request: pb.PurgeTenantRequest, context: Context) -> pb.PurgeTenantResponse:
        """Remove what this router's cells have of a tenant."""
        tenant = purged_tenant(request.tenant)
        places = await self.purge.run(tenant)
        log.info("%s: purged tenant %s from the cells", caller().name, tenant)
        return pb.PurgeTenantResponse(
            places=places,
            removed_count=sum(place.removed for place in places),
            left_count=sum(place.left for place in places),
            error_count=sum(bool(place.error) for place in places),
        )

    async def UnpinAdapter(self, request: pb.UnpinAdapterRequest, context: Context) -> pb.UnpinAdapterResponse:
        """Allow a pinned adapter to be evicted again."""
        await self.commands.send(Verb.UNPIN, calling_tenant(), request.adapter, request.worker_id)
        return pb.UnpinAdapterResponse()


def worker_message(state: WorkerState, cell: str) -> pb.Worker:
    """Convert the state of a worker in a cell."""
    return pb.Worker(
        cell=cell,
        worker_id=state.worker_id,
        incarnation=state.incarnation,
        phase=_PHASES[state.phase],
        model=state.model,
        rows_running=state.rows_running,
        rows_waiting=state.rows_waiting,
        rows_limit=state.rows_limit,
        blocks=pb.Blocks(
            total=state.blocks_total,
            free=state.blocks_free,
            cached=state.blocks_cached,
            referenced=state.blocks_referenced,
        ),
        adapter_slots=pb.AdapterSlots(total=state.slots_total, used=state.slots_used, pinned=state.slots_pinned),
        adapter_tiers=pb.AdapterTiers(**asdict(state.tiers)),
        adapters=state.adapters,
        steps=state.steps,
        host=state.host,
        pid=state.pid,
        engine_pid=state.engine_pid,
        base_digest=state.base_digest,
        adapter_sets=[
            pb.AdapterSet(
                digest=digest,
                parts=[pb.WeightedRevision(digest=part, weight=weight) for part, weight in parts],
            )
            for digest, parts in state.sets.items()
        ],
    )


def _job(routed: RoutedJob) -> pb.Job:
    job = routed.job
    return pb.Job(
        job_id=job.job_id,
        tenant=job.tenant,
        adapter_revision=job.adapter.revision if job.adapter else "",
        attempt=job.attempt,
        worker_id=routed.link.worker_id if routed.link else "",
        prompt_tokens=len(job.prompt_ids),
        completion_tokens=routed.emitted_tokens,
        request_id=job.request_id,
        model=job.model,
        strikes=job.strikes,
        age=time.monotonic() - routed.admitted_at,
        cell=routed.placement.cell,
    )


def dead_job_message(dead: DeadJob) -> pb.DeadJob:
    """Convert a dead letter; all fields but the time have the same names."""
    fields = asdict(dead)
    died_at_ms = fields.pop("died_at_ms")
    message = pb.DeadJob(**fields)
    message.died_at.FromMilliseconds(died_at_ms)
    return message
