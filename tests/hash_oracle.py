"""The tokens, log probabilities and vectors that the hash model gives: what every distributed test compares with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from loraplex.contracts.artifacts.hash_model import parse_hash_model
from loraplex.contracts.grammars.matching import compile_grammar, hash_vocabulary
from loraplex.contracts.options import Encode, SamplingParams, StoppingParams, TokenLogprobs
from loraplex.hash_engine import (
    hash_logprobs,
    hash_root,
    hash_vector,
    id_bytes,
    next_allowed_token,
    next_listed_token,
    next_token,
)
from loraplex.worker.engine.scheduling.grammars import GrammarState


def expected_ids(model: str, prompt_ids: Iterable[int], **options: Any) -> tuple[int, ...]:
    """Return the whole answer of the model `hash:?...`, ending token included; `options` of expected_tokens."""
    return tuple(token for token, _ in expected_tokens(model, prompt_ids, **options))


def expected_tokens(
    spec: str,
    prompt_ids: Iterable[int],
    *,
    adapter_digest: str = "",
    sampling: SamplingParams | None = None,
    stopping: StoppingParams | None = None,
    choice: int = 0,
    alternatives: int = 0,
    named: tuple[int, ...] = (),
    grammar: str = "",
) -> list[tuple[int, TokenLogprobs]]:
    """Return the whole answer like `expected_ids`, each token with its log probabilities. Raises ArtifactError."""
    model = parse_hash_model(spec)
    sampling, stopping = sampling or SamplingParams(), stopping or StoppingParams()
    ends = set() if stopping.ignore_eos else {*model.end_token_ids, *stopping.end_ids}
    ends |= set(stopping.stop_token_ids)
    state = hash_root(model, adapter_digest, sampling, choice)
    state.update(id_bytes(prompt_ids))
    matching = matching_after(spec, grammar, (), stopping) if grammar else None
    answer: list[tuple[int, TokenLogprobs]] = []
    while (answered := len(answer)) < stopping.max_tokens:
        may_end = answered >= stopping.min_tokens
        bad = bad_after(sampling.bad_word_ids, [token for token, _ in answer])
        if listed := sampling.allowed_token_ids:
            banned = () if may_end or set(listed) <= set(ends) else ends
            token = next_listed_token(model, state, answered, listed, banned)
        elif matching is None:
            token = next_token(model, state, answered, bad if may_end else ends | bad)
        else:
            allowed = matching.allowed_ids(frozenset() if may_end else frozenset(ends))
            token = next_allowed_token(model, state, answered, allowed)
            matching.advance(token)
        number = state.digest()[sampling.processed_logprobs]
        answer.append((token, hash_logprobs(model, token, number, alternatives, named)))
        if (may_end and token in ends) or (matching is not None and matching.complete):
            break
        state.update(id_bytes((token,)))
    return answer


def bad_after(words: Iterable[tuple[int, ...]], answer: Sequence[int]) -> set[int]:
    """Return the ids that would complete one of the token sequences at the end of an answer."""
    return {word[-1] for word in words if tuple(answer[len(answer) - len(word) + 1 :]) == word[:-1]}


def matching_after(spec: str, grammar: str, ids: Iterable[int], stopping: StoppingParams | None = None) -> GrammarState:
    """Return the state inside a grammar after these ids of an answer."""
    vocabulary = hash_vocabulary(parse_hash_model(spec))
    matcher = compile_grammar(vocabulary.tokens, grammar)
    state = GrammarState(matcher, vocabulary, stopping or StoppingParams())
    state.replay(ids)
    return state


def expected_prompt_logprobs(spec: str, prompt_ids: Sequence[int], alternatives: int) -> tuple[TokenLogprobs, ...]:
    """Return the log probabilities of every prompt token but the first. Raises ArtifactError."""
    model = parse_hash_model(spec)
    return tuple(hash_logprobs(model, following, following, alternatives) for following in prompt_ids[1:])


def expected_vector(
    spec: str, prompt_ids: Iterable[int], encode: Encode, *, adapter_digest: str = ""
) -> tuple[float, ...]:
    """Return the vector of a text. Raises ArtifactError."""
    return hash_vector(parse_hash_model(spec), adapter_digest, prompt_ids, encode)
