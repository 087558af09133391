"""`loraplex generate`: one answer, streamed to the terminal."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.options import ROUTER, TENANT, RouterOption, TenantOption
from clients.cli.terminal import err, print_json, printable

if TYPE_CHECKING:
    from loraplex_client import Generation, GenerationStream

    from clients.cli.pace import Pace


def generate(  # noqa: PLR0913, PLR0917  # one parameter a flag
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to go on from.")],
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            "-a",
            metavar="NAME[=WEIGHT]",
            help="NAME, NAME@ALIAS or a full name; none: plain base. Repeated: their sum, each times its WEIGHT, or 1.",
        ),
    ] = None,
    tenant: TenantOption = TENANT,
    model: Annotated[str, typer.Option(metavar="NAME", help="Where the router serves more than one.")] = "",
    max_tokens: Annotated[int | None, typer.Option(metavar="N", help="128 if not given.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="T", help="0, or not given, is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Only the K likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Only the likeliest tokens that together reach P.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before TEXT. May be repeated.")] = None,
    router: RouterOption = ROUTER,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Stream an answer to stdout as it comes. Ctrl-C cancels it.

    [bold]loraplex generate "Dear customer," --tenant acme --adapter support --max-tokens 64[/]
    """
    from loraplex_client import Client

    from clients.cli.failures import explained
    from clients.cli.pace import Pace

    one, several = _adapters(adapter or [])
    with explained("router", router), Client(router, tenant) as client:
        pace = Pace()
        with client.generate_stream(
            prompt,
            adapter_id=one,
            adapters=several,
            model=model or None,
            max_new_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
        ) as stream:
            generation = _follow(stream, pace, quiet=as_json)
    if as_json:
        print_json(_as_json(generation))
    elif err().is_terminal:
        err().print(_closing_line(generation, pace), style="dim", markup=False, soft_wrap=True)


def _adapters(given: list[str]) -> tuple[str | None, list[tuple[str, float]] | None]:
    """One adapter's name, as it is, or several with their weights: `a=0.5` and `b`."""
    if not any(given):
        return None, None
    if len(given) == 1 and "=" not in given[0]:
        return given[0], None
    pairs = []
    for text in given:
        name, equals, weight = text.partition("=")
        try:
            pairs.append((name, float(weight) if equals else 1.0))
        except ValueError:
            raise typer.BadParameter(f"{text}: {weight!r} is not a number", param_hint="--adapter") from None
    return None, pairs


def _follow(stream: GenerationStream, pace: Pace, *, quiet: bool) -> Generation:
    """Write the text as it comes, unless `quiet`; the whole."""
    at_terminal = sys.stdout.isatty()
    text = "\n"
    try:
        for piece in stream:
            pace.note(len(piece.token_ids))
            if piece.text and not quiet:
                text = printable(piece.text) if at_terminal else piece.text
                sys.stdout.write(text)
                sys.stdout.flush()
    finally:  # what comes next, an error too, begins a line of its own
        if not text.endswith("\n"):
            sys.stdout.write("\n")
    return stream.result()


def _closing_line(generation: Generation, pace: Pace) -> str:
    from clients.cli.pace import shown

    who = " + ".join(f"{weight:g} x {_short(revision)}" for revision, weight in generation.adapters)
    who = who or _short(generation.adapter_revision) or "plain base model"
    return (
        f"{who} · {generation.usage.completion_tokens} tokens · TTFT {shown(pace.ttft_ms, 0)} ms · "
        f"{shown(pace.tokens_per_s)} tokens/s · ended by {generation.finish_reason}"
    )


def _short(revision: str) -> str:
    """.../adapters/support/revisions/sha256:0123... reads better as .../adapters/support@sha256:0123."""
    adapter, _, digest = revision.partition("/revisions/")
    return f"{adapter}@{digest[:19]}" if digest else adapter


def _as_json(generation: Generation) -> dict[str, Any]:
    return {
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
