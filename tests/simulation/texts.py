"""Calls of Embed and Classify, drawn in place of other requests, and what their clients must get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from loraplex.contracts.broker.messages import AdapterRef
from loraplex.contracts.options import Pooling, Task
from loraplex.router.generation.unary_calls import Vector
from loraplex.router.request import EncodeInput, EncodeRequest, Request, Summary, TextPair
from tests.hash_answers import expected_vector_of

_LETTERS = "abcdefgh "


@dataclass(frozen=True)
class Encoded:
    """The one message of an Embed or Classify call."""

    vectors: tuple[Vector, ...]
    summary: Summary


@dataclass(frozen=True)
class TextsPlan:
    """A call and the model's vectors; where `leaves` is set, its client's deadline is not told to the router."""

    request: EncodeRequest
    expected: tuple[tuple[float, ...], ...]
    prompt_tokens: int
    revision: str
    leaves: bool

    def wrong(self, encoded: Encoded) -> list[str]:
        """Return what is wrong with an answer."""
        got = tuple(vector.values for vector in encoded.vectors)
        found = [at for at, (one, other) in enumerate(zip(got, self.expected, strict=False)) if one != other]
        wrong = [f"the vectors of texts {found} are not the model's"] if found else []
        if len(got) != len(self.expected):
            wrong.append(f"{len(got)} vectors of {len(self.expected)} texts")
        summary = encoded.summary
        if (summary.prompt_tokens, summary.adapter_revision) != (self.prompt_tokens, self.revision):
            wrong.append(f"{summary.prompt_tokens} of {self.prompt_tokens} tokens, by {summary.adapter_revision!r}")
        return wrong


def draw_texts(own: Random, old: Request, adapters: Mapping[str, AdapterRef], model: str, context: int) -> TextsPlan:
    """Draw a call with the tenant, adapter and priority of a request."""
    inputs = tuple(_draw_input(own) for _ in range(own.choice((1, 2, 5, 40))))
    truncate = own.random() < 0.3
    if truncate:
        inputs = (*inputs, tuple(own.randrange(1000) for _ in range(context + own.randint(1, 40))))
    pooling: Pooling = own.choice(("", "", "cls", "mean", "last"))
    task: Task = "embed" if pooling else own.choice(("embed", "classify"))
    request = EncodeRequest(
        tenant=old.tenant,
        task=task,
        inputs=inputs,
        fields=tuple(f"inputs[{index}]" for index in range(len(inputs))),
        pooling=pooling,
        request_id=old.request_id,
        adapter=old.adapter,
        truncate=truncate,
        priority=old.priority,
    )
    adapter = adapters.get(old.adapter)
    digest = adapter.digest if adapter else ""
    plain = [(one.first, one.second) if isinstance(one, TextPair) else one for one in inputs]
    told = [expected_vector_of(model, one, request.task, digest, request.pooling, context) for one in plain]
    return TextsPlan(
        request,
        tuple(vector for vector, _ in told),
        sum(tokens for _, tokens in told),
        adapter.revision if adapter else "",
        leaves=own.random() < 0.15,
    )


def _draw_input(own: Random) -> EncodeInput:
    text = "".join(own.choices(_LETTERS, k=own.randint(1, 30)))
    match own.random():
        case kind if kind < 0.2:
            return TextPair(text, "".join(own.choices(_LETTERS, k=own.randint(1, 9))))
        case kind if kind < 0.4:
            return tuple(own.randrange(1000) for _ in range(own.randint(1, 30)))
    return text
