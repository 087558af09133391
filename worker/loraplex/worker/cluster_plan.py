"""`loraplex plan --cluster`: the workers, routers and Redis cells of a load, by the figures of a device.

    device time of a request = prompt / prompt rate + answer / answer rate
    workers = the fewest of which each is busy for at most BUSY of its time, and with which the promises are kept:
      token   = (rows / answer rate) / (1 - share of the time that prompts take)
      prompt  = prompt / prompt rate x token promise / (token promise - rows / answer rate)
      first   = wait for a row + wait behind other prompts + prompt

Prompts are computed in what a step of all rows leaves of the promised time between tokens (`--itl-target-ms` of the
worker), one after the other. Waits are 99th percentiles by Erlang's C (Kleinrock, Queueing Systems, 1975), of workers x
rows servers and of one. Lengths are means, and requests come at random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from loraplex.contracts.artifacts.families import KV_CACHE_HELP
from loraplex.contracts.artifacts.quantization import FLAG_HELP as QUANTIZE_HELP
from loraplex.contracts.broker.cells import CELL_JOBS
from loraplex.runtime.rpc.settings import check_bounds, setting
from loraplex.worker.plan import (
    MAX_EXPERT_RANK_HELP,
    MEMORY_HELP,
    TENSOR_PARALLEL_HELP,
    Divide,
    MemoryPlan,
    PlanSettings,
    parse_bytes,
    plan,
    shown,
)

# Maximum share of a worker's time: beyond, jobs begin to wait and miss their adapters (bench.scaling, load 0.9).
BUSY = 0.9
# Slots for each adapter that a worker is home of, with which nine in ten jobs find theirs (bench.scaling: 32 for 20).
SLOTS_AN_ADAPTER = 1.6
# Maximum share of its core that a router process should use; it has one.
ROUTER_BUSY = 0.7
# Processor time in microseconds that a call takes of a router, and each token (bench.calls, bench.relay).
ROUTER_CALL_US, ROUTER_TOKEN_US = 1_399.0, 17.0
_SOURCE = "docs/results/scaling.md"
# Share of requests that keep the promised time to the first token.
_PROMISED = 0.99
# Maximum number of rows of a cluster that is planned.
_MOST_ROWS = 1_000_000


@dataclass(frozen=True)
class LoadSettings:
    """Says how many workers, routers and Redis cells serve a load, what memory they need, and what they cost."""

    model: str = setting("a transformers directory; its headers are enough")
    requests: float = setting("requests a second at the peak", above=0)
    prompt: int = setting("tokens of a prompt, on average", least=1)
    answer: int = setting("tokens of an answer, on average", least=1)
    memory: str = setting(MEMORY_HELP)
    prompt_rate: float = setting("prompt tokens a second of an otherwise idle worker", above=0)
    answer_rate: float = setting("answer tokens a second of a worker with all rows busy", above=0)
    rows: int = setting("rows of a worker while --answer-rate was measured", 64, least=1)
    adapters: int = setting("adapters in use, of all tenants", 64, least=0)
    rank: int = setting("the rank of each, on every linear layer", 16, least=0)
    ttft_ms: float = setting("promised time to the first token in milliseconds, for 99% of the requests", 1000, above=0)
    itl_ms: float = setting("promised mean time between tokens in milliseconds", 50, above=0)
    dtype: str = setting("auto, float32, bfloat16 or float16", "auto")
    quantize: str = setting(QUANTIZE_HELP, "")
    kv_cache_dtype: str = setting(KV_CACHE_HELP, "")
    tensor_parallel: int = setting(f"{TENSOR_PARALLEL_HELP}; the rates are those of all devices together", 1, least=1)
    max_expert_rank: int = setting(MAX_EXPERT_RANK_HELP, 0, least=0)
    price: float = setting("price of a device for an hour", 0, least=0)
    core_price: float = setting("price of a processor core for an hour, for routers and Redis", 0, least=0)
    router_call_us: float = setting(
        f"processor time of a router for a call, in microseconds; measured ({_SOURCE})", ROUTER_CALL_US, least=0
    )
    router_token_us: float = setting(f"the same in microseconds for a token ({_SOURCE})", ROUTER_TOKEN_US, least=0)
    cell_jobs: float = setting(f"jobs a second of one Redis cell; measured ({_SOURCE})", CELL_JOBS, above=0)
    json: bool = setting("print one JSON object", False)
    cluster: bool = setting("plan a cluster; without it `loraplex plan` plans one device", True)

    def __post_init__(self) -> None:
        """Check the values. Raises ValueError, or ArtifactError for a scheme or the KV cache's dtype."""
        check_bounds(self)
        parse_bytes(self.memory)
        self.device(0)
        if self.step_ms >= self.itl_ms:
            raise ValueError(
                f"--itl-ms {self.itl_ms:g}: {self.rows} rows at {self.answer_rate:,.0f} tokens a second have a token "
                f"each {self.step_ms:.1f} ms; give the --answer-rate of fewer --rows"
            )

    @property
    def step_ms(self) -> float:
        """Return the time between the tokens of an answer while all rows answer and no prompt is computed."""
        return self.rows / self.answer_rate * 1000

    def device(self, slots: int) -> PlanSettings:
        """Return what the plan of a device with so many adapter slots is made of."""
        own: dict[str, Any] = {"context": self.prompt + self.answer, "batch": self.rows, "adapters": slots}
        shared = {one.name: getattr(self, one.name) for one in fields(PlanSettings) if one.name not in own}
        return PlanSettings(**shared, **own)


