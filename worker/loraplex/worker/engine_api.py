"""The contract of an engine: its configuration, limits, input, output and statistics.

engine.add_sequence(NewSequence) ──▶ engine.step() ──▶ [Output, ...]
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Literal

from loraplex.contracts.artifacts.families import check_kv_cache_dtype
from loraplex.contracts.options import Encode, FinishReason, SamplingParams, StoppingParams, TokenLogprobs


class ModelUnusableError(Exception):
    """The model can't be served here; one line that says why and what to do."""


class CaptureFailedError(ModelUnusableError):
    """Decode steps cannot be captured as CUDA graphs; an engine in another process, without graphs, can serve."""


class SequenceRefusedError(Exception):
    """The engine can't run the sequence; `field` names the value at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


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
    # The revision's name in the store, for those who are told of its KV blocks; empty: it has none.
    name: str = field(default="", compare=False)
    # The ids that an activated adapter counts from; empty: it counts from a prompt's first id.
    invocation: tuple[int, ...] = field(default=(), compare=False)

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
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stopping: StoppingParams = field(default_factory=StoppingParams)
    choice: int = 0
    tenant: str = ""
    # The tenant's weight: twice the weight gets twice the rows.
    weight: float = 1.0
    priority: int = 0
    # Number of alternatives to report for each token; None: no logprobs. They are the likeliest ids, or these.
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    # Number of alternatives for the prompt's tokens from `prompt_logprobs_start` on; cached ones are computed anew.
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    # The grammar that the answer keeps to, in llguidance's Lark syntax; empty: none.
    grammar: str = ""
    # Whether drafts of the next tokens may be checked for it, where the engine makes any; the answer is the same.
    speculate: bool = True
    # None: an answer. Otherwise the sequence ends with its first output, which has `vector`; `max_tokens` is 0.
    encode: Encode | None = None
    # Position of the first id that the adapter computes: 0, or of an activated adapter its invocation. The base model
    # computes those before it.
    invoked_at: int = 0


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
    "SEAL_REFUSED",
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
class Output:
    """A step's result for a sequence.

    `offset` counts the tokens of the answer before these, emitted ids of earlier attempts included; end and stop
    tokens are among the ids. After an output with `finish` the engine has forgotten the sequence. `adapter_ms` (the
    wait for its adapter inside the engine) and `cached_tokens` come with its first output.
    """

    sequence_id: str
    offset: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    failure: Failure | None = None
    adapter_ms: float | None = None
    cached_tokens: int | None = None
    # Log probabilities of token_ids, where the sequence asks for them.
    logprobs: tuple[TokenLogprobs, ...] = ()
    # Log probabilities of the next prompt tokens, where the sequence asks for them: from each step that computed some,
    # before its first tokens or with them. The first token of a prompt has none.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # The vector of a sequence with `encode`, neither normalised nor scaled; its finish is LENGTH.
    vector: tuple[float, ...] = ()
    # Number of tokens that the step's draft proposed, and of these the ones that are among token_ids.
    drafted: int = 0
    accepted: int = 0


# Maximum of num_speculative_tokens: more positions of one row than were compared with plain decoding (make company).
MAX_DRAFT = 16


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts of next tokens are made, with the names of vLLM's --speculative-config."""

    # suffix: what followed the same tokens in the prompt, in the answer or in recent answers of the same tenant and
    # adapter.
    method: Literal["suffix"] = "suffix"
    # Maximum tokens of a draft.
    num_speculative_tokens: int = 8

    def __post_init__(self) -> None:
        """Check the values. Raises ValueError."""
        if self.method != "suffix":
            raise ValueError(f"method: {self.method!r} is not supported; use 'suffix'")
        tokens = self.num_speculative_tokens
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= MAX_DRAFT:
            raise ValueError(f"num_speculative_tokens: must be a number from 1 to {MAX_DRAFT}, is {tokens!r}")

    @classmethod
    def parse(cls, text: str) -> Speculation:
        """Read a JSON object. Raises ValueError with one sentence that names the field."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise ValueError('must be a JSON object such as {"method": "suffix", "num_speculative_tokens": 8}')
        names = [each.name for each in fields(cls)]
        for name in values:
            if name not in names:
                raise ValueError(f"{name}: not supported; use {' and '.join(names)}")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that decides how an engine is built; zero blocks, bytes or threads mean: as many as fit."""

    # A transformers directory, or `hash:?...`.
    model: str
    device: str = "cpu"
    dtype: str = "auto"
    # Sequences in one batch at most.
    rows: int = 32
    kv_blocks: int = 0
    # Tokens in a block.
    block_size: int = 16
    adapter_slots: int = 32
    # On CUDA there are fewer slots where half of the memory beside the weights holds fewer.
    fewer_slots: bool = False
    # Maximum bytes of adapters in host memory.
    host_adapter_bytes: int = 0
    max_rank: int = 64
    # Maximum rank of adapters of experts on CUDA, where their slots take memory for each expert; on the CPU `max_rank`.
    max_expert_rank: int = 0
    # Maximum tokens that one step computes.
    step_tokens: int = 512
    # Target time between an answer's tokens while prompts are computed beside it, in milliseconds.
    itl_target_ms: float = 50.0
    # CPU threads of the step.
    threads: int = 0
    # The scheme in which the weights are loaded, such as int8; empty: as the files have them.
    quantize: str = ""
    # The dtype of the KV cache: int8; empty: that in which the model computes.
    kv_cache_dtype: str = ""
    # On CUDA a sequence's numbers have the same bits alone and beside any others, as they have on the CPU in any case.
    batch_invariant: bool = False
    # Ranks that compute the model together, each with a part of its weights; on CUDA each on a device of its own.
    tensor_parallel: int = 1
    # None: no drafts.
    speculation: Speculation | None = None
    # Decode steps are CUDA graphs. Unset after a CaptureFailedError.
    graphs: bool = True

    def __post_init__(self) -> None:
        """Check the values. Raises ValueError for a number that no engine can work with, ArtifactError for a dtype."""
        check_kv_cache_dtype(self.kv_cache_dtype)
        for name in ("rows", "block_size", "step_tokens", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, is {getattr(self, name)}")
        if not self.itl_target_ms > 0:
            raise ValueError(f"itl_target_ms must be more than 0, is {self.itl_target_ms}")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of an engine; measured at start-up, never changed."""

    rows: int
    # Maximum tokens of a sequence, prompt and answer together; the KV cache holds so many.
    max_tokens: int
    max_rank: int
    vocab_size: int
    block_size: int
    blocks: int
    adapter_slots: int

    @classmethod
    def of(cls, config: EngineConfig, *, blocks: int, context: int, vocab_size: int) -> EngineLimits:
        """Return the limits of an engine whose KV cache has so many blocks, for a model with this context."""
        return cls(
            rows=config.rows,
            max_tokens=min(context, blocks * config.block_size),
            max_rank=config.max_rank,
            vocab_size=vocab_size,
            block_size=config.block_size,
            blocks=blocks,
            adapter_slots=config.adapter_slots,
        )

    def __post_init__(self) -> None:
        """Raise ValueError where the KV cache cannot hold the longest sequence: the worker would claim such jobs."""
        # The last token is never an input: its keys and values are not kept.
        if self.max_tokens > self.blocks * self.block_size + 1:
            raise ValueError(f"{self.blocks} blocks of {self.block_size} do not hold max_tokens, {self.max_tokens}")


@dataclass(frozen=True, slots=True)
class Removal:
    """Numbers of things that were removed from a place, and of those that are left there because they are in use.

    `of_all_tenants`: the place does not know whose its things are, and was emptied.
    """

    removed: int = 0
    left: int = 0
    of_all_tenants: bool = False


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A block that the prefix cache has. `token_ids` are its ids in 32 bits, little endian.

    `key` and `parent` are the first 64 bits of its key and of the key before it, signed; a first block has no parent.
    `adapter` is the revision's name in the store, or else its digest; empty: the base model.
    """

    key: int
    parent: int | None
    tenant: str
    adapter: str
    token_ids: bytes


@dataclass(frozen=True, slots=True)
class TierStats:
    """The adapter cache's tiers. Bytes are counted as stored."""

    # Adapters that came into a slot, and those that had to leave theirs for another, since the start.
    loads: int
    swaps: int
    # Adapters that could not be read, copied or put into a slot, since the start.
    load_failures: int
    # Adapters that are being read from disk now.
    loading: int
    host_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The contents of an engine. blocks_free + blocks_cached + blocks_referenced is all of its blocks."""

    steps: int
    rows_running: int
    rows_waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_referenced: int
    slots_used: int
    slots_pinned: int
    # Digests of the resident adapters.
    adapters: tuple[str, ...]
    # Sequences that found their adapter in a slot when they came, and those that did not, since the start.
    adapter_hits: int
    adapter_misses: int
    tiers: TierStats
    # Sequences that came, since the start, those that were complete on arrival as well.
    sequences_taken: int
    # Since the start: sequences that had to give their blocks back; tokens that steps computed; tokens that sequences
    # came with, and how many of these the prefix cache had.
    preemptions: int
    computed_tokens: int
    prefix_queries: int
    prefix_hits: int
    # Since the start: steps' drafts, tokens that they proposed, and those of them that became tokens of answers.
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
