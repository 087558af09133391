"""`loraplex score`: log probabilities of continuations of a prompt."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.options import (
    ROUTER,
    TENANT,
    AdaptersOption,
    JsonOption,
    ModelOption,
    RouterOption,
    TenantOption,
    read_adapters,
)
from clients.cli.terminal import print_json, print_rows, read_stdin

if TYPE_CHECKING:
    from loraplex_client import Scores


def score(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text that the continuations follow.")],
    continuations: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]...", help="The continuations, up to 64; default: the lines of stdin."),
    ] = None,
    adapter: AdaptersOption = None,
    tenant: TenantOption = TENANT,
    model: ModelOption = "",
    router: RouterOption = ROUTER,
    as_json: JsonOption = False,
) -> None:
    """Print how likely the model finds each TEXT after PROMPT: the sum of its tokens' log probabilities.

    A TEXT follows PROMPT directly: begin it with a space where one belongs there. GREEDY is yes where the model's
    likeliest answer begins with it.

    [bold]loraplex score "The capital of France is" " Paris" " Rome"[/]
    """
    from loraplex_client import Client

    from clients.cli.failures import explained

    texts = continuations or read_stdin().splitlines()
    single, weighted = read_adapters(adapter or [])
    with explained("router", router), Client(router, tenant) as client:
        scores = client.score(prompt, texts, adapter_id=single, adapters=weighted, model=model or None)
    if as_json:
        print_json(_as_json(texts, scores))
        return
    print_rows(
        ("SUM", "TOKENS", "GREEDY", "TEXT"),
        (
            (f"{one.sum:.4f}", len(one.token_ids), "yes" if one.is_greedy else "no", text)
            for text, one in zip(texts, scores.scores, strict=True)
        ),
    )


def _as_json(texts: list[str], scores: Scores) -> dict[str, Any]:
    return {
        "scores": [{"text": text, **dataclasses.asdict(one)} for text, one in zip(texts, scores.scores, strict=True)],
        "best": scores.best,
        "adapter_revision": scores.adapter_revision,
        "adapters": [{"revision": revision, "weight": weight} for revision, weight in scores.adapters],
        "usage": dataclasses.asdict(scores.usage),
        "request_id": scores.request_id,
    }