@dataclass(frozen=True)
class ServiceLevel:
    """The service that a number of workers gives: the share of their time that is used, and times in milliseconds.

    `ttft_ms` holds for 99% of the requests.
    """

    busy: float
    itl_ms: float
    ttft_ms: float


@dataclass(frozen=True)
class ClusterPlan:
    """A cluster for a load: processes of each kind, one more than the load takes, the memory of each, and its cost.

    `workers` is the number of all cells together; each cell has as many. Every router serves all cells.
    """

    settings: LoadSettings
    device: MemoryPlan
    service: ServiceLevel
    cells: int
    workers: int
    devices: int
    slots: int
    # Adapters that a worker is home of, and how many of these its slots have room for.
    adapters_a_worker: float
    # Memory of the host of a worker: the weights while they load, and the adapters that have no slot.
    worker_host_bytes: int
    router_cores: float
    routers: int
    cost_an_hour: float


def plan_cluster(settings: LoadSettings, divide: Divide = lambda columns: ()) -> ClusterPlan:
    """Plan the cluster. Raises ValueError where no number of these workers keeps the promises, and as `plan` does."""
    bare = plan(settings.device(0), divide)
    if bare.context < settings.prompt + settings.answer:
        total = settings.prompt + settings.answer
        raise ValueError(f"--prompt and --answer have {total:,} tokens; the model's context is {bare.context:,}")
    cells = math.ceil(settings.requests / settings.cell_jobs)
    needed, service = _fewest_workers(settings)
    # Add one spare worker for all cells together: routers send a lost worker's jobs to any of them.
    workers = cells * math.ceil((needed + 1) / cells)
    # An adapter belongs to one cell.
    home = settings.adapters / needed
    slots = min(settings.adapters, max(settings.rows, math.ceil(SLOTS_AN_ADAPTER * home)))
    most = bare.adapters_fit if bare.adapter_bytes else slots
    if bare.needed_bytes > bare.memory_bytes or most < min(slots, settings.rows):
        least = plan(settings.device(min(slots, settings.rows)), divide)
        raise ValueError(
            f"--memory {settings.memory}: {shown(least.needed_bytes)} are needed for weights, {settings.rows} rows and "
            f"{least.adapters} adapter slots; give fewer --rows, --tensor-parallel, --quantize or --kv-cache-dtype int8"
        )
    device = plan(settings.device(min(slots, most)), divide)
    ranks = settings.tensor_parallel
    router_cores = settings.requests * (settings.router_call_us + settings.answer * settings.router_token_us) / 1e6
    routers = routers_for(router_cores) + 1
    return ClusterPlan(
        settings=settings,
        device=device,
        service=service,
        cells=cells,
        workers=workers,
        devices=workers * ranks,
        slots=device.adapters,
        adapters_a_worker=home,
        worker_host_bytes=ranks * (device.weight_bytes + math.ceil(SLOTS_AN_ADAPTER * home) * device.adapter_bytes),
        router_cores=router_cores,
        routers=routers,
        # A router process and the Redis of a cell have a core each.
        cost_an_hour=workers * ranks * settings.price + (routers + cells) * settings.core_price,
    )


def routers_for(cores: float) -> int:
    """Return the number of router processes for so many cores of work, without one to spare."""
    return max(1, math.ceil(cores / ROUTER_BUSY))


