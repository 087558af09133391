"""Decisions over HTTP: OpenAI's /v1/decisions, and System One's /v1/systemone, whose questions have names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required

from typing_extensions import TypedDict

from loraplex.gateway.bodies import Body
from loraplex.gateway.endpoint import HttpCall
from loraplex.gateway.errors import invalid
from loraplex.gateway.openai_messages import LENIENT, Part, text_of
from loraplex.gateway.openai_responses_input import FunctionCall, FunctionResult, Item, MessageItem, conversation
from loraplex_client import Decision, Decisions, Question


class JsonPart(TypedDict):
    """A part that is JSON, which the model gets as text."""

    type: Literal["input_json"]
    data: dict[str, Any] | list[Any]


class JsonMessage(TypedDict, total=False):
    """A message with parts that are JSON."""

    type: Literal["message"]
    role: Required[Literal["user", "system", "developer", "assistant"]]
    content: Required[list[JsonPart | Part]]


class CustomCall(TypedDict, total=False):
    """A call of a tool that takes a text."""

    type: Required[Literal["custom_tool_call"]]
    call_id: Required[str]
    name: Required[str]
    input: Required[str]


class CustomResult(TypedDict, total=False):
    """The result of such a call."""

    type: Required[Literal["custom_tool_call_output"]]
    call_id: Required[str]
    output: Required[str | list[Part]]


class Predicate(TypedDict, total=False):
    """Whether a statement about the input is true."""

    type: Required[Literal["predicate"]]
    name: str | None
    instructions: Required[str | list[JsonPart | Part]]


class Option(TypedDict, total=False):
    """A value of a choice."""

    value: Required[str | bool]
    description: str | None


class ChoiceQuestion(TypedDict, total=False):
    """Which of the values fits the input."""

    type: Required[Literal["choice"]]
    name: str | None
    instructions: Required[str | list[JsonPart | Part]]
    choices: Required[list[Option]]


class Level(TypedDict, total=False):
    """A level of a score."""

    label: Required[str]
    description: str | None


class Score(TypedDict, total=False):
    """Which of the levels, from lowest to highest, fits the input."""

    type: Required[Literal["score"]]
    name: str | None
    instructions: Required[str | list[JsonPart | Part]]
    levels: Required[list[Level]]


class DecisionRequest(TypedDict, total=False):
    """Body of a request to /v1/decisions."""

    model: Required[str]
    input: Required[str | list[JsonMessage | CustomCall | CustomResult | Item]]
    questions: Required[list[Predicate | ChoiceQuestion | Score]]
    prompt_cache_key: str | None
    prompt_cache_options: dict[str, Any] | None
    safety_identifier: str | None
    calibrated: bool | None


class NamedQuestion(TypedDict, total=False):
    """A question of System One; `criteria` are what true and false mean, the options, or the levels.

    What is JSON instead of a text is told to the model as JSON.
    """

    type: Required[Literal["noul", "choice", "score"]]
    instructions: str | dict[str, Any] | list[Any] | None
    criteria: dict[str, Any] | list[Any] | None


class SystemOneRequest(TypedDict, total=False):
    """Body of a request to /v1/systemone."""

    model: Required[str]
    state: Required[str | dict[str, Any] | list[Any]]
    questions: Required[dict[str, NamedQuestion]]
    calibrated: bool | None


DECISION = Body(
    DecisionRequest, [*LENIENT, MessageItem, JsonMessage, FunctionCall, FunctionResult, CustomCall, CustomResult]
)
SYSTEM_ONE = Body(SystemOneRequest)


# Instructions of System One's questions that have criteria but no text.
_UNASKED = {"noul": "Which of the two holds?", "choice": "Which of these fits?", "score": "Which level fits?"}


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _with_text(content: Any) -> Any:
    """Return a content whose parts of JSON are text."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": _as_text(one["data"])} if one["type"] == "input_json" else one for one in content]


