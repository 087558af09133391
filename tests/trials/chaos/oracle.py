"""The expected answers of a chaos run's requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from loraplex import hash_engine
from loraplex.contracts.artifacts.hash_model import parse_hash_model
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.hash_engine import hash_root, id_bytes, next_allowed_token, next_listed_token
from tests.hash_answers import (
    Asked,
    Expected,
    ExpectedChoice,
    ExpectedScore,
    expected_answers,
    expected_scores,
    expected_vector_of,
)
from tests.hash_formats import GRAMMARS
from tests.hash_oracle import bad_after, matching_after
from tests.trials.chaos.history import Pair, Request


def truth(model: str, request: Request, choice: int) -> ExpectedChoice:
    """Return the answer of the hash model `model` to one choice of a request."""
    return answers(model, request).choices[choice]


def answers(model: str, request: Request) -> Expected:
    """Return all answers of the hash model `model` to a request."""
    return _answers(model, _asked(request))


def scores(model: str, request: Request) -> tuple[ExpectedScore, ...]:
    """Return the scores that the hash model `model` gives to the continuations of a request."""
    endings = [tuple(one.encode()) if isinstance(one, str) else one for one in request.continuations]
    return expected_scores(model, prompt_ids_of(request), endings)


def vectors(model: str, request: Request, digest: str = "") -> list[tuple[tuple[float, ...], int]]:
    """Return the vectors that the hash model `model` gives to the texts of a request, each with its tokens.

    That of a document is its logit.
    """
    texts, digest = request.texts, digest or request.revision.digest
    if request.documents:
        return [_document(model, request.prompt, document, digest) for document in request.documents]
    if texts is None:
        return []
    inputs = [(one.first, one.second) if isinstance(one, Pair) else one for one in texts.inputs]
    return [expected_vector_of(model, given, texts.task, digest, texts.pooling) for given in inputs]


# Answers of a Rerank, of one token each, and its prompt as the hash model's template writes it.
YES, NO = "y", "n"
_RERANK = (
    "system: Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
    'the answer can only be "yes" or "no".\nuser: <Instruct>: Given a web search query, retrieve relevant passages '
    "that answer the query\n<Query>: {}\n<Document>: {}\nassistant: "
)


def _document(model: str, query: str, document: str, digest: str) -> tuple[tuple[float, ...], int]:
    ids, named = tuple(_RERANK.format(query, document).encode()), tuple(f"{YES}{NO}".encode())
    asked = Asked(ids, digest, stopping=StoppingParams(1), logprobs=2, logprob_token_ids=named)
    (_, yes), (_, no) = _answers(model, asked).choices[0].logprobs[0][1]
    return (yes - no,), len(ids)


def prompt_tokens(model: str, request: Request) -> int:
    """Return the number of prompt tokens that a request's usage counts."""
    if request.texts is not None or request.documents:
        return sum(tokens for _, tokens in vectors(model, request))
    prompt = len(prompt_ids_of(request))
    return sum(prompt + len(score.token_ids) for score in scores(model, request)) if request.continuations else prompt


def prompt_ids_of(request: Request) -> tuple[int, ...]:
    """Return the ids of a request's prompt, as the hash model reads it."""
    ids = tuple(request.prompt.encode())
    return ids[-(request.truncate_to or len(ids)) :]


@lru_cache(maxsize=64)
def _answers(model: str, asked: Asked) -> Expected:
    return expected_answers(model, asked)


def next_token(model: str, request: Request, choice: int, digest: str, so_far: Sequence[int]) -> int:
    """Return the token that the adapter `digest` would give after `so_far` of this request's answer."""
    parsed = parse_hash_model(model)
    state = hash_root(parsed, digest, _sampling(request), truth(model, request, choice).candidate)
    state.update(id_bytes([*prompt_ids_of(request), *so_far]))
    if request.allowed_token_ids:
        return next_listed_token(parsed, state, len(so_far), request.allowed_token_ids, ())
    if not request.format:
        return hash_engine.next_token(parsed, state, len(so_far), bad_after(_sampling(request).bad_word_ids, so_far))
    allowed = matching_after(model, GRAMMARS[request.format], so_far).allowed_ids(frozenset())
    return next_allowed_token(parsed, state, len(so_far), allowed)


# The activated one of a tenant's adapters, and what invokes it.
ACTIVATED, INVOCATION = "c", "<check>"


def _asked(request: Request) -> Asked:
    digest = request.revision.digest
    if request.revision.name == ACTIVATED and (at := request.prompt.rindex(INVOCATION)):
        digest += f"@{at}"
    return Asked(
        prompt_ids_of(request),
        digest,
        _sampling(request),
        StoppingParams(request.max_tokens, request.min_tokens, request.stop_token_ids, request.ignore_eos),
        request.stop,
        request.n,
        request.best_of or request.n,
        len(request.logprob_token_ids) or request.logprobs,
        request.prompt_logprobs,
        GRAMMARS[request.format],
        request.echo,
        request.keep_stop,
        request.logprob_token_ids,
    )


def _sampling(request: Request) -> SamplingParams:
    bad = tuple(ids for word in request.bad_words for ids in (tuple(word.encode()), tuple(f" {word}".encode())))
    lists = {"logit_bias": request.logit_bias, "allowed_token_ids": request.allowed_token_ids, "bad_word_ids": bad}
    processed = request.logprobs_mode == "processed_logprobs"
    return SamplingParams(processed_logprobs=processed, **lists, **request.sampling)  # type: ignore[arg-type]  # whole numbers are whole in JSON too
