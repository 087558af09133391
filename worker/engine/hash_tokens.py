"""Tokens of the hash model: each id is a hash of everything that it may depend on, so tests know every answer."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Protocol

from artifacts.base_model import HASH_LABELS
from artifacts.grammars.matching import compile_grammar
from artifacts.grammars.vocabulary import hash_vocabulary
from artifacts.hash_model import VECTOR_SIZE, HashModel, parse_hash_model
from worker.engine.scheduling.grammars import GrammarState
from worker.engine_api import Encode, Sampling, Stopping, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np

# Numbers of a request that change the logits, and all others, which only choose among them; new fields are among these.
_ADJUSTING = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_DRAWING = tuple(declared.name for declared in fields(Sampling) if declared.name not in {*_ADJUSTING, "logit_bias"})
_FLOATS = frozenset(declared.name for declared in fields(Sampling) if declared.type == "float")


class Hash(Protocol):
    """A running hash, as those of hashlib."""

    def update(self, data: bytes, /) -> None:
        """Add bytes to what is hashed."""

    def digest(self) -> bytes:
        """Return the hash of all bytes so far."""


def expected_ids(
    spec: str,
    prompt_ids: Iterable[int],
    *,
    adapter_digest: str = "",
    sampling: Sampling | None = None,
    stopping: Stopping | None = None,
    choice: int = 0,
    grammar: str = "",
) -> tuple[int, ...]:
    """Return the whole answer of the model `spec` (`hash:?...`), ending token included. Raises ArtifactError."""
    answer = expected_tokens(
        spec,
        prompt_ids,
        adapter_digest=adapter_digest,
        sampling=sampling,
        stopping=stopping,
        choice=choice,
        grammar=grammar,
    )
    return tuple(token for token, _ in answer)


def expected_tokens(
    spec: str,
    prompt_ids: Iterable[int],
    *,
    adapter_digest: str = "",
    sampling: Sampling | None = None,
    stopping: Stopping | None = None,
    choice: int = 0,
    alternatives: int = 0,
    grammar: str = "",
) -> list[tuple[int, TokenLogprobs]]:
    """Return the whole answer like `expected_ids`, each token with its log probabilities. Raises ArtifactError."""
    model = parse_hash_model(spec)
    stopping = stopping or Stopping()
    ends = set() if stopping.ignore_eos else set(model.end_token_ids)
    ends |= set(stopping.stop_token_ids)
    state = hash_root(model, adapter_digest, sampling or Sampling(), choice)
    state.update(id_bytes(prompt_ids))
    matching = matching_after(spec, grammar, (), stopping) if grammar else None
    answer: list[tuple[int, TokenLogprobs]] = []
    while (answered := len(answer)) < stopping.max_tokens:
        may_end = answered >= stopping.min_tokens
        if matching is None:
            token = next_token(model, state, answered, () if may_end else ends)
        else:
            allowed = matching.allowed_ids(frozenset() if may_end else frozenset(ends))
            token = next_allowed_token(model, state, answered, allowed)
            matching.advance(token)
        answer.append((token, hash_logprobs(model, token, state.digest()[0], alternatives)))
        if (may_end and token in ends) or (matching is not None and matching.complete):
            break
        state.update(id_bytes((token,)))
    return answer


def matching_after(spec: str, grammar: str, ids: Iterable[int], stopping: Stopping | None = None) -> GrammarState:
    """Return the state inside a grammar after these ids of an answer."""
    vocabulary = hash_vocabulary(parse_hash_model(spec))
    matcher = compile_grammar(vocabulary.tokens, grammar)
    state = GrammarState(matcher, vocabulary, hides_end=stopping is not None and stopping.ignore_eos)
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


def hash_vector(model: HashModel, adapter_digest: str, ids: Iterable[int], encode: Encode) -> tuple[float, ...]:
    """Return the numbers of a text's vector, from -1 to 1; floats of 32 bits hold them exactly."""
    root = f"{model.seed}|{adapter_digest}|{encode.task}|{encode.pooling}|{encode.pair_tokens}|"
    size = VECTOR_SIZE if encode.task == "embed" else len(HASH_LABELS)
    state = hashlib.blake2b(root.encode(), digest_size=size)
    state.update(id_bytes(ids))
    return tuple(byte / 128 - 1 for byte in state.digest())


def hash_root(model: HashModel, adapter_digest: str, sampling: Sampling, choice: int) -> Hash:
    """Return the hash of everything but the ids.

    As with a real model, temperature, limits and seed leave greedy answers as they are.
    """
    root = f"{model.seed}|{adapter_digest}|{choice}|"
    if sampling.temperature:
        root += f"{_values(sampling, _DRAWING)}|"
    if sampling.adjusts_logits:
        root += f"{_values(sampling, _ADJUSTING)}|{[(token, _wired(value)) for token, value in sampling.logit_bias]}|"
    return hashlib.blake2b(root.encode(), digest_size=8)


def _values(sampling: Sampling, names: Iterable[str]) -> list[float]:
    return [_wired(getattr(sampling, name)) if name in _FLOATS else getattr(sampling, name) for name in names]


def _wired(value: float) -> float:
    """Round a float to the 32 bits that it had on the wire."""
    return array("f", [value])[0]


def next_token(model: HashModel, state: Hash, answered: int, banned: Collection[int]) -> int:
    """Return the token after `answered` tokens; the end token comes where end_after says and nowhere else."""
    span = model.vocab
    if model.end_after:
        span -= 1
        if answered + 1 == model.end_after and span not in banned:
            return span
    token = int.from_bytes(state.digest(), "little") % span
    while banned and token in banned:
        token = (token + 1) % span
    return token


def next_allowed_token(model: HashModel, state: Hash, answered: int, allowed: np.ndarray) -> int:
    """Return the token after `answered` tokens of those that a grammar allows; there is one at least.

    The end token comes where end_after says, if it may, and where nothing else may.
    """
    if model.end_after:
        end = model.vocab - 1
        if answered + 1 == model.end_after and end in allowed:
            return end
        others = allowed[allowed != end]
        allowed = others if len(others) else allowed
    return int(allowed[int.from_bytes(state.digest(), "little") % len(allowed)])


def hash_logprobs(model: HashModel, token: int, number: int, alternatives: int) -> TokenLogprobs:
    """Return one of 16 log probabilities, chosen by `number`; the likeliest tokens are `token` and those after it."""
    logprob = -(number % 16 + 1) / 16
    likeliest = range(min(alternatives, model.vocab))
    return TokenLogprobs(logprob, tuple(((token + rank) % model.vocab, logprob - rank) for rank in likeliest))


def id_bytes(ids: Iterable[int]) -> bytes:
    """Return the ids as 32-bit numbers, to be hashed."""
    return array("I", ids).tobytes()