def _readable(item: Any) -> Any:
    """Return an item whose parts are text, as a message or a function's call or result."""
    match item.get("type"):
        case "custom_tool_call":
            called = {"call_id": item["call_id"], "name": item["name"]}
            return {"type": "function_call", **called, "arguments": json.dumps({"input": item["input"]})}
        case "custom_tool_call_output":
            return {"type": "function_call_output", "call_id": item["call_id"], "output": item["output"]}
    return {**item, "content": _with_text(item["content"])} if "content" in item else item


def _instructions(at: str, question: Mapping[str, Any]) -> str:
    return text_of(f"{at}.instructions", _with_text(question["instructions"]))


def _meanings(at: str, options: Sequence[Mapping[str, Any]], name: str) -> dict[str, str]:
    """Return what each label means. Raises HttpError where one is there twice."""
    meanings: dict[str, str] = {}
    for index, option in enumerate(options):
        label = _label(option[name])
        if label in meanings:
            raise invalid(f"{at}[{index}].{name}", f"{label!r} is there twice")
        meanings[label] = option.get("description") or ""
    if len(meanings) < 2:
        raise invalid(at, f"{len(meanings)} options; give 2 to 255")
    return meanings


def _label(value: str | bool) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _question(index: int, question: Mapping[str, Any]) -> Question:
    """Return a question of /v1/decisions. Raises HttpError."""
    at = f"questions[{index}]"
    asked = _instructions(at, question)
    if question["type"] == "predicate":
        return Question(asked)
    if question["type"] == "choice":
        return Question(asked, choices=_meanings(f"{at}.choices", question["choices"], "value"))
    return Question(asked, levels=_meanings(f"{at}.levels", question["levels"], "label"))


def _named_question(name: str, question: Mapping[str, Any]) -> Question:
    """Return a question of /v1/systemone. Raises HttpError."""
    criteria, at = question.get("criteria"), f"questions.{name}.criteria"
    asked = _as_text(question.get("instructions")) or _UNASKED[question["type"]]
    if question["type"] == "noul":
        meanings = criteria or {}
        if not isinstance(meanings, dict) or meanings.keys() - {"true", "false"}:
            raise invalid(at, "of a noul has true and false, and what they mean")
        if not (question.get("instructions") or any(meanings.values())):
            raise invalid(f"questions.{name}.instructions", "give the statement, or criteria of true and false")
        return Question(asked, yes=_as_text(meanings.get("true")), no=_as_text(meanings.get("false")))
    if not criteria or len(criteria) < 2:
        raise invalid(at, "has the options, 2 to 255 of them, or the levels")
    if question["type"] == "choice":
        if not isinstance(criteria, dict):
            raise invalid(at, "of a choice: give each option its meaning, or null")
        return Question(asked, choices={name: _as_text(meaning) for name, meaning in criteria.items()})
    return Question(asked, levels={level: _as_text(meaning) for level, meaning in _legend(criteria).items()})


def _legend(criteria: dict[str, Any] | list[Any]) -> dict[str, Any]:
    """Return the levels of a score by their numbers."""
    levels = criteria.values() if isinstance(criteria, dict) else criteria
    return {str(level): meaning for level, meaning in enumerate(levels)}


# Names of /v1/decisions for the cluster's.
_NAMES = {
    r"questions\[(\d+)\]\.choice\.options": r"questions[\1].choices",
    r"questions\[(\d+)\]\.score\.options\[(\d+)\]\.value": r"questions[\1].levels[\2].label",
    r"questions\[(\d+)\]\.score\.options": r"questions[\1].levels",
    r"chat\b": "input",
}


async def _decide(
    call: HttpCall, request: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], questions: Sequence[Question]
) -> Decisions:
    """Return the decisions of a request's model or adapter."""
    named = await call.named(request["model"])
    calibrated = bool(request.get("calibrated"))
    answer = await call.caller.decide(
        None, questions, calibrated=calibrated, messages=messages, timeout_s=call.timeout_s, **named
    )
    call.exchange.rate_limits = answer.rate_limits
    return answer


