"""`loraplex decide`: the probabilities of the answers to questions about an input, and how questions are written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli.options import (
    ROUTER,
    TENANT,
    AdaptersOption,
    JsonOption,
    ModelOption,
    RouterOption,
    TenantOption,
    read_adapters,
)
from loraplex.cli.service import explained
from loraplex.cli.terminal import Columns, CommandError, out, print_json, print_table, read_stdin, read_text

if TYPE_CHECKING:
    from loraplex_client import Decision, Decisions, Question

# Maximum number of a question's labels that a table shows, the likeliest.
_SHOWN = 4


def read_json_lines(path: Path, flag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, with their places in it. Raises CommandError."""
    for number, line in enumerate(read_text(path, flag).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{flag}: {path} line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CommandError(f"{where}: is not JSON; write one object a line") from error
        if not isinstance(value, dict):
            raise CommandError(f"{where}: is not a JSON object")
        yield where, value


def question_of(where: str, value: Any) -> Question:
    """Return the question of a JSON value: a statement, or an object as `--help` has it. Raises CommandError."""
    from loraplex_client import Question

    if isinstance(value, str):
        value = {"instructions": value}
    if not isinstance(value, dict) or "instructions" not in value:
        raise CommandError(f"{where}: give a statement, or an object with instructions")
    for name, given in value.items():
        if name in {"choices", "levels"}:
            texts = given.values() if isinstance(given, dict) else given
            if not isinstance(given, dict | list) or not all(isinstance(one, str) for one in texts):
                raise CommandError(f"{where}.{name}: is neither a list of texts nor an object of texts")
        elif name not in {"instructions", "yes", "no"}:
            raise CommandError(f"{where}.{name}: is not one of instructions, choices, levels, yes, no")
        elif not isinstance(given, str):
            raise CommandError(f"{where}.{name}: is not a text")
    return Question(**value)


def decide(  # noqa: PLR0913, PLR0917  # one parameter a flag
    text: Annotated[str, typer.Argument(metavar="[INPUT]", help="The text that is asked about; default: stdin.")] = "-",
    adapter: AdaptersOption = None,
    question: Annotated[
        str,
        typer.Option(metavar="TEXT", help="A statement, or with --choices or --levels a question."),
    ] = "",
    choices: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="One of the answers of the question. Repeatable.")
    ] = None,
    levels: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A level of the answer, lowest first. Repeatable.")
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines with instructions, and choices, levels, or yes and no."),
    ] = None,
    as_chat: Annotated[bool, typer.Option("--chat", help="Send a chat: INPUT is the user's message.")] = False,
    calibrated: Annotated[
        bool,
        typer.Option("--calibrated", help="Use the temperature of the adapter's calibration."),
    ] = False,
    tenant: TenantOption = TENANT,
    model: ModelOption = "",
    router: RouterOption = ROUTER,
    as_json: JsonOption = False,
) -> None:
    """Print the probabilities of the answers to questions about INPUT; in a pipe as JSON.

    A line of FILE: {"instructions": "Which team?", "choices": {"billing": "payments", "shipping": ""}}

    [bold]loraplex decide "I was charged twice!" --adapter triage --question "The customer wants money back."[/]
    [bold]loraplex decide - --question "Which team?" --choices billing --choices shipping < mail.txt[/]
    """
    from loraplex_client import Client, Question

    if bool(question) == (questions is not None):
        raise CommandError("give the question with --question, or a file of them with --questions")
    if questions is not None and (choices or levels):
        raise CommandError("--choices, --levels: are of --question; in a file each question has its own")
    if questions is None:
        asked = [Question(question, choices=choices or (), levels=levels or ())]
    else:
        asked = [question_of(where, value) for where, value in read_json_lines(questions, "--questions")]
    text = read_stdin() if text == "-" else text
    single, weighted = read_adapters(adapter or [])
    with explained("router", router), Client(router, tenant) as client:
        answer = client.decide(
            None if as_chat else text,
            asked,
            messages=[{"role": "user", "content": text}] if as_chat else None,
            calibrated=calibrated,
            adapter_id=single,
            adapters=weighted,
            model=model or None,
        )
    if as_json or not out().is_terminal:
        print_json(_as_json(asked, answer))
        return
    columns: Columns = {
        "question": lambda pair: pair[0].instructions,
        "answer": lambda pair: pair[1].best,
        "probabilities": lambda pair: _likeliest(pair[1].probabilities),
        "score": lambda pair: f"{pair[1].score:.2f}" if pair[0].levels else "",
        "label mass": lambda pair: f"{pair[1].label_mass:.3f}",
    }
    print_table(zip(asked, answer.decisions, strict=True), columns)


def _likeliest(probabilities: Mapping[str, float]) -> str:
    ordered = sorted(probabilities.items(), key=lambda pair: -pair[1])
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(f"{label} {share:.3f}" for label, share in ordered[:_SHOWN]) + more


def _as_json(asked: list[Question], answer: Decisions) -> dict[str, Any]:
    return {
        "decisions": [_decision_json(question, one) for question, one in zip(asked, answer.decisions, strict=True)],
        "adapter_revision": answer.adapter_revision,
        "temperature": answer.temperature,
        "usage": answer.usage,
        "request_id": answer.request_id,
    }


def _decision_json(question: Question, decision: Decision) -> dict[str, Any]:
    score = {"score": decision.score} if question.levels else {}
    figures = {"answer": decision.best, "confidence": decision.confidence, **score}
    return {"instructions": question.instructions, **figures, **asdict(decision)}
