"""`loraplex embed`, `classify`, `rerank`, `score` and `tokens`: what a model computes of texts without answering."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from loraplex.cli.options import (
    ROUTER,
    TENANT,
    AdapterOption,
    AdaptersOption,
    JsonOption,
    ModelOption,
    RouterOption,
    TenantOption,
    read_adapters,
)
from loraplex.cli.service import explained
from loraplex.cli.terminal import out, print_json, print_rows, read_stdin

if TYPE_CHECKING:
    from loraplex_client import Classifications, Embeddings, Ranking, Scores

TextsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[TEXT]...", help="The texts; default: the lines of stdin.")
]
TruncateOption = Annotated[bool, typer.Option("--truncate", help="Cut texts that are longer than the model takes.")]
# Maximum number of a vector's numbers that are shown at a terminal.
_SHOWN = 6


def embed(  # noqa: PLR0913, PLR0917  # one parameter a flag
    texts: TextsArgument = None,
    adapter: AdaptersOption = None,
    pooling: Annotated[
        Literal["cls", "mean", "last"] | None, typer.Option(help="Pooling; default: the model's.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not scale the vectors to length 1.")] = False,
    truncate: TruncateOption = False,
    tenant: TenantOption = TENANT,
    model: ModelOption = "",
    router: RouterOption = ROUTER,
    as_json: JsonOption = False,
) -> None:
    """Print the embedding of each TEXT, at a terminal its first numbers.

    [bold]loraplex embed "first text" "second text" --json[/]
    """
    from loraplex_client import Client

    inputs = texts or read_stdin().splitlines()
    single, weighted = read_adapters(adapter or [])
    with explained("router", router), Client(router, tenant) as client:
        embeddings = client.embed(
            inputs,
            pooling=pooling,
            normalize=not raw,
            adapter_id=single,
            adapters=weighted,
            model=model or None,
            truncate=truncate,
        )
    if as_json:
        vectors = zip(inputs, embeddings.vectors, strict=True)
        print_json(
            {"embeddings": [{"text": text, "vector": vector} for text, vector in vectors], **_summary_json(embeddings)}
        )
        return
    for vector in embeddings.vectors:
        shown = vector[:_SHOWN] if out().is_terminal else vector
        more = f" ... ({len(vector)} numbers)" if len(shown) < len(vector) else ""
        out().print(" ".join(f"{value:.6g}" for value in shown) + more, markup=False, highlight=False, soft_wrap=True)


def classify(
    texts: TextsArgument = None,
    adapter: AdapterOption = "",
    truncate: TruncateOption = False,
    tenant: TenantOption = TENANT,
    model: ModelOption = "",
    router: RouterOption = ROUTER,
    as_json: JsonOption = False,
) -> None:
    """Print the likeliest label of each TEXT and its probability.

    [bold]loraplex classify "I like it" --adapter mood[/]
    """
    from loraplex_client import Client

    inputs = texts or read_stdin().splitlines()
    with explained("router", router), Client(router, tenant) as client:
        classifications = client.classify(inputs, adapter_id=adapter or None, model=model or None, truncate=truncate)
    if as_json:
        pairs = zip(inputs, classifications.classifications, strict=True)
        labelled = [{"text": text, **vars(one)} for text, one in pairs]
        print_json({"classifications": labelled, "labels": classifications.labels, **_summary_json(classifications)})
        return
    print_rows(
        ("LABEL", "PROBABILITY", "TEXT"),
        (
            (one.label, f"{one.probabilities[classifications.labels.index(one.label)]:.4f}", text)
            for text, one in zip(inputs, classifications.classifications, strict=True)
        ),
    )


def rerank(  # noqa: PLR0913, PLR0917  # one parameter a flag
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The text that the documents are for.")],
    documents: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DOCUMENT]...", help="The documents, up to 1,000; default: the lines of stdin."),
    ] = None,
    top: Annotated[int | None, typer.Option("--top", min=1, metavar="N", help="Print the N best alone.")] = None,
    adapter: AdaptersOption = None,
    instruction: Annotated[str, typer.Option(help="What a document has to do for a query.")] = "",
    yes: Annotated[str, typer.Option(help="A decoder's answer for a document that fits, of one token.")] = "",
    no: Annotated[str, typer.Option(help="Its answer for one that does not.")] = "",
    truncate: TruncateOption = False,
    tenant: TenantOption = TENANT,
    model: ModelOption = "",
    router: RouterOption = ROUTER,
    as_json: JsonOption = False,
) -> None:
    """Print each DOCUMENT with how well it fits QUERY, the best first.

    [bold]loraplex rerank "capital of France" "Paris is the capital." "Rome is old." --top 1[/]
    """
    from loraplex_client import Client

    texts = documents or read_stdin().splitlines()
    single, weighted = read_adapters(adapter or [])
    with explained("router", router), Client(router, tenant) as client:
        ranking = client.rerank(
            query,
            texts,
            top_n=top,
            adapter_id=single,
            adapters=weighted,
            model=model or None,
            instruction=instruction,
            yes=yes,
            no=no,
            truncate=truncate,
        )
    if as_json:
        results = [{"text": texts[one.index], **vars(one)} for one in ranking.results]
        print_json({"results": results, **_summary_json(ranking)})
        return
    rows = ((f"{one.score:.4f}", one.index, texts[one.index]) for one in ranking.results)
    print_rows(("SCORE", "INDEX", "DOCUMENT"), rows)


def _summary_json(answer: Embeddings | Classifications | Ranking) -> dict[str, Any]:
    names = ("adapter_revision", "usage", "request_id", "continuations")
    return {name: getattr(answer, name) for name in names if hasattr(answer, name)}


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
    """Print the log probability of each TEXT after PROMPT.

    A TEXT follows PROMPT directly: begin it with a space where one belongs there. GREEDY is yes where the model's
    likeliest answer begins with it.

    [bold]loraplex score "The capital of France is" " Paris" " Rome"[/]
    """
    from loraplex_client import Client

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
        "scores": [{"text": text, **vars(one)} for text, one in zip(texts, scores.scores, strict=True)],
        "best": scores.best,
        "adapter_revision": scores.adapter_revision,
        "adapters": [{"revision": revision, "weight": weight} for revision, weight in scores.adapters],
        "usage": scores.usage,
        "request_id": scores.request_id,
    }


def tokens(
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="The text; default: all of stdin.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="TEXT is a user's message, to which the chat template applies.")
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Print the tokens' ids instead of their number.")] = False,
    adapter: AdapterOption = "",
    tenant: TenantOption = TENANT,
    model: ModelOption = "",
    router: RouterOption = ROUTER,
    as_json: JsonOption = False,
) -> None:
    """Count the tokens of a prompt.

    An adapter matters only with --chat: it may have a chat template and a system prompt.

    [bold]loraplex tokens "Dear customer,"[/]
    [bold]loraplex tokens --ids < letter.txt[/]
    """
    from loraplex_client import Client

    prompt = read_stdin() if text is None else text
    with explained("router", router), Client(router, tenant) as client:
        token_ids = client.tokenize(
            None if chat else prompt,
            messages=[{"role": "user", "content": prompt}] if chat else None,
            model=model,
            adapter_id=adapter or None,
        )
    if as_json:
        print_json({"tokens": len(token_ids), "token_ids": token_ids})
    else:
        sys.stdout.write(f"{' '.join(map(str, token_ids)) if ids else len(token_ids)}\n")
