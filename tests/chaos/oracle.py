"""The expected answers of a chaos run's requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tests.chaos.history import Request
from tests.hash_answers import Asked, Expected, ExpectedChoice, expected_answers
from worker.engine.hash_tokens import expected_ids
from worker.engine_api import Sampling, Stopping


def truth(model: str, request: Request, choice: int) -> ExpectedChoice:
    """Return the answer of the hash model `model` to one choice of a request."""
    return answers(model, request).choices[choice]


def answers(model: str, request: Request) -> Expected:
    """Return all answers of the hash model `model` to a request."""
    return _answers(model, _asked(request))


@lru_cache(maxsize=64)
def _answers(model: str, asked: Asked) -> Expected:
    return expected_answers(model, asked)


def next_token(model: str, request: Request, choice: int, digest: str, so_far: Sequence[int]) -> int:
    """Return the token that the adapter `digest` would give after `so_far` of this request's answer."""
    (token,) = expected_ids(
        model,
        [*request.prompt.encode(), *so_far],
        adapter_digest=digest,
        sampling=_sampling(request),
        stopping=Stopping(max_tokens=1),
        choice=truth(model, request, choice).candidate,
    )
    return token


def _asked(request: Request) -> Asked:
    return Asked(
        tuple(request.prompt.encode()),
        request.revision.digest,
        _sampling(request),
        Stopping(request.max_tokens, request.min_tokens, request.stop_token_ids, request.ignore_eos),
        request.stop,
        request.n,
        request.best_of or request.n,
        request.logprobs,
        request.prompt_logprobs,
    )


def _sampling(request: Request) -> Sampling:
    return Sampling(logit_bias=request.logit_bias, **request.sampling)  # type: ignore[arg-type]  # whole numbers are whole in JSON too
