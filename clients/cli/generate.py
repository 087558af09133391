"""`loraplex generate`: streams an answer to the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.answer_output import answer_json, print_answers, print_logprobs, token_texts
from clients.cli.options import (
    ROUTER,
    TENANT,
    AdaptersOption,
    ModelOption,
    RouterOption,
    TenantOption,
    read_adapters,
)
from clients.cli.terminal import err, print_json, printable, read_stdin, read_text

if TYPE_CHECKING:
    from loraplex_client import Generation, GenerationStream

    from clients.cli.answer_timer import AnswerTimer


def generate(  # noqa: PLR0913, PLR0917  # one parameter a flag
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from stdin.")],
    adapter: AdaptersOption = None,
    tenant: TenantOption = TENANT,
    model: ModelOption = "",
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum number of tokens; 128 by default.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="Sampling temperature; 0, the default, is greedy.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Sample from the K likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Sample from the likeliest tokens whose probabilities add up to P."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Seed of the sampling; the same seed gives the same answer.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Ask as a chat: PROMPT is the user's message after TEXT.")
    ] = None,
    answers: Annotated[
        int | None, typer.Option("-n", min=1, metavar="N", help="Number of answers, printed one after the other.")
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Print each token's log probability, beside the K likeliest tokens."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End the answer before TEXT. Repeatable.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The answer is JSON of the schema in FILE.")
    ] = None,
    json_style: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STYLE",
            help="Of --json-schema: compact (default) or flexible whitespace; properties as in the schema, or sorted. "
            "Repeatable.",
        ),
    ] = None,
    regex: Annotated[str | None, typer.Option(metavar="PATTERN", help="The whole answer matches PATTERN.")] = None,
    choices: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="The answer is one of the TEXTs. Repeat it for each.")
    ] = None,
    router: RouterOption = ROUTER,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Stream an answer to stdout. Ctrl-C cancels the request.

    [bold]loraplex generate "Dear customer," --tenant acme --adapter support --max-tokens 64[/]
    [bold]loraplex generate "Yes or no?" --choices yes --choices no[/]
    """
    from loraplex_client import Client

    from clients.cli.answer_timer import AnswerTimer
    from clients.cli.failures import explained

    single, weighted = read_adapters(adapter or [])
    if prompt == "-":
        prompt = read_stdin()
    chat = None if system is None else [_message("system", system), _message("user", prompt)]
    several = (answers or 1) > 1
    with explained("router", router), Client(router, tenant) as client:
        timer = AnswerTimer()
        with client.generate_stream(
            prompt if chat is None else None,
            messages=chat,
            n=answers,
            logprobs=logprobs,
            adapter_id=single,
            adapters=weighted,
            model=model or None,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
            json_schema=None if json_schema is None else read_text(json_schema, "--json-schema"),
            json_style=json_style or None,
            regex=regex,
            choices=choices or None,
        ) as stream:
            generation = _follow(stream, timer, quiet=as_json or several)
        texts = token_texts(client, generation, model) if logprobs is not None else {}
    if as_json:
        print_json(answer_json(generation, texts))
        return
    if several:
        print_answers(generation)
    if logprobs is not None:
        print_logprobs(generation, texts)
    if err().is_terminal:
        err().print(_closing_line(generation, timer), style="dim", markup=False, soft_wrap=True)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _follow(stream: GenerationStream, timer: AnswerTimer, *, quiet: bool) -> Generation:
    """Write the text as it arrives, unless `quiet`, and return the whole answer."""
    at_terminal = sys.stdout.isatty()
    text = "\n"
    try:
        for piece in stream:
            timer.record(len(piece.token_ids))
            if piece.text and not quiet:
                text = printable(piece.text) if at_terminal else piece.text
                sys.stdout.write(text)
                sys.stdout.flush()
    finally:  # Whatever is printed next, an error included, starts a new line.
        if not text.endswith("\n"):
            sys.stdout.write("\n")
    return stream.result()


def _closing_line(generation: Generation, timer: AnswerTimer) -> str:
    from clients.cli.answer_timer import format_figure

    who = " + ".join(f"{weight:g} x {_short(revision)}" for revision, weight in generation.adapters)
    who = who or _short(generation.adapter_revision) or "plain base model"
    return (
        f"{who} · {generation.usage.completion_tokens} tokens · TTFT {format_figure(timer.ttft_ms, 0)} ms · "
        f"{format_figure(timer.tokens_per_s)} tokens/s · ended by {generation.finish_reason}"
    )


def _short(revision: str) -> str:
    """Shorten .../adapters/support/revisions/sha256:0123... to .../adapters/support@sha256:0123."""
    adapter, _, digest = revision.partition("/revisions/")
    return f"{adapter}@{digest[:19]}" if digest else adapter
