"""What the queue carries, as the code inside both rooms sees it. `broker.codec` turns these to bytes and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from artifacts.sampling import SamplingParams

# So many engines may die with a job newly in their batch before it has to run alone.
STRIKES_LIMIT = 2


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One immutable revision. `revision` is its full name, `weight_bytes` the size of its safetensors file.

    Or a weighted set of them, which has `parts`: then `revision` is its digest (see artifacts.digests.weighted_digest),
    rank and bytes are the sums of the parts'.
    """

    revision: str
    digest: str
    rank: int
    weight_bytes: int
    parts: tuple[WeightedRef, ...] = ()

    @property
    def summands(self) -> tuple[AdapterRef, ...]:
        """The revisions that it needs: itself, or the parts of a set."""
        return tuple(part.adapter for part in self.parts) or (self,)


@dataclass(frozen=True, slots=True)
class WeightedRef:
    """One revision of a weighted set, and the factor of what it adds to the base model."""

    adapter: AdapterRef
    weight: float


@dataclass(frozen=True, slots=True)
class AdapterRequest:
    """An adapter that a waiting job or an operator asks a worker to have, and the tenant whose adapter it is."""

    adapter: AdapterRef
    tenant: str


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When an answer ends; counts are of the whole answer."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A request as it waits in the queue. `emitted` has what earlier attempts produced, per choice."""

    job_id: str
    tenant: str
    model: str
    base_digest: str
    reply_to: str
    prompt_ids: tuple[int, ...]
    stopping: StoppingParams
    seed: int
    request_id: str = ""
    attempt: int = 1
    adapter: AdapterRef | None = None
    emitted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    priority: int = 0
    # Milliseconds that were left at the enqueue; 0: no deadline.
    deadline_ms: int = 0
    strikes: int = 0
    # How many alternatives to report for each token; None: no logprobs.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # Choices that need no more work, though their siblings do.
    done: tuple[int, ...] = ()
    # The W3C trace context of its request's span; empty: it is not traced.
    traceparent: str = ""

    @property
    def tokens(self) -> int:
        """The most tokens that prompt and answer can come to."""
        return len(self.prompt_ids) + self.stopping.max_tokens

    @property
    def prefill_tokens(self) -> int:
        """Tokens that a worker computes before the first new one."""
        # The choices share the prompt's blocks.
        return len(self.prompt_ids) + sum(len(ids) for ids in self.emitted.values())

    @property
    def rows(self) -> int:
        """Answers still to be made."""
        return self.n - len(self.done)

    @property
    def rank(self) -> int:
        """The largest rank of its adapter; 0 without one."""
        return self.adapter.rank if self.adapter else 0

    @property
    def suspect(self) -> bool:
        """Whether it is to run alone on its worker: it may be what kills the engines."""
        return self.strikes >= STRIKES_LIMIT


@dataclass(frozen=True, slots=True)
class DeadJob:
    """What is kept of a job that killed its workers' engines: no prompt, no output."""

    job_id: str
    request_id: str
    tenant: str
    model: str
    # The revision's full name, or a weighted set's digest; empty for the base model.
    adapter_revision: str
    prompt_tokens: int
    # Of all choices.
    completion_tokens: int
    attempts: int
    # UPPER_SNAKE_CASE, as the client was told.
    reason: str
    # Milliseconds since 1970, by the router's clock.
    died_at_ms: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a claiming worker has room for, and what it holds."""

    rows: int
    # All that it has, free or not: a job of more choices than these takes them all.
    rows_limit: int
    # Free tokens of KV cache.
    tokens: int
    # The longest prompt and answer together that it takes at all.
    max_tokens: int
    max_rank: int
    # Digests of the revisions that are on its device.
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterTiers:
    """A worker's adapters on the device, in host memory, on disk: counts since its start, bytes as stored."""

    # On their way from the store to the disk, and from there to the device.
    fetching: int = 0
    loading: int = 0
    # Requests that found their adapter on the device, and that did not.
    hits: int = 0
    misses: int = 0
    # Adapters that took another's slot.
    swaps: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    disk_bytes_limit: int = 0
    disk_adapters: int = 0
    # Requests that found their adapter on the disk, and that did not.
    disk_hits: int = 0
    disk_misses: int = 0


class WorkerPhase(StrEnum):
    """What a live worker does with new work."""

    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a live worker says of itself with every beat."""

    worker_id: str
    incarnation: str
    phase: WorkerPhase
    model: str
    base_digest: str
    rows_running: int
    rows_waiting: int
    rows_limit: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_referenced: int
    slots_total: int
    slots_used: int
    slots_pinned: int
    adapters: tuple[str, ...]
    max_rank: int
    max_tokens: int
    steps: int
    host: str
    pid: int
    engine_pid: int
    tiers: AdapterTiers = AdapterTiers()
