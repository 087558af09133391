"""Checks every sequence that an engine gets, though its sender may have checked it as well."""

from __future__ import annotations

import math
from collections.abc import Iterable

from grammars.build import GRAMMAR_BYTES
from options import Encode, OutOfRangeError, SamplingParams, StoppingParams, check_sampling
from worker.engine_api import AdapterSource, EngineLimits, NewSequence, SequenceRefusedError

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
    for field, count in (("logprobs", sequence.logprobs), ("prompt_logprobs", sequence.prompt_logprobs)):
        _require(
            count is None or 0 <= count <= MAX_LOGPROBS, field, f"must lie between 0 and {MAX_LOGPROBS}, is {count}"
        )
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


def _check_stopping(stopping: StoppingParams, vocab_size: int) -> None:
    most, least, ids = stopping.max_tokens, stopping.min_tokens, len(stopping.stop_token_ids)
    _require(most >= 0, "stopping.max_tokens", f"must be 0 or more, is {most}")
    _require(0 <= least <= most, "stopping.min_tokens", f"must lie between 0 and max_tokens, which is {most}")
    few = ids <= MAX_STOP_TOKEN_IDS
    _require(few, "stopping.stop_token_ids", f"takes {MAX_STOP_TOKEN_IDS} ids at most, has {ids}")
    _check_ids("stopping.stop_token_ids", stopping.stop_token_ids, vocab_size)


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
