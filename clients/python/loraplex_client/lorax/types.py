"""LoRAX's parameters and responses, under LoRAX's names."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict


class Parameters(TypedDict, total=False):
    """LoRAX's keywords. A request samples if `do_sample` is true or a value that shapes sampling is given."""

    do_sample: bool
    # The default is 20.
    max_new_tokens: int | None
    ignore_eos_token: bool
    best_of: int | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    # Puts the prompt in front of the text.
    return_full_text: bool
    seed: int | None
    stop_sequences: Sequence[str] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    typical_p: float | None
    return_k_alternatives: int | None
    details: bool
    # Accepted and ignored.
    api_token: str | None
    # Refused, unless the value asks for nothing.
    truncate: int | None
    watermark: bool
    response_format: Any
    merged_adapters: Any
    decoder_input_details: bool


class FinishReason(enum.StrEnum):
    """The reason of an answer's end."""

    Length = "length"
    EndOfSequenceToken = "eos_token"
    StopSequence = "stop_sequence"


@dataclass(frozen=True)
class AlternativeToken:
    """Another likely token at a token's place; its text is not known."""

    id: int
    logprob: float
    text: str = ""


@dataclass(frozen=True)
class Token:
    """A token of the answer; special: not part of its text. The id of a stop string is -1."""

    id: int
    text: str
    logprob: float
    special: bool
    alternative_tokens: tuple[AlternativeToken, ...] | None = None
    skipped: bool = False


@dataclass(frozen=True)
class StreamDetails:
    """The figures at the end of a stream."""

    finish_reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    seed: int | None = None


@dataclass(frozen=True)
class Details(StreamDetails):
    """The figures of an answer, and its tokens."""

    tokens: tuple[Token, ...] = ()
    prefill: tuple[Any, ...] = ()
    skipped_tokens: int = 0
    best_of_sequences: None = None


@dataclass(frozen=True)
class Response:
    """An answer; a stop string that ended it is part of the text."""

    generated_text: str
    details: Details | None = None


@dataclass(frozen=True)
class StreamResponse:
    """A token; the last has the whole text and the details."""

    token: Token
    generated_text: str | None = None
    details: StreamDetails | None = None
