"""A sequence inside the engine: its ids, what of them lies in the KV cache, and where.

ids    prompt ids │ emitted ids of earlier attempts │ ids of this attempt │ placeholders
       ◀─ computed: a step that was scheduled puts their keys and values into block_table ─▶│◀─ pending ─▶

A placeholder stands for the id that a scheduled step samples. It becomes an id when that step is committed, so that the
next step can be scheduled before. A sequence that is stopped loses its placeholders and what is computed, and its epoch
changes: results of the steps that it was scheduled in before are dropped.

            ┌──────── its adapter was evicted ─────────┐
            ▼                                          │
ARRIVED ─▶ PARKED ── its adapter is in a slot ─▶ READY ┴▶ RUNNING         any of these ─▶ ENDED
     │      ▲                                     ▲ ▲        │
     └──────┼─────────────────────────────────────┘ │        │
            └──────────────── preempted ────────────┴────────┘
"""

from __future__ import annotations

import hashlib
import math
import time
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import replace
from enum import IntEnum, auto
from itertools import chain, islice
from typing import Any

from loraplex.contracts.artifacts import ArtifactError, MismatchError
from loraplex.contracts.grammars.build import GRAMMAR_BYTES
from loraplex.contracts.options import (
    Encode,
    FinishReason,
    OutOfRangeError,
    SamplingParams,
    StoppingParams,
    TokenLogprobs,
    check_sampling,
)
from loraplex.worker.engine.scheduling.grammars import GrammarState
from loraplex.worker.engine_api import (
    AdapterSource,
    EngineLimits,
    Failure,
    FailureCode,
    NewSequence,
    Output,
    SequenceRefusedError,
)

# Number of earlier arrivals that one level of priority passes; bounded, so that no sequence starves.
PLACES_PER_PRIORITY = 64


class SequenceState(IntEnum):
    """The state of a sequence between its arrival and its end."""

    # In no list yet, or waits for its grammar.
    ARRIVED = auto()
    # Waits for its adapter.
    PARKED = auto()
    # Waits for a row and blocks.
    READY = auto()
    # Has a row, blocks, and its adapter's slot.
    RUNNING = auto()
    # Unknown to the scheduler.
    ENDED = auto()


_NEXT_STATES = {
    SequenceState.ARRIVED: {SequenceState.PARKED, SequenceState.READY, SequenceState.ENDED},
    SequenceState.PARKED: {SequenceState.READY, SequenceState.ENDED},
    SequenceState.READY: {SequenceState.PARKED, SequenceState.RUNNING, SequenceState.ENDED},
    SequenceState.RUNNING: {SequenceState.PARKED, SequenceState.READY, SequenceState.ENDED},
    SequenceState.ENDED: set[SequenceState](),
}


class SequenceStateError(Exception):
    """A sequence was to go from one state to another that does not follow it."""


class BadWords:
    """The token sequences that an answer cannot have: a tree of their ids, read from the end.

    A node has the ids that cannot come after those on its way to the root; a step reads no more ids than the longest
    word has.
    """

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self.last_ids: frozenset[int] = frozenset()
        self.before: dict[int, BadWords] = {}
        for *earlier, last in words:
            node = self
            for token in reversed(earlier):
                node = node.before.setdefault(token, BadWords(()))
            node.last_ids |= {last}

    def after(self, ids: list[int], prompt_length: int, drafted: Ids[int] = ()) -> frozenset[int]:
        """Return the ids that would complete a word after these and the drafted ids; the prompt's do not count."""
        banned, node = self.last_ids, self
        for token in chain(reversed(drafted), islice(reversed(ids), len(ids) - prompt_length)):
            if (earlier := node.before.get(token)) is None:
                break
            node = earlier
            banned |= node.last_ids
        return banned


