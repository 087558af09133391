"""Prints whole answers: several of a request, log probabilities of tokens, JSON."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from clients.cli.terminal import print_rows, printable

if TYPE_CHECKING:
    from loraplex_client import Client, Generation
    from loraplex_client.generation import Choice


def token_texts(client: Client, generation: Generation, model: str) -> dict[int, str]:
    """Return the text of each token in the answers and beside them; bytes that are no character are escaped."""
    ids = {token for choice in generation.choices for token in choice.token_ids}
    ids |= {token for choice in generation.choices for one in choice.logprobs for token, _ in one.alternatives}
    listed = sorted(ids)
    found = client.token_bytes(listed, model=model)
    return {token: data.decode(errors="backslashreplace") for token, data in zip(listed, found, strict=True)}


def print_answers(generation: Generation) -> None:
    """Print all answers, each after its number."""
    for index, choice in enumerate(generation.choices):
        text = printable(choice.text) if sys.stdout.isatty() else choice.text
        sys.stdout.write(f"[{index}] {text}\n")


def print_logprobs(generation: Generation, texts: Mapping[int, str]) -> None:
    """Print a row for each token, with its log probability and those of the likeliest."""

    def shown(token: int, logprob: float) -> str:
        return f"{texts[token]!r} {logprob:.3f}"

    several = len(generation.choices) > 1
    print_rows(
        ("answer", "token", "text", "logprob", "likeliest") if several else ("token", "text", "logprob", "likeliest"),
        (
            (
                *((str(index),) if several else ()),
                str(token),
                repr(texts[token]),
                f"{one.logprob:.3f}",
                "  ".join(shown(*alternative) for alternative in one.alternatives),
            )
            for index, choice in enumerate(generation.choices)
            for token, one in zip(choice.token_ids, choice.logprobs, strict=False)
        ),
    )


def answer_json(generation: Generation, texts: Mapping[int, str]) -> dict[str, Any]:
    """Return an answer as JSON values; with log probabilities where there are `texts` of its tokens."""
    value: dict[str, Any] = {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "stop": generation.stop,
        "adapter_revision": generation.adapter_revision,
        "adapters": [{"revision": revision, "weight": weight} for revision, weight in generation.adapters],
        "usage": dataclasses.asdict(generation.usage),
        "timings": dataclasses.asdict(generation.timings),
        "continuations": generation.continuations,
        "request_id": generation.request_id,
    }
    if len(generation.choices) > 1:
        value["choices"] = [
            {"text": choice.text, "token_ids": choice.token_ids, "finish_reason": choice.finish_reason}
            for choice in generation.choices
        ]
    if texts:
        value["logprobs"] = [[*_logprobs_json(choice, texts)] for choice in generation.choices]
    return value


def _logprobs_json(choice: Choice, texts: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    for token, one in zip(choice.token_ids, choice.logprobs, strict=False):
        yield {
            "token_id": token,
            "text": texts[token],
            "logprob": one.logprob,
            "alternatives": [
                {"token_id": other, "text": texts[other], "logprob": logprob} for other, logprob in one.alternatives
            ],
        }
