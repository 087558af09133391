"""`loraplex generate`: streams an answer to the terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli.options import (
    ROUTER,
    TENANT,
    AdaptersOption,
    MaxTokensOption,
    ModelOption,
    RouterOption,
    TemperatureOption,
    TenantOption,
    read_adapters,
)
from loraplex.cli.service import explained, until_interrupt
from loraplex.cli.terminal import err, print_json, print_rows, printable, read_stdin, read_text

if TYPE_CHECKING:
    from loraplex_client import AsyncClient, AsyncGenerationStream, Generation
    from loraplex_client.generation import Choice


def generate(  # noqa: PLR0913, PLR0917  # one parameter a flag
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from stdin.")],
    adapter: AdaptersOption = None,
    tenant: TenantOption = TENANT,
    model: ModelOption = "",
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Sample from the K likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Sample from the likeliest tokens with a total probability of P."),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the sampling.")] = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Send a chat: TEXT is its system prompt, PROMPT the user's message."),
    ] = None,
    as_chat: Annotated[bool, typer.Option("--chat", help="Send a chat: PROMPT is the user's message.")] = False,
    answers: Annotated[
        int | None, typer.Option("-n", min=1, metavar="N", help="Number of answers, printed one after the other.")
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Print log probabilities of each token and the K likeliest."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End the answer before TEXT. Repeatable.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answer in JSON of the schema in FILE.")
    ] = None,
    json_style: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STYLE",
            help="With --json-schema: spaced, compact or flexible whitespace; sorted properties. Repeatable.",
        ),
    ] = None,
    regex: Annotated[str | None, typer.Option(metavar="PATTERN", help="Answer in text that matches PATTERN.")] = None,
    choices: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Answer with one of the TEXTs. Repeatable.")
    ] = None,
    allow_inactive: Annotated[
        bool,
        typer.Option("--allow-inactive", help="Let the base model answer a prompt that does not invoke the adapter."),
    ] = False,
    router: RouterOption = ROUTER,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Stream an answer to stdout. Ctrl-C cancels the request.

    [bold]loraplex generate "Dear customer," --tenant acme --adapter support --max-tokens 64[/]
    [bold]loraplex generate "Yes or no?" --choices yes --choices no[/]
    """
    from loraplex_client import AsyncClient

    single, weighted = read_adapters(adapter or [])
    if prompt == "-":
        prompt = read_stdin()
    roles = {"user": prompt} if system is None else {"system": system, "user": prompt}
    messages = [{"role": role, "content": text} for role, text in roles.items()]
    chat = messages if as_chat or system is not None else None
    several = (answers or 1) > 1
    schema = None if json_schema is None else read_text(json_schema, "--json-schema")
    timer = AnswerTimer()

    # On an event loop, because a KeyboardInterrupt within gRPC's blocking calls can leave their locks held.
    async def stream_answer() -> tuple[Generation, dict[int, str]]:
        async with AsyncClient(router, tenant) as client:
            async with client.generate_stream(
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
                json_schema=schema,
                json_style=json_style or None,
                regex=regex,
                choices=choices or None,
                allow_inactive=allow_inactive or None,
            ) as stream:
                answer = await _follow(stream, timer, quiet=as_json or several)
            return answer, await token_texts(client, answer, model) if logprobs is not None else {}

    with explained("router", router):
        generation, texts = asyncio.run(until_interrupt(stream_answer()))
    if as_json:
        print_json(answer_json(generation, texts))
        return
    if several:
        print_answers(generation)
    if logprobs is not None:
        print_logprobs(generation, texts)
    if err().is_terminal:
        err().print(_closing_line(generation, timer), style="dim", markup=False, soft_wrap=True)


async def _follow(stream: AsyncGenerationStream, timer: AnswerTimer, *, quiet: bool) -> Generation:
    """Write the text as it arrives, unless `quiet`, and return the whole answer."""
    at_terminal = sys.stdout.isatty()
    text = "\n"
    try:
        async for piece in stream:
            timer.record(len(piece.token_ids))
            if piece.text and not quiet:
                text = printable(piece.text) if at_terminal else piece.text
                sys.stdout.write(text)
                sys.stdout.flush()
    finally:  # Whatever is printed next, an error included, starts a new line.
        if not text.endswith("\n"):
            sys.stdout.write("\n")
    return await stream.result()


def _closing_line(generation: Generation, timer: AnswerTimer) -> str:
    who = " + ".join(f"{weight:g} x {_short(revision)}" for revision, weight in generation.adapters)
    who = who or _short(generation.adapter_revision) or "plain base model"
    who += ", since the prompt does not invoke the adapter" if generation.activated is False else ""
    return (
        f"{who} · {generation.usage.completion_tokens} tokens · TTFT {format_figure(timer.ttft_ms, 0)} ms · "
        f"{format_figure(timer.tokens_per_s)} tokens/s · ended by {generation.finish_reason} · "
        f"request {generation.request_id}"
    )


def _short(revision: str) -> str:
    """Shorten .../adapters/support/revisions/sha256:0123... to .../adapters/support@sha256:0123."""
    adapter, _, digest = revision.rpartition("/revisions/")
    return f"{adapter}@{digest[:19]}" if adapter else revision


class AnswerTimer:
    """Measures an answer's time to first token and speed, from the timer's creation on."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._first_tokens = 0
        self.tokens = 0

    def record(self, tokens: int) -> None:
        """Record the arrival of `tokens` tokens."""
        if tokens == 0:
            return
        self._last_s = time.perf_counter()
        if self._first_s is None:
            self._first_s, self._first_tokens = self._last_s, tokens
        self.tokens += tokens

    @property
    def ttft_ms(self) -> float | None:
        """Time from the start to the first token, None before it."""
        return None if self._first_s is None else (self._first_s - self._start_s) * 1e3

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first message; None if there was only that one."""
        if self._first_s is None or self._last_s == self._first_s:
            return None
        return (self.tokens - self._first_tokens) / (self._last_s - self._first_s)


def format_figure(value: float | None, digits: int = 1) -> str:
    """Format a measured value, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


async def token_texts(client: AsyncClient, generation: Generation, model: str) -> dict[int, str]:
    """Return the text of each token in the answers and beside them; bytes that are no character are escaped."""
    ids = {token for choice in generation.choices for token in choice.token_ids}
    ids |= {token for choice in generation.choices for one in choice.logprobs for token, _ in one.alternatives}
    listed = sorted(ids)
    token_bytes = await client.token_bytes(listed, model=model)
    return {token: data.decode(errors="backslashreplace") for token, data in zip(listed, token_bytes, strict=True)}


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
        "activated": generation.activated,
        "usage": generation.usage,
        "timings": generation.timings,
        "continuations": generation.continuations,
        "speculative_decoding": generation.speculative_decoding,
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