class Sequence:
    """An answer that is being generated.

    This folder alone changes it: the scheduler, the waiting list and the block manager. The engine reads it, and writes
    `engine_state`, `prompt_logprobs` and `vector`, which the scheduler only passes on.
    """

    def __init__(self, spec: NewSequence, arrival: int, end_token_ids: frozenset[int]) -> None:
        self.state = SequenceState.ARRIVED
        self.spec = spec
        self.sequence_id = spec.sequence_id
        # Lower goes first: in admission, and in keeping its blocks.
        self.rank = (arrival - spec.priority * PLACES_PER_PRIORITY, arrival)
        self.ids = [*spec.prompt_ids, *spec.emitted_ids]
        self.prompt_length = len(spec.prompt_ids)
        # Tokens of the answer so far, emitted ids of earlier attempts included.
        self.answered = len(spec.emitted_ids)
        # The value of `answered` when it began to run, or to run again.
        self.started_at = self.answered
        self.max_tokens = spec.stopping.max_tokens
        self.min_tokens = spec.stopping.min_tokens
        # The end tokens of model and adapter; none of them end a sequence that ignores them.
        self.end_ids = frozenset(() if spec.stopping.ignore_eos else (*end_token_ids, *spec.stopping.end_ids))
        self.stop_ids = frozenset(spec.stopping.stop_token_ids)
        self.bad_words = BadWords(spec.sampling.bad_word_ids)
        # Number of ids after `ids` that steps sample.
        self.placeholders = 0
        # Number of ids, then placeholders, whose keys and values are in the cache after the scheduled steps.
        self.computed = 0
        # Number of times that the sequence was stopped.
        self.epoch = 0
        # Block i holds the positions from i * block_size.
        self.block_table: list[int] = []
        # Keys of the full blocks from the first on, computed when first needed; see blocks.py.
        self.block_keys: list[bytes] = []
        # The ids of each of these blocks, in 32 bits, little endian.
        self.block_ids: list[bytes] = []
        # Number of the table's blocks that the prefix cache knows.
        self.registered = 0
        # The slot of its adapter while it runs; -1: the plain base model.
        self.adapter_slot = -1
        # How many ids the prefix cache had when it first ran; None before.
        self.cached_tokens: int | None = None
        # Milliseconds that it has spent parked, and when it was parked last.
        self.adapter_ms = 0.0
        self.parked_at = 0.0
        # Of the prompt's tokens from the second on: those that the next output reports, and the number of those that
        # outputs have reported. A preemption does not lose them.
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.reported_logprobs = 0
        # Of a sequence that asks for a vector, which ends with it.
        self.vector: tuple[float, ...] = ()
        # The state of the answer inside its grammar, once that has been compiled; None without a grammar.
        self.grammar: GrammarState | None = None
        # For the engine to keep what it computes from token to token; goes with the sequence.
        self.engine_state: Any = None

    def move_to(self, state: SequenceState) -> None:
        """Change its state, and count the time that it is parked. Raises SequenceStateError."""
        if state not in _NEXT_STATES[self.state]:
            raise SequenceStateError(f"sequence {self.sequence_id} is {self.state.name} and can't be {state.name}")
        if self.state is SequenceState.PARKED:
            self.adapter_ms += (time.monotonic() - self.parked_at) * 1000
        elif state is SequenceState.PARKED:
            self.parked_at = time.monotonic()
        self.state = state

    def stop(self) -> None:
        """Drop what is scheduled and computed of it; the results of its scheduled steps are not looked at."""
        self.placeholders = 0
        self.epoch += 1
        self.adapter_slot = -1

    @property
    def length(self) -> int:
        """Return how many ids it has, placeholders among them."""
        return len(self.ids) + self.placeholders

    @property
    def waits_for_ids(self) -> bool:
        """Tell whether what is scheduled must be committed before more is: its last token may be a placeholder."""
        return self.placeholders > 0 and self.answered + self.placeholders >= self.max_tokens

    @property
    def missing_prompt_logprobs(self) -> range:
        """Return the positions whose logits are needed for the prompt's log probabilities, sampled from or not."""
        if self.spec.prompt_logprobs is None:
            return range(0)
        first = max(0, self.spec.prompt_logprobs_start - 1)  # a token's are those after the one before it
        return range(first + self.reported_logprobs + len(self.prompt_logprobs), self.prompt_length - 1)

    @property
    def skippable(self) -> int:
        """Return how many of its first ids need not be computed, so that they may come from the prefix cache."""
        if self.spec.encode and self.spec.encode.pooling == "mean":
            return 0
        missing = self.missing_prompt_logprobs
        # The last id's logits give the next token.
        return missing.start if missing else len(self.ids) - 1

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Return those that no output has reported."""
        taken, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        self.reported_logprobs += len(taken)
        return taken

    def take(self, token: int) -> tuple[int, ...]:
        """Put a sampled id in a placeholder's place; return what of it belongs to the answer."""
        self.placeholders -= 1
        if not self.max_tokens:
            return ()
        self.ids.append(token)
        self.answered += 1
        return (token,)

    def drop_draft(self) -> None:
        """Take back a scheduled row whose drafted id was not the one that came."""
        self.computed -= 1
        self.placeholders -= 1

    def banned_ids(self, answered: int, drafted: Ids[int] = ()) -> frozenset[int]:
        """Return the ids that may not follow `answered` tokens, the last of which are drafted.

        They would end the answer before `min_tokens`, unless the request allows no others, or complete a bad word.
        """
        bad = self.bad_words.after(self.ids, self.prompt_length, drafted)
        if answered >= self.min_tokens:
            return bad
        ending, allowed = self.end_ids | self.stop_ids, self.spec.sampling.allowed_token_ids
        return bad if allowed and ending.issuperset(allowed) else bad | ending

    def finish(self) -> FinishReason | None:
        """Return why the answer is complete with the ids that it has, or None."""
        # min_tokens are due before an ending token, which comes on top.
        if self.answered > self.min_tokens:
            last = self.ids[-1]
            if last in self.end_ids:
                return FinishReason.END
            if last in self.stop_ids:
                return FinishReason.STOP
        if self.grammar is not None and self.grammar.complete:
            return FinishReason.END if self.answered and self.ids[-1] in self.end_ids else FinishReason.COMPLETE
        if self.answered < self.max_tokens:
            return None
        # The prompt's logprobs or vector may be due; and the last token may complete a grammar that is not there yet.
        due = (not self.max_tokens and self.missing_prompt_logprobs) or (self.spec.grammar and self.grammar is None)
        return None if due or (self.spec.encode and not self.vector) else FinishReason.LENGTH

    def full_block_keys(self, blocks: int, block_size: int) -> list[bytes]:
        """Return the keys of at least the first `blocks` blocks, whose ids must all be known.

        A key is the hash of the block's ids and of the key before it. The first one's parent stands for what else the
        keys and values depend on, and for who may share them: adapter and tenant (a cache serves one base model). The
        blocks before an activated adapter's are the base's.
        """
        keys, at = self.block_keys, self.spec.invoked_at
        for index in range(len(keys), blocks):
            parent = keys[-1] if keys else self._root_key(self.adapter_of(0))
            if at and index == at // block_size and (adapter := self.spec.adapter):
                parent = _hash(f"{at}:{adapter.digest}", parent)  # one adapter may begin at several places of a block
            ids = array("I", self.ids[index * block_size : (index + 1) * block_size]).tobytes()
            keys.append(hashlib.blake2b(ids, digest_size=16, key=parent).digest())
            self.block_ids.append(ids)
        return keys

    def adapter_of(self, last: int) -> AdapterSource | None:
        """Return the adapter that a block with ids up to the position `last` depends on; None: the base model."""
        return None if last < self.spec.invoked_at else self.spec.adapter

    def _root_key(self, source: AdapterSource | None) -> bytes:
        adapter = source.digest if source else ""
        # Lengths keep (tenant, adapter) apart from every other pair with the same letters.
        return _hash(f"{len(adapter)}:{adapter}{self.spec.tenant}")


