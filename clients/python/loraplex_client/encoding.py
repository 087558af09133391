"""Calls about whole texts: embeddings, and the probabilities of a classifier's labels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

from loraplex.inference.v1 import inference_pb2

from loraplex_client.calls import Call, Script
from loraplex_client.connection import method
from loraplex_client.errors import InternalError, InvalidRequestError, RateLimit, rate_limits_in
from loraplex_client.generation import Timings, Usage
from loraplex_client.options import fill, weighted_adapters, with_keywords

# A text, a pair of texts, or the ids of one.
EncodeInput: TypeAlias = str | tuple[str, str] | Sequence[int]
Pooling: TypeAlias = Literal["cls", "mean", "last"]

# Maximum texts of one server call; longer lists take several, one after the other.
TEXTS_PER_CALL = 64
_POOLINGS = {
    None: inference_pb2.POOLING_UNSPECIFIED,
    "cls": inference_pb2.POOLING_CLS,
    "mean": inference_pb2.POOLING_MEAN,
    "last": inference_pb2.POOLING_LAST,
}


class EncodeOptions(TypedDict, total=False):
    """The keywords of `embed` and `classify`; those of GenerateOptions mean the same. None is the default."""

    adapter_id: str | None
    # of `embed` alone
    adapters: Mapping[str, float] | Sequence[tuple[str, float]] | None
    model: str | None
    request_id: str | None
    priority: int | None
    # cuts texts that are longer than the model takes, which are refused otherwise
    truncate: bool | None


@dataclass(frozen=True)
class Embeddings:
    """The vectors of a list of texts, in its order; times are the longest of all. See Generation for other fields."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage
    timings: Timings
    adapter_revision: str
    request_id: str
    continuations: int = 0
    adapters: tuple[tuple[str, float], ...] = ()
    rate_limits: Mapping[str, RateLimit] = field(default_factory=dict)


@dataclass(frozen=True)
class Classification:
    """A text's likeliest label, and the probability and the logit of every label."""

    label: str
    probabilities: tuple[float, ...]
    logits: tuple[float, ...]


@dataclass(frozen=True)
class Classifications:
    """The classifications of a list of texts, in its order; `labels` is the order of their numbers. See Embeddings."""

    classifications: tuple[Classification, ...]
    labels: tuple[str, ...]
    usage: Usage
    timings: Timings
    adapter_revision: str
    request_id: str
    continuations: int = 0
    rate_limits: Mapping[str, RateLimit] = field(default_factory=dict)


class EncodingCalls:
    """The methods of clients that encode whole texts."""

    @method
    @with_keywords(EncodeOptions)
    def embed(
        self,
        texts: Sequence[EncodeInput],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        timeout_s: float | None = None,
        **options: Unpack[EncodeOptions],
    ) -> Script[Embeddings]:
        """Return a vector of each text, scaled to length 1 unless `normalize` is False. Raises LoraplexError.

        A text may be a pair of texts, or a list of ids. `pooling` is the model's own by default. `timeout_s` is the
        deadline of each call of 64 texts.
        """
        if pooling not in _POOLINGS:
            raise InvalidRequestError(f"pooling: {pooling!r} is not one of cls, mean and last", field="pooling")
        vectors: list[tuple[float, ...]] = []
        parts = _Parts(texts, options)
        for spec in parts:
            request = inference_pb2.EmbedRequest(spec=spec, pooling=_POOLINGS[pooling], normalize=normalize)
            with parts.named():
                response = yield Call("Embed", request, timeout_s=timeout_s, hear=parts.hear)
            vectors += (tuple(embedding.values) for embedding in response.embeddings)
            parts.answered(response.summary, len(vectors))
        return Embeddings(tuple(vectors), **parts.summary(), adapters=tuple(parts.adapters))

    @method
    @with_keywords(EncodeOptions)
    def classify(
        self, texts: Sequence[EncodeInput], *, timeout_s: float | None = None, **options: Unpack[EncodeOptions]
    ) -> Script[Classifications]:
        """Return the probabilities of the labels of a classifier for each text. Raises LoraplexError."""
        classifications: list[Classification] = []
        labels: tuple[str, ...] = ()
        parts = _Parts(texts, options)
        for spec in parts:
            with parts.named():
                request = inference_pb2.ClassifyRequest(spec=spec)
                response = yield Call("Classify", request, timeout_s=timeout_s, hear=parts.hear)
            classifications += (
                Classification(one.label, tuple(one.probabilities), tuple(one.logits))
                for one in response.classifications
            )
            labels = tuple(response.labels)
            parts.answered(response.summary, len(classifications))
        return Classifications(tuple(classifications), labels, **parts.summary())