def _fewest_workers(settings: LoadSettings) -> tuple[int, ServiceLevel]:
    """Return the fewest workers that keep the promises, and what they give. Raises ValueError."""
    prompt_s = settings.prompt / settings.prompt_rate
    # Of each step the prompts get what the answers leave of the promise.
    first_ms = prompt_s * 1000 * settings.itl_ms / (settings.itl_ms - settings.step_ms)
    if first_ms > settings.ttft_ms:
        raise ValueError(
            f"--ttft-ms {settings.ttft_ms:g}: a prompt of {settings.prompt:,} tokens takes {first_ms:.0f} ms beside "
            f"{settings.rows} answers at these rates; promise more, or give the --answer-rate of fewer --rows"
        )
    device_s = prompt_s + settings.answer / settings.answer_rate
    workers = max(1, math.ceil(settings.requests * device_s / BUSY - 1e-9))
    while workers * settings.rows <= _MOST_ROWS:
        share = settings.requests / workers
        itl_ms = settings.step_ms / (1 - share * prompt_s)
        held_s = (first_ms + settings.answer * itl_ms) / 1000
        ttft_ms = first_ms + 1000 * _wait_s(share * first_ms / 1000, 1, first_ms / 1000)
        if itl_ms <= settings.itl_ms and ttft_ms <= settings.ttft_ms:
            ttft_ms += 1000 * _wait_s(settings.requests * held_s, workers * settings.rows, held_s)
            if ttft_ms <= settings.ttft_ms:
                return workers, ServiceLevel(share * device_s, itl_ms, ttft_ms)
        workers += max(1, workers // 100)
    raise ValueError(f"--requests {settings.requests:g}: more than {_MOST_ROWS:,} rows are needed; check the rates")


def _wait_s(load: float, servers: int, held_s: float) -> float:
    """Return the wait for one of these servers that 99% of requests do not exceed.

    `load` is the number of servers that would be busy, each for `held_s` a request.
    """
    if load >= servers:
        return math.inf
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    waits = blocked / (1 - load / servers * (1 - blocked))
    return max(0.0, math.log(waits / (1 - _PROMISED)) * held_s / (servers - load)) if waits else 0.0


def as_lines(cluster: ClusterPlan) -> str:
    """Render the plan for people: a name and a value a line."""
    load, device, service = cluster.settings, cluster.device, cluster.service
    ranks, cells = load.tensor_parallel, cluster.cells
    each = f" in each of {cells} cells" if cells > 1 else ""
    flags: dict[str, object] = {
        "rows": load.rows,
        "adapter-slots": cluster.slots,
        "max-rank": load.rank,
        "itl-target-ms": f"{load.itl_ms:g}",
        "quantize": load.quantize,
        "kv-cache-dtype": load.kv_cache_dtype,
        "tensor-parallel": ranks if ranks > 1 else "",
        "max-expert-rank": load.max_expert_rank or "",
    }
    rows = {
        "load": f"{load.requests:,g} requests/s: prompts of {load.prompt:,}, answers of {load.answer:,} tokens",
        "adapters": f"{load.adapters:,} of rank {load.rank}, {cluster.adapters_a_worker:,.1f} a worker",
        "given rates": f"{load.prompt_rate:,.0f} prompt tokens/s, {load.answer_rate:,.0f} answer tokens/s of a worker",
        "workers": f"{cluster.workers // cells}{each}, one to spare; {cluster.devices} devices",
        "flags of each": " ".join(f"--{name}={value}" for name, value in flags.items() if value != ""),
        "device memory": f"{shown(device.needed_bytes)} of {shown(device.memory_bytes)}: weights "
        f"{shown(device.weight_bytes)}, KV {shown(device.kv_bytes)}, slots {shown(device.adapter_slots_bytes)}",
        "host memory": f"{shown(cluster.worker_host_bytes)} a worker: weights while they load, and adapters",
        "busy": f"{service.busy:.0%} without the spare worker, {BUSY:.0%} at most",
        "first token": f"{service.ttft_ms:,.0f} ms for {_PROMISED:.0%}, promised {load.ttft_ms:,g} ms",
        "next tokens": f"{service.itl_ms:,.1f} ms each, promised {load.itl_ms:,g} ms",
        "routers": f"{cluster.routers}, one to spare; {cluster.router_cores:.1f} cores of work: "
        f"{load.router_call_us:,g} us a call, {load.router_token_us:g} us a token",
        "Redis cells": f"{cells}, a core each: {load.cell_jobs:,g} jobs/s",
        "cost": f"{cluster.cost_an_hour:,.2f} an hour",
    }
    return "\n".join(f"{name:16}{value}" for name, value in rows.items())