def _hash(text: str, key: bytes = b"") -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16, key=key).digest()


OUT_OF_MEMORY = Failure("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", "the worker has not enough memory for it, even alone")


def output_of(
    sequence: Sequence,
    token_ids: tuple[int, ...],
    finish: FinishReason | None,
    failure: Failure | None = None,
    logprobs: tuple[TokenLogprobs, ...] = (),
    drafted: int = 0,
) -> Output:
    """Report a sequence's new tokens, its end, or both; its first output reports its start too."""
    offset = sequence.answered - len(token_ids)
    # Every later output follows tokens of this attempt.
    first = offset == len(sequence.spec.emitted_ids)
    return Output(
        sequence.sequence_id,
        offset,
        token_ids,
        finish,
        failure,
        adapter_ms=sequence.adapter_ms if first else None,
        cached_tokens=(sequence.cached_tokens or 0) if first else None,
        logprobs=logprobs,
        prompt_logprobs=sequence.take_prompt_logprobs(),
        vector=sequence.vector,
        drafted=drafted,
    )


def joined(output: Output, following: Output) -> Output:
    """Return a sequence's output with that of an accepted row of its draft."""
    return replace(
        output,
        token_ids=output.token_ids + following.token_ids,
        finish=following.finish,
        logprobs=output.logprobs + following.logprobs,
        accepted=output.accepted + 1,
    )


