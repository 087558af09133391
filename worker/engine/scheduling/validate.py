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
    if not sequence.sequence_id:
        raise SequenceRefusedError("sequence_id", "must not be empty")
    if not sequence.prompt_ids:
        raise SequenceRefusedError("prompt_ids", "must not be empty")
    _check_ids("prompt_ids", sequence.prompt_ids, limits.vocab_size)
    _check_ids("emitted_ids", sequence.emitted_ids, limits.vocab_size)
    _check_sampling(sequence.sampling, limits.vocab_size)
    for field, count in (("logprobs", sequence.logprobs), ("prompt_logprobs", sequence.prompt_logprobs)):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise SequenceRefusedError(field, f"must lie between 0 and {MAX_LOGPROBS}, is {count}")
    _check_stopping(sequence.stopping, limits.vocab_size)
    _check_room(sequence, limits)
    if sequence.choice < 0:
        raise SequenceRefusedError("choice", f"must not be negative, is {sequence.choice}")
    if not 0 < sequence.weight < math.inf:
        raise SequenceRefusedError("weight", f"must be above 0, is {sequence.weight}")
    if abs(sequence.priority) > MAX_PRIORITY:
        raise SequenceRefusedError(
            "priority", f"must lie between -{MAX_PRIORITY} and {MAX_PRIORITY}, is {sequence.priority}"
        )
    if len(sequence.grammar) > GRAMMAR_BYTES:
        raise SequenceRefusedError(
            "format", f"its grammar has {len(sequence.grammar)} characters; at most {GRAMMAR_BYTES}"
        )
    if sequence.adapter:
        _check_adapter(sequence.adapter, limits)
    if sequence.encode:
        _check_encode(sequence, sequence.encode)


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    ids = tuple(ids)
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise SequenceRefusedError(field, f"{bad} is not a token id of this model, which has ids 0 to {vocab_size - 1}")


def _check_adapter(adapter: AdapterSource, limits: EngineLimits) -> None:
    if not adapter.digest:
        raise SequenceRefusedError("adapter.digest", "must not be empty")
    if not limits.adapter_slots:
        raise SequenceRefusedError("adapter", "this engine has no adapter slots")
    for part in adapter.parts:
        if not math.isfinite(part.weight) or not part.weight:
            raise SequenceRefusedError("adapter.parts", f"a weight must be finite and not 0, is {part.weight}")


def _check_encode(sequence: NewSequence, encode: Encode) -> None:
    if sequence.stopping.max_tokens or sequence.prompt_logprobs is not None:
        raise SequenceRefusedError("encode", "goes with max_tokens 0 and without log probabilities of the prompt")
    if not 0 <= encode.pair_tokens <= len(sequence.prompt_ids):
        raise SequenceRefusedError(
            "encode.pair_tokens", f"must lie between 0 and the prompt's length, is {encode.pair_tokens}"
        )


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    try:
        check_sampling(sampling)
    except OutOfRangeError as error:
        raise SequenceRefusedError(f"sampling.{error.field}", error.message) from error
    if not 0 <= sampling.seed < 1 << 64:
        raise SequenceRefusedError("sampling.seed", f"must be 0 or more and below 2^64, is {sampling.seed}")
    _check_ids("sampling.logit_bias", (token for token, _ in sampling.logit_bias), vocab_size)


def _check_stopping(stopping: StoppingParams, vocab_size: int) -> None:
    if stopping.max_tokens < 0:
        raise SequenceRefusedError("stopping.max_tokens", f"must be 0 or more, is {stopping.max_tokens}")
    if not 0 <= stopping.min_tokens <= stopping.max_tokens:
        raise SequenceRefusedError(
            "stopping.min_tokens", f"must lie between 0 and max_tokens, which is {stopping.max_tokens}"
        )
    if len(stopping.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise SequenceRefusedError(
            "stopping.stop_token_ids", f"takes {MAX_STOP_TOKEN_IDS} ids at most, has {len(stopping.stop_token_ids)}"
        )
    _check_ids("stopping.stop_token_ids", stopping.stop_token_ids, vocab_size)


def _check_room(sequence: NewSequence, limits: EngineLimits) -> None:
    prompt, answer = len(sequence.prompt_ids), sequence.stopping.max_tokens
    if len(sequence.emitted_ids) > answer:
        raise SequenceRefusedError(
            "emitted_ids", f"has {len(sequence.emitted_ids)} ids, more than stopping.max_tokens, which is {answer}"
        )
    capacity = limits.max_tokens
    if sequence.encode and prompt > capacity:
        raise SequenceRefusedError("prompt_ids", f"has {prompt} tokens; this model takes {capacity}: truncate the text")
    if prompt + min(1, answer) > capacity:
        raise SequenceRefusedError(
            "prompt_ids", f"has {prompt} tokens; this engine takes {capacity}, prompt and answer together"
        )
    if prompt + answer > capacity:
        raise SequenceRefusedError(
            "stopping.max_tokens",
            f"{answer} and a prompt of {prompt} tokens are more than the {capacity} that this engine takes",
        )
