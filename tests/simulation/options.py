"""Every option of a request that is served, drawn from a seed: what a fault must not change."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

from loraplex.contracts.artifacts.activation import INVOCATION_FIELD, last_occurrence
from loraplex.contracts.artifacts.names import sha256_json
from loraplex.contracts.broker.messages import AdapterRef
from loraplex.contracts.options import RANGES, SamplingParams, StoppingParams
from loraplex.router.request import PromptOptions, Request
from tests.hash_answers import Asked, expected_answers, text_of
from tests.hash_formats import ASCII_CALLS, FORMATS, GRAMMARS, or_calls

# An activated adapter, and what its store has of it.
INVOCATION = (901, 902)
CHECKS = AdapterRef("tenants/one/adapters/checks@1", sha256_json("checks"), 8, 100_000)
CHECKS_CONFIG = json.dumps({INVOCATION_FIELD: INVOCATION}).encode()


def draw_activated(own: Random, request: Request) -> Request:
    """Make a quarter of the base model's requests those of an activated adapter, most of which invoke it."""
    if request.adapter or own.random() >= 1 / 4:
        return request
    assert isinstance(request.prompt, tuple)
    at = own.randint(0, len(request.prompt))
    invocation = INVOCATION if own.random() < 0.8 else ()
    prompt = (*request.prompt[:at], *invocation, *request.prompt[at:])
    return replace(request, adapter="checks", prompt=prompt, allow_inactive=True)


def activated(request: Request) -> bool | None:
    """Return what the summary says of a request's adapter."""
    return last_occurrence(INVOCATION, prompt_ids_of(request)) is not None if request.adapter == "checks" else None


def asked_of(request: Request, adapter_digest: str) -> Asked:
    """Return the parts of a request that decide its answers."""
    if request.adapter == "checks":
        at = last_occurrence(INVOCATION, prompt_ids_of(request))
        adapter_digest = "" if at is None else f"{CHECKS.digest}@{at}" if at else CHECKS.digest
    stopping = request.stopping
    assert stopping.max_tokens is not None
    assert request.seed is not None
    return Asked(
        prompt_ids_of(request),
        adapter_digest,
        replace(request.sampling, seed=request.seed),
        StoppingParams(stopping.max_tokens, stopping.min_tokens, stopping.stop_token_ids, stopping.ignore_eos),
        stopping.stop,
        request.n,
        request.best_of,
        request.logprobs,
        request.prompt_logprobs,
        request.grammar,
        request.echo,
        request.keep_stop,
        request.logprob_token_ids,
    )


def prompt_ids_of(request: Request) -> tuple[int, ...]:
    """Return the ids of a request's prompt, as its job has them."""
    assert isinstance(request.prompt, (str, tuple)), "no chats are drawn"
    ids = tuple(request.prompt.encode()) if isinstance(request.prompt, str) else request.prompt
    return ids[-(request.prompt_options.truncate_to or len(ids)) :]