def adapter_failure(digest: str, error: Exception) -> Failure:
    """Make the failure of the sequences whose adapter could not be loaded."""
    code: FailureCode = "INTERNAL"
    if isinstance(error, MismatchError):
        code = "FAILED_PRECONDITION"
    elif isinstance(error, ArtifactError):
        code = "INVALID_ARGUMENT"
    return Failure(code, "ADAPTER_UNLOADABLE", f"adapter {digest}: {error}", field="adapter")


MAX_STOP_TOKEN_IDS = 64
MAX_PRIORITY = 100
MAX_LOGPROBS = 20


def check_sequence(sequence: NewSequence, limits: EngineLimits) -> None:
    """Raise SequenceRefusedError, naming the field, where the engine can't run it."""
    _require(bool(sequence.sequence_id), "sequence_id", "must not be empty")
    _require(bool(sequence.prompt_ids), "prompt_ids", "must not be empty")
    _check_ids("prompt_ids", sequence.prompt_ids, limits.vocab_size)
    _check_ids("emitted_ids", sequence.emitted_ids, limits.vocab_size)
    _check_sampling(sequence.sampling, limits.vocab_size)
    named = sequence.logprob_token_ids
    _check_ids("logprob_token_ids", named, limits.vocab_size)
    for field, count, most in (
        ("logprobs", sequence.logprobs, len(named) or MAX_LOGPROBS),
        ("prompt_logprobs", sequence.prompt_logprobs, MAX_LOGPROBS),
    ):
        _require(count is None or 0 <= count <= most, field, f"must lie between 0 and {most}, is {count}")
    _check_stopping(sequence.stopping, limits.vocab_size)
    _check_room(sequence, limits)
    _require(sequence.choice >= 0, "choice", f"must not be negative, is {sequence.choice}")
    _require(0 < sequence.weight < math.inf, "weight", f"must be above 0, is {sequence.weight}")
    priority, characters = sequence.priority, len(sequence.grammar)
    bounds = f"must lie between -{MAX_PRIORITY} and {MAX_PRIORITY}"
    _require(abs(priority) <= MAX_PRIORITY, "priority", f"{bounds}, is {priority}")
    _require(characters <= GRAMMAR_BYTES, "format", f"its grammar has {characters} characters; at most {GRAMMAR_BYTES}")
    if sequence.adapter:
        _check_adapter(sequence.adapter, limits)
    invocation, at = sequence.adapter.invocation if sequence.adapter else (), sequence.invoked_at
    invoked = at >= 0 and sequence.prompt_ids[at : at + len(invocation)] == invocation
    _require(invoked if invocation else at == 0, "invoked_at", f"the adapter is not invoked at {at}")
    if sequence.encode:
        _check_encode(sequence, sequence.encode)


