"""Tokens of the hash model: each id is a hash of everything that it may depend on, so tests know every answer."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable
from typing import Protocol

from artifacts.hash_model import HashModel, parse_hash_model
from worker.engine_api import Sampling, Stopping, TokenLogprobs


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
) -> tuple[int, ...]:
    """Return the whole answer of the model `spec` (`hash:?...`), ending token included. Raises ArtifactError."""
    model = parse_hash_model(spec)
    stopping = stopping or Stopping()
    ends = set() if stopping.ignore_eos else set(model.end_token_ids)
    ends |= set(stopping.stop_token_ids)
    state = hash_root(model, adapter_digest, sampling or Sampling(), choice)
    state.update(id_bytes(prompt_ids))
    answer: list[int] = []
    while len(answer) < stopping.max_tokens:
        may_end = len(answer) >= stopping.min_tokens
        token = next_token(model, state, len(answer), () if may_end else ends)
        answer.append(token)
        if may_end and token in ends:
            break
        state.update(id_bytes((token,)))
    return tuple(answer)


def hash_root(model: HashModel, adapter_digest: str, sampling: Sampling, choice: int) -> Hash:
    """Return the hash of everything but the ids.

    As with a real model, temperature, limits and seed leave greedy answers as they are.
    """
    root = f"{model.seed}|{adapter_digest}|{choice}|"
    if sampling.temperature:
        limits = _wired(sampling.temperature, sampling.top_p, sampling.min_p, sampling.typical_p)
        root += f"{limits}|{sampling.top_k}|{sampling.seed}|"
    if sampling.adjusts_logits:
        penalties = _wired(sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        bias = [(token, *_wired(value)) for token, value in sampling.logit_bias]
        root += f"{penalties}|{bias}|"
    return hashlib.blake2b(root.encode(), digest_size=8)


def _wired(*floats: float) -> list[float]:
    """Round floats to the 32 bits that they had on the wire."""
    return array("f", floats).tolist()


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


def hash_logprobs(model: HashModel, token: int, number: int, alternatives: int) -> TokenLogprobs:
    """Return one of 16 log probabilities, chosen by `number`; the likeliest tokens are `token` and those after it."""
    logprob = -(number % 16 + 1) / 16
    likeliest = range(min(alternatives, model.vocab))
    return TokenLogprobs(logprob, tuple(((token + rank) % model.vocab, logprob - rank) for rank in likeliest))


def id_bytes(ids: Iterable[int]) -> bytes:
    """Return the ids as 32-bit numbers, to be hashed."""
    return array("I", ids).tobytes()
