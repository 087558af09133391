"""Calls about prompts alone: the number of their tokens, and the log probabilities of given continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.inference.v1 import inference_pb2

from loraplex_client.calls import Call, Script
from loraplex_client.errors import InvalidRequestError
from loraplex_client.generation import Usage
from loraplex_client.options import GenerateOptions, generate_request


@dataclass(frozen=True)
class ContinuationScore:
    """A continuation: its ids, the log probability of each, their sum, whether each is the likeliest at its place."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sum: float
    greedy: tuple[bool, ...]

    @property
    def is_greedy(self) -> bool:
        """Return whether the model's greedy answer begins with the continuation."""
        return all(self.greedy)


@dataclass(frozen=True)
class Scores:
    """The scores of a prompt's continuations, in their order; see Generation for the other fields."""

    scores: tuple[ContinuationScore, ...]
    usage: Usage
    adapter_revision: str
    request_id: str
    adapters: tuple[tuple[str, float], ...] = ()

    @property
    def best(self) -> int:
        """Return the number of the continuation with the highest sum."""
        return max(range(len(self.scores)), key=lambda index: self.scores[index].sum)


def count_tokens(prompt: str | None, options: GenerateOptions) -> Script[int]:
    """Return the number of tokens that generating from this prompt would feed to the model."""
    request = inference_pb2.CountTokensRequest(spec=generate_request(prompt, options).spec)
    response = yield Call("CountTokens", request)
    return int(response.prompt_tokens)


def score(prompt: str | None, continuations: Sequence[str | Sequence[int]], options: GenerateOptions) -> Script[Scores]:
    """Return the log probabilities of these continuations of a prompt."""
    if isinstance(continuations, str):
        raise InvalidRequestError("continuations: give a list, of texts or of ids", field="continuations")
    request = inference_pb2.ScoreRequest(
        spec=generate_request(prompt, options).spec, continuations=map(_continuation, continuations)
    )
    response = yield Call("Score", request)
    return Scores(
        scores=tuple(
            ContinuationScore(tuple(one.token_ids), tuple(one.logprobs), one.sum, tuple(one.greedy))
            for one in response.scores
        ),
        usage=Usage(response.usage.prompt_tokens, response.usage.cached_tokens, response.usage.completion_tokens),
        adapter_revision=response.adapter_revision,
        request_id=response.request_id,
        adapters=tuple((part.adapter, part.weight) for part in response.adapters),
    )


def _continuation(given: str | Sequence[int]) -> inference_pb2.Continuation:
    if isinstance(given, str):
        return inference_pb2.Continuation(text=given)
    try:
        return inference_pb2.Continuation(token_ids=inference_pb2.TokenIds(ids=given))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"continuations: {error}", field="continuations") from error