def _require(holds: bool, field: str, message: str) -> None:
    if not holds:
        raise SequenceRefusedError(field, message)


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    ids = tuple(ids)
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise SequenceRefusedError(field, f"{bad} is not a token id of this model, which has ids 0 to {vocab_size - 1}")


def _check_adapter(adapter: AdapterSource, limits: EngineLimits) -> None:
    _require(bool(adapter.digest), "adapter.digest", "must not be empty")
    _require(limits.adapter_slots > 0, "adapter", "this engine has no adapter slots")
    for part in adapter.parts:
        usable = math.isfinite(part.weight) and part.weight != 0
        _require(usable, "adapter.parts", f"a weight must be finite and not 0, is {part.weight}")


def _check_encode(sequence: NewSequence, encode: Encode) -> None:
    alone = not sequence.stopping.max_tokens and sequence.prompt_logprobs is None
    _require(alone, "encode", "goes with max_tokens 0 and without log probabilities of the prompt")
    _require(not (sequence.adapter and sequence.adapter.invocation), "encode", "cannot use an activated adapter")
    pair = encode.pair_tokens
    inside = 0 <= pair <= len(sequence.prompt_ids)
    _require(inside, "encode.pair_tokens", f"must lie between 0 and the prompt's length, is {pair}")


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    try:
        check_sampling(sampling)
    except OutOfRangeError as error:
        raise SequenceRefusedError(f"sampling.{error.field}", error.message) from error
    seed = sampling.seed
    _require(0 <= seed < 1 << 64, "sampling.seed", f"must be 0 or more and below 2^64, is {seed}")
    _check_ids("sampling.logit_bias", (token for token, _ in sampling.logit_bias), vocab_size)
    _check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    _check_ids("sampling.bad_words", chain.from_iterable(sampling.bad_word_ids), vocab_size)
    few = 2 * len(sampling.bad_word_ids) < vocab_size
    _require(few, "sampling.bad_words", f"a model of {vocab_size} tokens takes fewer")


def _check_stopping(stopping: StoppingParams, vocab_size: int) -> None:
    most, least, ids = stopping.max_tokens, stopping.min_tokens, len(stopping.stop_token_ids)
    _require(most >= 0, "stopping.max_tokens", f"must be 0 or more, is {most}")
    _require(0 <= least <= most, "stopping.min_tokens", f"must lie between 0 and max_tokens, which is {most}")
    few = ids <= MAX_STOP_TOKEN_IDS
    _require(few, "stopping.stop_token_ids", f"takes {MAX_STOP_TOKEN_IDS} ids at most, has {ids}")
    _check_ids("stopping.stop_token_ids", stopping.stop_token_ids, vocab_size)
    _check_ids("stopping.end_ids", stopping.end_ids, vocab_size)


def _check_room(sequence: NewSequence, limits: EngineLimits) -> None:
    prompt, answer, capacity = len(sequence.prompt_ids), sequence.stopping.max_tokens, limits.max_tokens
    emitted = len(sequence.emitted_ids)
    _require(emitted <= answer, "emitted_ids", f"has {emitted} ids, more than stopping.max_tokens, which is {answer}")
    if sequence.encode:
        _require(
            prompt <= capacity, "prompt_ids", f"has {prompt} tokens; this model takes {capacity}: truncate the text"
        )
    fits = prompt + min(1, answer) <= capacity
    _require(fits, "prompt_ids", f"has {prompt} tokens; this engine takes {capacity}, prompt and answer together")
    more = f"{answer} and a prompt of {prompt} tokens are more than the {capacity} that this engine takes"
    _require(prompt + answer <= capacity, "stopping.max_tokens", more)