class _Parts:
    """The server calls for a list of texts; those after the first ask for the revisions that answered the first."""

    def __init__(self, texts: Sequence[EncodeInput], options: EncodeOptions) -> None:
        if isinstance(texts, str):
            raise InvalidRequestError("texts: give a list of texts", field="texts")
        self._texts = texts
        self._spec = inference_pb2.EncodeSpec()
        fill(self._spec, options, (*EncodeOptions.__annotations__, "timeout_s"))
        self._start = 0
        self.usage = Usage(0, 0, 0)
        self.timings = Timings(0.0, 0.0, 0.0, 0.0)
        self.revision, self.request_id = "", ""
        self.adapters: list[tuple[str, float]] = []
        self.continuations = 0
        self.rate_limits: Mapping[str, RateLimit] = {}

    def __iter__(self) -> Iterator[inference_pb2.EncodeSpec]:
        for start in range(0, max(1, len(self._texts)), TEXTS_PER_CALL):
            self._start = start
            del self._spec.inputs[:]
            for index, text in enumerate(self._texts[start : start + TEXTS_PER_CALL], start):
                self._spec.inputs.append(_input_of(index, text))
            yield self._spec

    @contextmanager
    def named(self) -> Iterator[None]:
        """Let an error of the call name the text by its place among all."""
        try:
            yield
        except InvalidRequestError as error:
            if self._start:
                error.field, error.message = map(self._renamed, (error.field, error.message))
                error.args = (error.message,)
            raise

    def summary(self) -> dict[str, Any]:
        """Return the fields that both answers have."""
        names: dict[str, Any] = {"usage": self.usage, "timings": self.timings, "adapter_revision": self.revision}
        names |= {"request_id": self.request_id, "continuations": self.continuations}
        return {**names, "rate_limits": self.rate_limits}

    def hear(self, metadata: Any) -> None:
        """Take the caller's limits of the newest call."""
        self.rate_limits = rate_limits_in(metadata)

    def _renamed(self, text: str) -> str:
        return re.sub(r"^inputs\[(\d+)\]", lambda match: f"inputs[{int(match[1]) + self._start}]", text)

    def answered(self, summary: inference_pb2.EncodeSummary, texts: int) -> None:
        """Add up what a call has cost, the one that brought the answers to the first `texts`. Raises InternalError."""
        if texts != self._start + len(self._spec.inputs):
            raise InternalError(
                f"{texts - self._start} answers to {len(self._spec.inputs)} texts", reason="WRONG_COUNT"
            )
        usage, timings = self.usage, self.timings
        self.usage = Usage(
            usage.prompt_tokens + summary.usage.prompt_tokens, usage.cached_tokens + summary.usage.cached_tokens, 0
        )
        self.timings = Timings(
            max(timings.queue_s, summary.timings.queue),
            max(timings.adapter_s, summary.timings.adapter),
            max(timings.ttft_s, summary.timings.ttft),
            0.0,
        )
        self.continuations += summary.continuations
        self.revision = summary.adapter_revision
        self.request_id = self.request_id or summary.request_id
        self.adapters = [(part.adapter, part.weight) for part in summary.adapters]
        del self._spec.adapters[:]
        if self.adapters:
            self._spec.adapters.extend(weighted_adapters([(_pinned(name), weight) for name, weight in self.adapters]))
        else:
            self._spec.adapter = _pinned(self.revision)


def _pinned(revision: str) -> str:
    """Return tenants/T/adapters/A/revisions/D as tenants/T/adapters/A@D."""
    return revision.replace("/revisions/sha256:", "@sha256:")


def _input_of(index: int, text: EncodeInput) -> inference_pb2.EncodeInput:
    if isinstance(text, str):
        return inference_pb2.EncodeInput(text=text)
    try:
        if isinstance(text, tuple) and len(text) == 2 and isinstance(text[0], str):
            return inference_pb2.EncodeInput(pair=inference_pb2.TextPair(first=text[0], second=text[1]))
        return inference_pb2.EncodeInput(token_ids=inference_pb2.TokenIds(ids=text))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"texts[{index}]: {error}", field=f"texts[{index}]") from error
