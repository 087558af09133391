"""`loraplex embed` and `loraplex classify`: vectors of texts, and their labels."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.options import (
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
from clients.cli.terminal import out, print_json, print_rows, read_stdin

if TYPE_CHECKING:
    from loraplex_client import Classifications, Embeddings

TextsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[TEXT]...", help="The texts; default: the lines of stdin.")
]
TruncateOption = Annotated[bool, typer.Option("--truncate", help="Cut texts that are longer than the model takes.")]
# Maximum number of a vector's numbers that are shown at a terminal.
_SHOWN = 6


class Pooling(StrEnum):
    """The hidden states that make a vector."""

    CLS = "cls"
    MEAN = "mean"
    LAST = "last"


def embed(  # noqa: PLR0913, PLR0917  # one parameter a flag
    texts: TextsArgument = None,
    adapter: AdaptersOption = None,
    pooling: Annotated[Pooling | None, typer.Option(help="Instead of the model's own.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not scale the vectors to length 1.")] = False,
    truncate: TruncateOption = False,
    tenant: TenantOption = TENANT,
    model: ModelOption = "",
    router: RouterOption = ROUTER,
    as_json: JsonOption = False,
) -> None:
    """Print the vector of each TEXT, a line of numbers; at a terminal the first of them.

    [bold]loraplex embed "first text" "second text" --json[/]
    """
    from loraplex_client import Client

    from clients.cli.failures import explained

    given = texts or read_stdin().splitlines()
    single, weighted = read_adapters(adapter or [])
    with explained("router", router), Client(router, tenant) as client:
        found = client.embed(
            given,
            pooling=None if pooling is None else pooling.value,
            normalize=not raw,
            adapter_id=single,
            adapters=weighted,
            model=model or None,
            truncate=truncate,
        )
    if as_json:
        vectors = zip(given, found.vectors, strict=True)
        print_json(
            {"embeddings": [{"text": text, "vector": vector} for text, vector in vectors], **_summary_json(found)}
        )
        return
    for vector in found.vectors:
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

    from clients.cli.failures import explained

    given = texts or read_stdin().splitlines()
    with explained("router", router), Client(router, tenant) as client:
        found = client.classify(given, adapter_id=adapter or None, model=model or None, truncate=truncate)
    if as_json:
        pairs = zip(given, found.classifications, strict=True)
        labelled = [{"text": text, **dataclasses.asdict(one)} for text, one in pairs]
        print_json({"classifications": labelled, "labels": found.labels, **_summary_json(found)})
        return
    print_rows(
        ("LABEL", "PROBABILITY", "TEXT"),
        (
            (one.label, f"{one.probabilities[found.labels.index(one.label)]:.4f}", text)
            for text, one in zip(given, found.classifications, strict=True)
        ),
    )


def _summary_json(found: Embeddings | Classifications) -> dict[str, Any]:
    return {
        "adapter_revision": found.adapter_revision,
        "usage": dataclasses.asdict(found.usage),
        "request_id": found.request_id,
        "continuations": found.continuations,
    }
