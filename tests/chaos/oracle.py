"""The expected answers: the hash model's tokens, cut where a stop string begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.text.tokenizer import HashText
from tests.chaos.history import Request
from worker.engine.hash_tokens import expected_ids
from worker.engine_api import Sampling, Stopping

_TEXT = HashText(0)


@dataclass(frozen=True)
class Truth:
    """A choice of an expected answer. `uncut`: the model's own tokens, before a stop string was looked for."""

    token_ids: tuple[int, ...]
    text: str
    reason: str
    stop: str | int | None
    uncut: tuple[int, ...]


def truth(model: str, request: Request, choice: int) -> Truth:
    """The answer of the hash model `model` to one choice of a request."""
    stopping = Stopping(request.max_tokens, stop_token_ids=request.stop_token_ids)
    ids = expected_ids(
        model,
        list(request.prompt.encode()),
        adapter_digest=request.revision.digest,
        sampling=_sampling(request),
        stopping=stopping,
        choice=choice,
    )
    text = ""
    for count, token in enumerate(ids, start=1):
        if count == len(ids) and token in request.stop_token_ids:  # an id without text
            return Truth(ids, text, "stop", token, ids)
        text += text_of(token)
        found = [(at, -len(stop), stop) for stop in request.stop if (at := text.find(stop)) >= 0]
        if found:
            at, _, stop = min(found)
            return Truth(_before(ids, at), text[:at], "stop", stop, ids)
    return Truth(ids, text, "length", None, ids)


def next_token(model: str, request: Request, choice: int, digest: str, so_far: Sequence[int]) -> int:
    """The token that the adapter `digest` would give after `so_far` of this request's answer."""
    (token,) = expected_ids(
        model,
        [*request.prompt.encode(), *so_far],
        adapter_digest=digest,
        sampling=_sampling(request),
        stopping=Stopping(max_tokens=1),
        choice=choice,
    )
    return token


def text_of(token: int) -> str:
    """Return the text of a token."""
    return _TEXT.push(token)


def _before(ids: Sequence[int], at: int) -> tuple[int, ...]:
    """The tokens whose text begins before this character."""
    kept, length = 0, 0
    while kept < len(ids) and length < at:
        length += len(text_of(ids[kept]))
        kept += 1
    return tuple(ids[:kept])


def _sampling(request: Request) -> Sampling:
    return Sampling(**request.sampling)  # type: ignore[arg-type]  # whole numbers are whole in JSON too
