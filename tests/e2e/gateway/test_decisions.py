"""Decisions over HTTP: both protocols tell what the SDK's call does, and name what is wrong with a question."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from loraplex_client import InvalidRequestError, Question
from tests.e2e.conftest import Cluster
from tests.e2e.gateway.conftest import Eventually
from tests.e2e.gateway.test_adapters import ask

pytestmark = pytest.mark.asyncio(loop_scope="package")
TEXT = "I was charged twice for my order. " * 20
MESSAGES: Any = [{"role": "user", "content": TEXT}]
JSON = "application/json"
ASKED = (
    Question("It is about money."),
    Question("Which team?", choices={"a": "billing", "b": "", "shipping": ""}),
    Question("How angry?", levels={"1": "calm", "2": "angry"}),
)


async def post(cluster: Cluster, path: str, **body: Any) -> tuple[int, Any]:
    return await ask(cluster, "POST", path, json.dumps(body).encode(), JSON)


async def test_openai_s_and_system_one_s_answers_are_those_of_the_sdk(
    cluster: Cluster, client: openai.AsyncOpenAI, eventually: Eventually
) -> None:
    own = await cluster.client.decide(None, ASKED, messages=MESSAGES, adapter_id="a")
    predicate, choice, score = own.decisions
    assert [one.scored_labels for one in own.decisions] == [2, 1, 0]
    for one in own.decisions:
        assert sum(one.probabilities.values()) == pytest.approx(1)
        assert 0 < one.label_mass <= 1
    assert own.usage.cached_tokens > len(TEXT), "the questions share the input"
    told = [
        {"type": "predicate", "name": "money", "probability": predicate.probabilities["yes"]},
        {
            "type": "choice",
            "name": None,
            "choice": choice.best,
            "confidence": choice.confidence,
            "probabilities": [{"value": name, "probability": share} for name, share in choice.probabilities.items()],
        },
        {
            "type": "score",
            "name": None,
            "score": score.probabilities["2"],
            "confidence": score.confidence,
            "probabilities": [
                {"label": label, "value": level, "probability": score.probabilities[label]}
                for level, label in enumerate("12")
            ],
        },
    ]
    questions: Any = [
        {"type": "predicate", "name": "money", "instructions": "It is about money."},
        {
            "type": "choice",
            "instructions": [{"type": "input_text", "text": "Which team?"}],
            "choices": [{"value": "a", "description": "billing"}, {"value": "b"}, {"value": "shipping"}],
        },
        {
            "type": "score",
            "instructions": "How angry?",
            "levels": [{"label": "1", "description": "calm"}, {"label": "2", "description": "angry"}],
        },
    ]
    inputs: tuple[Any, ...] = (TEXT, [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}])
    for given in inputs:
        answer = await client.decisions.create(model="a", input=given, questions=questions)
        answers = [one.model_dump() for one in answer.answers]
        masses = [(one.pop("label_mass"), one.pop("scored_labels")) for one in answers]
        assert masses == [(one.label_mass, one.scored_labels) for one in own.decisions]
        assert answers == told
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (own.usage.prompt_tokens, 0)
    named = {
        "money": {"type": "noul", "instructions": "It is about money."},
        "team": {
            "type": "choice", "instructions": "Which team?", "criteria": {"a": "billing", "b": None, "shipping": None},
        },
        "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", "angry"]},
    }  # fmt: skip
    status, body = await post(cluster, "/v1/systemone", model="a", state=TEXT, questions=named)
    assert status == 200, body
    assert body["answers"]["money"] == {"type": "noul", "noul": predicate.probabilities["yes"]}
    assert body["answers"]["team"]["probabilities"] == choice.probabilities
    assert body["answers"]["anger"]["legend"] == {"0": "calm", "1": "angry"}
    assert body["diagnostics"]["team"] == {"label_mass": choice.label_mass, "scored_labels": 1}
    await eventually(cluster.idle)


async def test_an_input_of_json_and_of_turns_is_text(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    question: Any = [{"type": "choice", "instructions": "Which?", "choices": [{"value": True}, {"value": False}]}]
    turns: Any = [
        {"role": "user", "content": [{"type": "input_json", "data": {"order": 7}}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I see."}]},
    ]
    answer = await client.decisions.create(model="hash", input=turns, questions=question)
    own = await cluster.client.decide(
        None,
        [Question("Which?", choices=["true", "false"])],
        messages=[{"role": "user", "content": '{"order": 7}'}, {"role": "assistant", "content": "I see."}],
    )
    (told,) = answer.answers
    assert told.type == "choice"
    assert [one.value for one in told.probabilities] == [True, False]
    assert [one.probability for one in told.probabilities] == [*own.decisions[0].probabilities.values()]


@pytest.mark.parametrize(
    ("question", "names"),
    [
        (Question(" "), r"questions\[0\].instructions: is empty"),
        (Question("x", choices=["a"]), r"questions\[0\].choice.options: 1 options; give 2 to 255"),
        (Question("x", levels=[str(n) for n in range(256)]), r"questions\[0\].score.options: 256 options; give 2 to"),
        (Question("x", choices=["a", "a"]), r"questions\[0\].choice.options\[1\].value: 'a' is there twice"),
        (Question("x", choices=["b", " "]), r"questions\[0\].choice.options\[1\].value: is empty"),
        (
            Question("x", levels=["new", "old", "new york"]),
            r"questions\[0\].score.options\[2\].value: its tokens begin with those of 'new', which is a label too",
        ),
        (Question("x", choices=["a", "b"], levels=["a", "b"]), r"questions\[0\]: give choices, levels"),
    ],
)
async def test_a_bad_question_is_named_and_nothing_is_queued(cluster: Cluster, question: Question, names: str) -> None:
    with pytest.raises(InvalidRequestError, match=names):
        await cluster.client.decide("input", [question])
    assert await cluster.idle()


async def test_limits_and_fields_of_answers_are_named(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    cases: tuple[tuple[list[Question], Any, str], ...] = (
        ([], {}, "questions: 0 questions; give 1 to 400"),
        ([Question("x")] * 401, {}, "questions: 401"),
        ([Question("x")], {"temperature": 1.0}, "sampling: concerns an answer"),
        ([Question("x")], {"calibrated": True}, "calibrated: only adapters have calibrations"),
        ([Question("x")], {"calibrated": True, "adapters": {"a": 0.5, "b": 0.5}}, "calibrated: only adapters have"),
    )
    for questions, more, names in cases:
        with pytest.raises(InvalidRequestError, match=names):
            await cluster.client.decide("input", questions, **more)
    with pytest.raises(InvalidRequestError, match="prompt: give a prompt or a chat"):
        await cluster.client.decide(None, [Question("x")], token_ids=[1])

    def choice(*values: str) -> Any:
        return {"type": "choice", "instructions": "x", "choices": [{"value": value} for value in values]}

    def score(*labels: str) -> Any:
        return {"type": "score", "instructions": "x", "levels": [{"label": label} for label in labels]}

    bad: tuple[tuple[Any, str], ...] = (
        ([], "questions"),
        ([{"type": "predicate", "instructions": "x"}] * 401, "questions"),
        ([{"type": "predicate", "instructions": " "}], "questions[0].instructions"),
        ([choice("", "a")], "questions[0].choices[0].value"),
        ([choice("ab", "abc")], "questions[0].choices[1].value"),
        ([choice(*map(str, range(256)))], "questions[0].choices"),
        ([score("1", "10")], "questions[0].levels[1].label"),
        ([score("1")], "questions[0].levels"),
    )
    for asked, param in bad:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.decisions.create(model="hash", input="x", questions=asked)
        assert refused.value.param == param
    criteria = {"x": None, "xy": None}
    named: Any = {"which one": {"type": "choice", "instructions": "x", "criteria": criteria}}
    status, answer = await post(cluster, "/v1/systemone", model="hash", state="x", questions=named)
    assert (status, answer["error"]["param"]) == (400, "questions.which one")
    named = {"which": {"type": "noul", "instructions": "x", "criteria": ["calm"]}}
    status, answer = await post(cluster, "/v1/systemone", model="hash", state="x", questions=named)
    assert (status, answer["error"]["param"]) == (400, "questions.which.criteria")
    named = {"which": {"type": "noul"}}
    status, answer = await post(cluster, "/v1/systemone", model="hash", state="x", questions=named)
    assert (status, answer["error"]["param"]) == (400, "questions.which.instructions")


async def test_system_one_s_questions_may_be_json_and_criteria_alone(cluster: Cluster) -> None:
    named: Any = {
        "order": {"type": "noul", "criteria": {"true": {"order": 7}, "false": None}},
        "team": {"type": "choice", "instructions": ["Which", 1], "criteria": {"a": {"pays": True}, "b": None}},
        "anger": {"type": "score", "criteria": [{"calm": 1}, "angry"]},
    }
    status, answer = await post(cluster, "/v1/systemone", model="hash", state={"order": 7}, questions=named)
    assert status == 200, answer
    own = await cluster.client.decide(
        None,
        [
            Question("Which of the two holds?", yes='{"order": 7}'),
            Question('["Which", 1]', choices={"a": '{"pays": true}', "b": ""}),
            Question("Which level fits?", levels={"0": '{"calm": 1}', "1": "angry"}),
        ],
        messages=[{"role": "user", "content": '{"order": 7}'}],
    )
    assert answer["answers"]["order"]["noul"] == own.decisions[0].probabilities["yes"]
    for name, decision in zip(("team", "anger"), own.decisions[1:], strict=True):
        assert answer["answers"][name]["probabilities"] == decision.probabilities
    assert answer["answers"]["anger"]["legend"] == {"0": {"calm": 1}, "1": "angry"}


async def test_every_text_of_openai_s_schema_is_read(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    call = {"call_id": "c1", "name": "look_up"}
    items: Any = [
        {"role": "system", "content": [{"type": "input_text", "text": "Be fair.", **mark}]},
        {"role": "user", "type": "message", "content": [{"type": "input_json", "data": [1], **mark}]},
        {"role": "assistant", "phase": "commentary", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "arguments": "{}", **call},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "found", **mark}]},
        {"type": "custom_tool_call", "input": "order 7", "name": "look_up", "call_id": "c2"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "late"},
        {"role": "user", "content": "Well?"},
    ]
    parts = [{"type": "input_text", "text": "Which of"}, {"type": "input_json", "data": {"these": 1}}]
    question: Any = {"type": "predicate", "instructions": parts}
    answer = await client.decisions.create(
        model="hash",
        input=items,
        questions=[question],
        prompt_cache_key="k",
        safety_identifier="s",
        prompt_cache_options={"mode": "explicit"},
    )
    assert answer.answers[0].type == "predicate"
    image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.content\[0\]"):
        await client.decisions.create(model="hash", input=image, questions=[question])
    form = b'--x\r\nContent-Disposition: form-data; name="request"\r\n\r\n{}\r\n--x--'
    status, refused = await ask(cluster, "POST", "/v1/systemone", form, "multipart/form-data; boundary=x")
    assert (status, refused["error"]["param"]) == (400, "assets")