def draw_options(chance: Random, request: Request, adapter_digest: str, model: str, *, candidates: bool) -> Request:
    """Return the request with options drawn by chance; `candidates`: best_of as well, which takes more rows."""
    most = request.stopping.max_tokens or 0
    assert isinstance(request.prompt, tuple)
    truncate_to = chance.randint(1, len(request.prompt) + 2) if chance.random() < 0.1 else None
    request = replace(
        request,
        sampling=_sampling(chance, request.sampling),
        stopping=replace(
            request.stopping,
            min_tokens=chance.randint(0, most) if chance.random() < 0.2 else 0,
            ignore_eos=chance.random() < 0.2,
        ),
        best_of=request.n + (chance.choice((0, 0, 0, 1, 2)) if candidates else 0),
        logprobs=chance.choice((None, None, 0, 3)),
        prompt_logprobs=chance.choice((None, None, 0, 2)),
        stream_interval=chance.choice((1, 1, 1, 2, 5)),
        skip_special_tokens=chance.random() < 0.8,
        echo=chance.random() < 0.2,
        prompt_options=PromptOptions(truncate_to=truncate_to),
    )
    # Of its own chance, so that older seeds draw what they drew before there were formats.
    own = Random(f"format {request.prompt}")
    if own.random() < 0.15:
        field = own.choice(list(FORMATS))
        calls = Random(f"calls {request.prompt}").choice((None, *ASCII_CALLS))
        grammar = or_calls(GRAMMARS[field], calls) if calls else GRAMMARS[field]
        request = replace(request, format_field=field, grammar=grammar)
    elif own.random() < 0.1:
        allowed = tuple(sorted(own.sample(range(1000), own.choice((1, 3, 50)))))
        request = replace(request, sampling=replace(request.sampling, allowed_token_ids=allowed))
    elif own.random() < 0.15:
        request = _with_bad_words(own, request, adapter_digest, model)
    if candidates and chance.random() < 0.05:  # the prompt's log probabilities alone
        return replace(request, stopping=replace(request.stopping, max_tokens=0, min_tokens=0), prompt_logprobs=1)
    named = Random(f"named {request.prompt}")
    if named.random() < 0.1:
        ids = tuple(named.sample(range(1000), named.choice((1, 3, 40))))
        request = replace(request, logprobs=len(ids), logprob_token_ids=ids)
    if named.random() < 0.2:
        request = replace(request, sampling=replace(request.sampling, processed_logprobs=True))
    keeps = Random(f"keep {request.prompt}").random() < 0.3
    drafts = Random(f"drafts {request.prompt}").random() < 0.7
    request = replace(_with_stop(chance, request, adapter_digest, model), keep_stop=keeps, speculate=drafts)
    return _with_text(request) if candidates else request


def _with_bad_words(own: Random, request: Request, adapter_digest: str, model: str) -> Request:
    """Forbid parts of the answer that would come, and of the one that comes instead."""
    sampling = request.sampling
    for _ in range(3):
        forbidden = replace(request, sampling=sampling)
        ids = own.choice(expected_answers(model, asked_of(forbidden, adapter_digest)).choices).uncut
        at = own.randrange(len(ids))
        words = (*sampling.bad_word_ids, tuple(ids[at : at + own.choice((1, 2, 3))]))
        sampling = replace(sampling, bad_word_ids=words)
    return replace(request, sampling=sampling)


def _with_text(request: Request) -> Request:
    """Make the prompt of every fourth request a text, with its options; not where its answer decided of a stop."""
    own = Random(f"text {request.prompt}")
    if request.stopping.stop or request.stopping.stop_token_ids or own.random() < 0.75:
        return request
    options = replace(
        request.prompt_options,
        add_special_tokens=own.choice((None, False, True)),
        parse_special_tokens=own.choice((None, False, True)),
    )
    text = "".join(chr(ord("a") + token % 26) for token in prompt_ids_of(request))
    return replace(request, prompt=text, prompt_field="prompt", prompt_options=options)


def _sampling(chance: Random, sampling: SamplingParams) -> SamplingParams:
    """Draw each parameter once in seven requests; those that are drawn already stay."""
    drawn: dict[str, Any] = {}
    for name, accepted in RANGES.items():
        if chance.random() < 1 / 7 and getattr(sampling, name) == getattr(SamplingParams(), name):
            largest = min(accepted.most, accepted.least + 4)
            value = chance.uniform(accepted.least + 0.01, largest)
            drawn[name] = round(value) if isinstance(getattr(sampling, name), int) else value
    biased = sorted(chance.sample(range(1000), 3)) if chance.random() < 1 / 7 else []
    return replace(sampling, logit_bias=tuple((token, chance.uniform(-5, 5)) for token in biased), **drawn)


def _with_stop(chance: Random, request: Request, adapter_digest: str, model: str) -> Request:
    """Give three in ten requests a stop string or a stop token that one of their candidates comes to."""
    kind = chance.random()
    if kind > 0.3:
        return request
    answers = expected_answers(model, asked_of(request, adapter_digest)).choices
    ids = chance.choice(answers).uncut
    at = chance.randrange(len(ids))
    if kind < 0.1:
        return replace(request, stopping=replace(request.stopping, stop_token_ids=(ids[at],)))
    # A stop string that begins in the middle of a token holds back the text before it.
    whole = "".join(map(text_of, ids[at : at + chance.choice((1, 2, 3))]))
    string = whole[chance.choice((0, 0, 2)) :] or whole
    return replace(request, stopping=replace(request.stopping, stop=(string,)))
