"""The expected answers of the hash model to a whole request: every option of it, as a client must see them.

Nothing here is the router's or the worker's code but the model's own tokens, so that an option that gets lost on the
way, or after a fault, shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from loraplex.contracts.artifacts.hash_model import parse_hash_model
from loraplex.contracts.options import Encode, Pooling, SamplingParams, StoppingParams, Task, TokenLogprobs
from tests.hash_oracle import expected_prompt_logprobs, expected_tokens, expected_vector, matching_after

# A token's log probability, and the likeliest tokens at its place as (id, log probability).
Logprobs = tuple[float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True)
class Asked:
    """The parts of a request that decide its answers; the fields mean the same as in the public API."""

    prompt_ids: tuple[int, ...]
    adapter_digest: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stopping: StoppingParams = field(default_factory=StoppingParams)
    stop: tuple[str, ...] = ()
    n: int = 1
    best_of: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""
    echo: bool = False
    keep_stop: bool = False
    # As many ids as `logprobs`, where these are asked for.
    logprob_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ExpectedChoice:
    """A choice as its client gets it. `uncut`: the model's ids, before a stop string was looked for.

    `candidate`: its number among the candidates of best_of, which is the choice that the engine computed.
    """

    token_ids: tuple[int, ...]
    text: str
    reason: str
    stop: str | int | None
    logprobs: tuple[Logprobs, ...]
    uncut: tuple[int, ...]
    candidate: int


@dataclass(frozen=True)
class Expected:
    """The answers to a request. `completion_tokens` counts those of all candidates."""

    choices: tuple[ExpectedChoice, ...]
    prompt_logprobs: tuple[Logprobs, ...]
    completion_tokens: int


def expected_answers(model: str, asked: Asked) -> Expected:
    """Return what the hash model `model` (`hash:?...`) answers."""
    candidates = [_candidate(model, asked, number) for number in range(max(asked.n, asked.best_of))]
    ranked = candidates
    if asked.best_of > asked.n:  # equal ones in the order of their numbers
        ranked = sorted(candidates, key=_mean_logprob, reverse=True)
    prompt: Iterable[TokenLogprobs] = ()
    if asked.prompt_logprobs is not None:
        prompt = expected_prompt_logprobs(model, asked.prompt_ids, asked.prompt_logprobs)
    return Expected(
        tuple(_shown(candidate, asked) for candidate in ranked[: asked.n]),
        tuple(map(logprobs_of, prompt)),
        sum(len(candidate.token_ids) for candidate in candidates),
    )


@dataclass(frozen=True)
class ExpectedScore:
    """The log probabilities of a continuation; `greedy` tells whether each token is the likeliest at its place."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    greedy: tuple[bool, ...]


def expected_scores(
    model: str, prompt_ids: tuple[int, ...], continuations: Iterable[Sequence[int]]
) -> tuple[ExpectedScore, ...]:
    """Return what Score tells of the continuations of a prompt."""
    return tuple(_score(model, prompt_ids, tuple(ids)) for ids in continuations)


def expected_vector_of(
    model: str,
    given: str | tuple[str, str] | Sequence[int],
    task: Task,
    adapter_digest: str = "",
    pooling: Pooling = "",
    limit: int | None = None,
) -> tuple[tuple[float, ...], int]:
    """Return the vector of a text, a pair or ids, and the number of its tokens; one text is cut after `limit` ids."""
    match given:
        case str():
            ids, pair_tokens = [*given.encode()], 0
        case (str() as first, str() as second):
            ids, pair_tokens = [*(first + second).encode()], len(second.encode())
        case _:
            ids, pair_tokens = list(given)[:limit], 0
    encode = Encode(task, pooling, pair_tokens)
    return expected_vector(model, ids, encode, adapter_digest=adapter_digest), len(ids)


def _score(model: str, prompt_ids: tuple[int, ...], ids: tuple[int, ...]) -> ExpectedScore:
    told = expected_prompt_logprobs(model, (*prompt_ids, *ids), 1)[-len(ids) :]
    greedy = tuple(token.alternatives[0][0] == made for made, token in zip(ids, told, strict=True))
    return ExpectedScore(ids, tuple(token.logprob for token in told), greedy)


def text_of(token: int) -> str:
    """Return the text of a token: a byte's character, or the id."""
    return chr(token) if token < 256 else f"<{token}>"


def logprobs_of(token: TokenLogprobs) -> Logprobs:
    """Return log probabilities as plain tuples."""
    return token.logprob, tuple(token.alternatives)


def _candidate(model: str, asked: Asked, number: int) -> ExpectedChoice:
    made = expected_tokens(
        model,
        asked.prompt_ids,
        adapter_digest=asked.adapter_digest,
        sampling=asked.sampling,
        stopping=asked.stopping,
        choice=number,
        alternatives=asked.logprobs or 0,
        named=asked.logprob_token_ids,
        grammar=asked.grammar,
    )
    ids = tuple(token for token, _ in made)
    reason, stop = _end(model, asked.stopping, ids)
    silent = reason != "length"
    if not silent and asked.grammar and matching_after(model, asked.grammar, ids, asked.stopping).complete:
        reason = "end"
    kept, text = len(ids), "".join(map(text_of, ids[:-1] if silent else ids))
    # A stop string ends the answer as soon as it is complete: at the first token after which the text has one.
    shown = ""
    for count, token in enumerate(ids, start=1):
        if count == len(ids) and silent:  # an id without text
            break
        shown += text_of(token)
        found = [(at, -len(string), string) for string in asked.stop if (at := shown.find(string)) >= 0]
        if found:
            at, _, stop = min(found)
            at += len(stop) if asked.keep_stop else 0
            kept, text, reason = _tokens_before(ids, at), shown[:at], "stop"
            break
    logprobs = tuple(logprobs_of(token) for _, token in made[:kept])
    return ExpectedChoice(ids[:kept], text, reason, stop, logprobs, ids, number)


def _end(model: str, stopping: StoppingParams, ids: Sequence[int]) -> tuple[str, str | int | None]:
    """Return the reason of the model's own end, and the stop token."""
    if ids and len(ids) > stopping.min_tokens:
        if ids[-1] in parse_hash_model(model).end_token_ids and not stopping.ignore_eos:
            return "end", None
        if ids[-1] in stopping.stop_token_ids:
            return "stop", ids[-1]
    return "length", None


def _tokens_before(ids: Sequence[int], at: int) -> int:
    """Return the number of tokens whose text begins before this character."""
    kept, length = 0, 0
    while kept < len(ids) and length < at:
        length += len(text_of(ids[kept]))
        kept += 1
    return kept


def _mean_logprob(choice: ExpectedChoice) -> float:
    values = [logprob for logprob, _ in choice.logprobs]
    return sum(values) / len(values) if values else float("-inf")


def _shown(choice: ExpectedChoice, asked: Asked) -> ExpectedChoice:
    text = "".join(map(text_of, asked.prompt_ids)) + choice.text if asked.echo else choice.text
    return replace(choice, text=text, logprobs=choice.logprobs if asked.logprobs is not None else ())
