"""LoRAX's parameters and responses, under LoRAX's names."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
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
    # Puts the whole prompt in front of the text, also where `truncate` cuts it.
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
    # A JSON schema, as ResponseFormat or {"type": "json_object", "schema": ...}.
    response_format: ResponseFormat | Mapping[str, Any] | None
    # Instead of adapter_id, as MergedAdapters or a mapping of its fields.
    merged_adapters: MergedAdapters | Mapping[str, Any] | None
    # Cuts a longer prompt from the left to so many tokens.
    truncate: int | None
    # Refused, unless the value asks for nothing.
    watermark: bool
    decoder_input_details: bool


class ResponseFormatType(enum.StrEnum):
    """The kind of a format."""

    json_object = "json_object"


@dataclass(frozen=True)
class ResponseFormat:
    """The format of an answer: JSON of a schema, or any object."""

    type: ResponseFormatType = ResponseFormatType.json_object
    schema: Mapping[str, Any] | str | None = None


class MergeStrategy(enum.StrEnum):
    """LoRAX's strategies; `linear` is served."""

    LINEAR = "linear"
    TIES = "ties"
    DARE_LINEAR = "dare_linear"
    DARE_TIES = "dare_ties"


@dataclass(frozen=True)
class MergedAdapters:
    """Several adapters in one request: the base model with the weighted sum of what these add to it."""

    ids: Sequence[str]
    weights: Sequence[float]
    merge_strategy: MergeStrategy | str | None = None
    density: float | None = None
    majority_sign_method: str | None = None


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