async def decisions(call: HttpCall) -> None:
    """Answer with the probabilities of the answers to questions. Raises HttpError, LoraplexError."""
    request = await call.read(DECISION)
    given = request["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    chat = conversation({}, [], [_readable(item) for item in items])
    asked = [_question(index, question) for index, question in enumerate(request["questions"])]
    call.exchange.names = _NAMES
    answer = await _decide(call, request, chat.messages, asked)
    told = [
        {**_answer(question, one), "name": question.get("name"), **_extensions(one)}
        for question, one in zip(request["questions"], answer.decisions, strict=True)
    ]
    usage = {
        "input_tokens": answer.usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.usage.prompt_tokens,
    }
    body = {"answers": told, "model": request["model"], "usage": usage, **_temperature(answer)}
    await call.exchange.answer(body)


def _temperature(answer: Decisions) -> dict[str, float]:
    return {} if answer.temperature is None else {"temperature": answer.temperature}


def _extensions(decision: Decision) -> dict[str, Any]:
    return {"label_mass": decision.label_mass, "scored_labels": decision.scored_labels}


def _answer(question: Mapping[str, Any], decision: Decision) -> dict[str, Any]:
    """Return an answer in OpenAI's words."""
    kind, shares = question["type"], list(decision.probabilities.values())
    if kind == "predicate":
        return {"type": kind, "probability": shares[0]}
    if kind == "choice":
        values = [option["value"] for option in question["choices"]]
        told = [{"value": value, "probability": share} for value, share in zip(values, shares, strict=True)]
        best = values[max(range(len(shares)), key=shares.__getitem__)]
        return {"type": kind, "choice": best, "confidence": decision.confidence, "probabilities": told}
    told = [
        {"label": level["label"], "value": number, "probability": share}
        for number, (level, share) in enumerate(zip(question["levels"], shares, strict=True))
    ]
    return {"type": kind, "score": decision.score, "confidence": decision.confidence, "probabilities": told}


async def system_one(call: HttpCall) -> None:
    """Answer named questions about a state with probabilities. Raises HttpError, LoraplexError."""
    if call.exchange.headers.get("content-type", "").startswith("multipart/"):
        raise invalid("assets", "no images are read; send JSON whose state and questions are text")
    request = await call.read(SYSTEM_ONE)
    questions = {name: _named_question(name, question) for name, question in request["questions"].items()}
    paths = [f"questions.{name}".replace("\\", r"\\") for name in questions]
    call.exchange.names = {rf"questions\[{at}\].*": path for at, path in enumerate(paths)} | {r"chat\b.*": "state"}
    state = [{"role": "user", "content": _as_text(request["state"])}]
    answer = await _decide(call, request, state, [*questions.values()])
    answers, diagnostics = {}, {}
    for (name, asked), one in zip(request["questions"].items(), answer.decisions, strict=True):
        answers[name] = _named_answer(asked, one)
        diagnostics[name] = _extensions(one)
    usage = {"input_tokens": answer.usage.prompt_tokens, "output_tokens": 0}
    told = {"model": request["model"], "answers": answers, "usage": usage, "diagnostics": diagnostics}
    told.update(_temperature(answer))
    await call.exchange.answer(told)


def _named_answer(question: Mapping[str, Any], decision: Decision) -> dict[str, Any]:
    """Return an answer in System One's words."""
    kind = question["type"]
    if kind == "noul":
        return {"type": kind, "noul": decision.probabilities["yes"]}
    told = {"type": kind, "confidence": decision.confidence, "probabilities": dict(decision.probabilities)}
    if kind == "choice":
        return {**told, "choice": decision.best}
    return {**told, "score": decision.score, "legend": _legend(question["criteria"])}
