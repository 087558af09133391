"""The contract of an engine, which the torch and the hash engine keep: its configuration, input and output.

engine.add_sequence(NewSequence) ──▶ engine.step() ──▶ [Output, ...]
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Literal, Protocol

from artifacts.encode import Encode as Encode  # a part of the contract
from artifacts.sampling import SamplingParams
from worker.engine_api.config import EngineLimits
from worker.engine_api.stats import EngineStats, Removal


class SequenceRefusedError(Exception):
    """The engine can't run the sequence; `field` names the value at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class Sampling(SamplingParams):
    """The sampling of a sequence: the request's parameters and the seed of its noise."""

    seed: int = 0

    @classmethod
    def seeded(cls, params: SamplingParams, seed: int) -> Sampling:
        """Join a job's parameters and its seed."""
        return cls(seed=seed, **{name: getattr(params, name) for name in _PARAMS})

    @property
    def penalizes(self) -> bool:
        """Tell whether the choice of a token depends on the ids before it."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def adjusts_logits(self) -> bool:
        """Tell whether the logits themselves change, and with them greedy answers."""
        return self.penalizes or bool(self.logit_bias)


_PARAMS = tuple(declared.name for declared in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Stopping:
    """The conditions that end an answer. All counts include emitted ids of earlier attempts."""

    # 0: the prompt's log probabilities are all that is wanted.
    max_tokens: int = 128
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """An adapter revision and the factor of what it adds to the base model; its files lie in `directory`."""

    digest: str
    directory: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter revision whose verified files lie in a local directory, in peft's layout.

    Or a weighted set of revisions, which has `parts`, no directory, and a digest over its parts' digests and weights:
    to the engine it is one adapter.
    """

    digest: str
    directory: str = ""
    parts: tuple[AdapterPart, ...] = ()

    @property
    def summands(self) -> tuple[AdapterPart, ...]:
        """Return the parts of a set, or the adapter itself as its only part: what is added up."""
        return self.parts or (AdapterPart(self.digest, self.directory),)


@dataclass(frozen=True, slots=True)
class NewSequence:
    """An answer to produce. `emitted_ids` were produced by earlier attempts and are prefilled after the prompt."""

    sequence_id: str
    prompt_ids: tuple[int, ...]
    emitted_ids: tuple[int, ...] = ()
    adapter: AdapterSource | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    choice: int = 0
    tenant: str = ""
    # The tenant's weight: twice the weight gets twice the rows.
    weight: float = 1.0
    priority: int = 0
    # Number of alternatives to report for each token; None: no logprobs.
    logprobs: int | None = None
    # Number of alternatives for the prompt's tokens from `prompt_logprobs_start` on; cached ones are computed anew.
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    # The grammar that the answer keeps to, in llguidance's Lark syntax; empty: none.
    grammar: str = ""
    # None: an answer. Otherwise the sequence ends with its first output, which has `vector`; `max_tokens` is 0.
    encode: Encode | None = None


class FinishKind(StrEnum):
    """The reason of an answer's end."""

    LENGTH = "length"
    END = "end"
    STOP_TOKEN = "stop_token"
    # The grammar is complete, and nothing may follow.
    COMPLETE = "complete"
    FAILED = "failed"


# The gRPC statuses that a failure can end a job with; `rpc.status.to_error` makes the router's error of each.
FailureCode = Literal[
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DATA_LOSS",
    "INTERNAL",
]
# Every reason that an engine or its worker ends a job with, as clients read it in ErrorInfo.
FailureReason = Literal[
    # of the adapter store and the adapter's bytes
    "ADAPTER_GONE",
    "ADAPTER_TOO_LARGE",
    "ADAPTER_UNLOADABLE",
    "DATA_LOSS",
    "DISK_FULL",
    "FETCH_FAILED",
    "GRANT_REFUSED",
    "STORE_DOWN",
    "STORE_TIMEOUT",
    "WRONG_DIGEST",
    # of the job, which this worker can't take
    "REFUSED_BY_WORKER",
    "WRONG_BASE",
    # of the engine
    "GRAMMAR_FAILED",
    "GRAMMAR_NOT_READY",
    "NAN_LOGITS",
    "NO_CLASSIFIER",
    "OUT_OF_MEMORY",
    "SAMPLING_FAILED",
]


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a sequence. With NOT_FOUND and DATA_LOSS `message` is the name of the resource at fault.

    `field` names the value of the request at fault, or the kind of the resource.
    """

    code: FailureCode
    reason: FailureReason
    message: str
    field: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log probability, and the likeliest tokens at its place as (id, log probability), best first.

    Both are the model's own: of its logits before bias, penalties, temperature and limits.
    """

    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """A step's result for a sequence.

    `offset` counts the tokens of the answer before these, emitted ids of earlier attempts included; end and stop
    tokens are among the ids. After an output with `finish` the engine has forgotten the sequence. `adapter_ms` (the
    wait for its adapter inside the engine) and `cached_tokens` come with its first output.
    """

    sequence_id: str
    offset: int
    token_ids: tuple[int, ...]
    finish: FinishKind | None = None
    failure: Failure | None = None
    adapter_ms: float | None = None
    cached_tokens: int | None = None
    # Log probabilities of token_ids, where the sequence asks for them.
    logprobs: tuple[TokenLogprobs, ...] = ()
    # Log probabilities of all prompt tokens but the first, with the first output, where the sequence asks for them.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # The vector of a sequence with `encode`, neither normalised nor scaled; its finish is LENGTH.
    vector: tuple[float, ...] = ()


class Engine(Protocol):
    """An engine as the engine process drives it, from one thread."""

    @property
    def limits(self) -> EngineLimits:
        """Return what the engine can take."""

    def add_sequence(self, sequence: NewSequence) -> None:
        """Take a sequence, and start loading its adapter where it is not resident. Raises SequenceRefusedError."""

    def abort(self, sequence_id: str) -> None:
        """Forget a sequence and free all it holds, at once; unknown ids are ignored."""

    def warm_adapter(self, adapter: AdapterSource) -> None:
        """Bring an adapter into a slot as soon as nobody who waits needs it."""

    def pin_adapter(self, adapter: AdapterSource) -> None:
        """Bring an adapter into a slot and keep it there. Raises ValueError where no slot would be left for others."""

    def unpin_adapter(self, digest: str) -> None:
        """Let a pinned adapter leave again; unknown digests are ignored."""

    def forget_tenant(self, tenant: str, kept_adapters: Container[str]) -> Mapping[str, Removal]:
        """Remove what is cached of a tenant, and adapters that are not kept; returns what was removed, by place."""

    def has_work(self) -> bool:
        """Tell whether a step would do anything now (a sequence that waits for its adapter is no work)."""

    def step(self) -> list[Output]:
        """Run one step of the batch."""

    def stats(self) -> EngineStats:
        """Return what the engine holds now."""

    def check(self) -> None:
        """Raise an error where the accounting of blocks or adapters contradicts itself; takes milliseconds."""

    def close(self) -> None:
        """End its threads and free its memory."""
