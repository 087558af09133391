"""Conversion of the messages of Score, with every check that needs only the message."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.inference.v1 import inference_pb2 as pb

from router.generation.scoring import ContinuationScore
from router.request import Summary
from rpc.errors import InvalidField

# Maximum continuations of a call.
CONTINUATIONS = 64
# Fields of a request that say how an answer is made: a score has none.
_OF_ANSWERS = frozenset(
    {"sampling", "stopping", "output", "json_schema", "regex", "grammar", "choices", "json_style"}
)  # fmt: skip


def read_continuations(request: pb.ScoreRequest) -> list[str | tuple[int, ...]]:
    """Return the continuations: texts, or ids. Raises InvalidField."""
    for field, _ in request.spec.ListFields():
        if field.name in _OF_ANSWERS:
            raise InvalidField(field.name, "concerns an answer, and Score makes none; leave it unset")
    if not 1 <= len(request.continuations) <= CONTINUATIONS:
        count = len(request.continuations)
        raise InvalidField("continuations", f"{count} continuations; give 1 to {CONTINUATIONS}")
    return [_read(index, one) for index, one in enumerate(request.continuations)]


def _read(index: int, continuation: pb.Continuation) -> str | tuple[int, ...]:
    match continuation.WhichOneof("continuation"):
        case "text" if continuation.text:
            return continuation.text
        case "token_ids" if continuation.token_ids.ids:
            return tuple(continuation.token_ids.ids)
        case None:
            raise InvalidField(f"continuations[{index}]", "give one of text and token_ids")
        case kind:
            raise InvalidField(f"continuations[{index}].{kind}", "is empty")


def write_scores(scores: Sequence[ContinuationScore], summary: Summary) -> pb.ScoreResponse:
    """Convert the answer of a call."""
    return pb.ScoreResponse(
        scores=[
            pb.ContinuationScore(
                token_ids=score.token_ids, logprobs=score.logprobs, sum=sum(score.logprobs), greedy=score.greedy
            )
            for score in scores
        ],
        adapter_revision=summary.adapter_revision,
        adapters=[pb.WeightedAdapter(adapter=part.adapter, weight=part.weight) for part in summary.adapters],
        usage=pb.Usage(prompt_tokens=summary.prompt_tokens, cached_tokens=summary.cached_tokens),
        request_id=summary.request_id,
    )
