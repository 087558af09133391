"""Chat templates of the model families, rendered as transformers renders them, and templates that misbehave."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from jinja2 import defaults
from jinja2.filters import FILTERS
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from loraplex.contracts.artifacts.peft_config import ChatSettings
from loraplex.router.api.convert import read_chat
from loraplex.router.request import Chat, ChatMessage
from loraplex.router.text.chat import ChatTemplate, TemplateCall, TemplateRenderer
from loraplex.runtime.rpc.errors import InvalidField, Unavailable
from loraplex_client.chat import chat_of

FAMILIES = {path.stem: path.read_text() for path in (Path(__file__).parent / "families").glob("*.jinja")}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NOW = 1_732_000_000.0
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A <city> & 'its' name"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast — ☀", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
USER = {"role": "user", "content": " What is the weather in Bern?\n"}
SYSTEM = {"role": "system", "content": "You are brief."}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
}
CALLS = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "rain"}
ASSISTANT = {"role": "assistant", "content": "It rains. "}
THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
TURNS = [USER, ASSISTANT, {"role": "user", "content": "And tomorrow?"}]
VARIABLES = {"enable_thinking": False, "documents": [{"doc_id": 1, "text": "x"}]}
CASES: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [USER]},
    "no prompt": {"messages": [USER, ASSISTANT], "add_generation_prompt": False},
    "system": {"messages": [SYSTEM, *TURNS]},
    "tools": {"messages": [USER], "tools": TOOLS},
    "a call": {"messages": [USER, CALLS, RESULT], "tools": TOOLS},
    "a call long ago": {"messages": [SYSTEM, USER, CALLS, RESULT, ASSISTANT, USER], "tools": TOOLS},
    "continued": {"messages": [*TURNS, {"role": "assistant", "content": "The sun"}], "continue_final_message": True},
    "continued space": {"messages": [USER, ASSISTANT], "continue_final_message": True},
    "variables": {"messages": [SYSTEM, USER], "template_args": VARIABLES},
    "reasoning": {"messages": [USER, THOUGHT, USER, THOUGHT, USER]},
    "developer": {"messages": [{**SYSTEM, "role": "developer"}, USER]},
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def renderer() -> AsyncIterator[TemplateRenderer]:
    renderer = TemplateRenderer(2, wall_s=100.0)
    yield renderer
    renderer.close()


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    made: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = made(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)
    return tokenizer


def as_transformers_does(tokenizer: PreTrainedTokenizerFast, source: str, case: dict[str, Any]) -> tuple[str, str]:
    """Return what transformers renders, or the beginning of its error."""
    given = {"tools": None, "add_generation_prompt": not case.get("continue_final_message"), "template_args": {}} | case
    messages, variables = given.pop("messages"), given.pop("template_args")
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **variables, **given)
    except Exception as error:  # of the template's own making
        return "", str(error)[:200]
    return str(text), ""


def chat(case: dict[str, Any]) -> Chat:
    """Return a case as a client of the SDK would send it and the router would read it."""
    return read_chat(chat_of(case["messages"], case))


def call(source: str, limit: int = 100_000, text: str = "x") -> TemplateCall:
    return TemplateCall(source, {}, Chat((ChatMessage("user", text),)), NOW, limit)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("family", sorted(FAMILIES))
async def test_a_family_s_template_renders_as_transformers_renders_it(
    family: str, renderer: TemplateRenderer, reference: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    class At:
        @staticmethod
        def now() -> Any:
            return datetime.fromtimestamp(NOW)

    monkeypatch.setattr(chat_template_utils, "datetime", At)
    template = ChatTemplate(FAMILIES[family], tokens=TOKENS)
    rendered = 0
    for name, case in CASES.items():
        asked = chat(case)
        if asked.tools and "tools" not in FAMILIES[family]:
            with pytest.raises(InvalidField):  # transformers leaves them out
                await renderer.render(template.call(asked, NOW, 100_000), "acme")
            continue
        known = {"messages": [SYSTEM, USER]} if name == "developer" and family != "smollm3" else case
        expected, error = as_transformers_does(reference, FAMILIES[family], known)
        if error:
            with pytest.raises(InvalidField) as caught:
                await renderer.render(template.call(asked, NOW, 100_000), "acme")
            assert error in caught.value.message or "continue_final_message" in case, name
        else:
            assert await renderer.render(template.call(asked, NOW, 100_000), "acme") == expected, name
            rendered += 1
    assert rendered >= 4


async def refusal(renderer: TemplateRenderer, asked: TemplateCall) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        await renderer.render(asked, "acme")
    assert caught.value.reason == "CHAT_TEMPLATE"
    return caught.value


HOSTILE = {
    "{{ (9**(9**9)) % 10 }}": "takes too long",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "takes too long",
    "{% for i in range(10**9) %}{% endfor %}": "Range too big",
    "{{ 'x' * 10**9 }}": "needs too much memory",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe|not callable",
    "{% set n = namespace(__class__=1) %}": "underscore",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "calls itself too deeply",
    "{% include '/etc/passwd' %}": "no loader",
    "{% if %}": r"line 1\)",
    "{{ raise_exception('user first') }}": "user first",
    "{{ raise_exception(lipsum|string ~ ' /usr/lib/x.py') }}": r"them: <function generate_lorem_ipsum> x\.py$",
    '{{ "\\ud800" }}': "surrogate",
}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_hostile_template_is_refused_and_the_next_chat_is_rendered(renderer: TemplateRenderer) -> None:
    for source, words in HOSTILE.items():
        caught = await refusal(renderer, call(source))
        assert caught.field == "chat.messages"
        assert re.search(words, caught.message), source
        assert await renderer.render(call("{{ messages[0].content }}"), "acme") == "x"


def environment_and_limits(pid: int) -> tuple[bytes, str]:
    return Path(f"/proc/{pid}/environ").read_bytes(), Path(f"/proc/{pid}/limits").read_text()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_child_has_no_files_and_no_environment(renderer: TemplateRenderer) -> None:
    """A template that got out of Jinja's sandbox would be in a process that has nothing."""
    await renderer.render(call("x"), "acme")
    (child,) = {child._process.pid for child in renderer.children._idle[:1]}
    environment, limits = await asyncio.to_thread(environment_and_limits, child)
    names = {entry.partition(b"=")[0].decode() for entry in environment.split(b"\0") if entry}
    assert names == {"PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"}
    (files,) = [line.split() for line in limits.splitlines() if line.startswith("Max open files")]
    assert files[3:5] == ["3", "3"]


@pytest.mark.parametrize(
    ("case", "field", "words"),
    [
        ({"messages": [USER], "template_args": "[]"}, "chat.template_args", "not a JSON object"),
        ({"messages": [USER], "template_args": '{"a": NaN}'}, "chat.template_args", "NaN is not JSON"),
        ({"messages": [USER], "template_args": {"messages": []}}, "chat.template_args", "messages is not for"),
        ({"messages": [USER], "template_args": "[" * 9000}, "chat.template_args", "nested too deeply"),
        ({"messages": [USER], "tools": [{"name": "f", "parameters": "{"}]}, "chat.tools[0].parameters", "not JSON"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_bad_json_in_a_chat_is_refused_by_its_field(
    renderer: TemplateRenderer, case: dict[str, Any], field: str, words: str
) -> None:
    template = ChatTemplate("{{ messages }}{{ tools }}")
    assert (caught := await refusal(renderer, template.call(chat(case), NOW, 99_999))).field == field
    assert words in caught.message


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("source", ["{{ 'a b'|%s }}", "{{ %s }}", "{{ %s(1) }}"])
async def test_nothing_of_jinja_is_imported_late_or_shows_an_address(renderer: TemplateRenderer, source: str) -> None:
    names = ["wordwrap(1)", "lipsum()", *defaults.DEFAULT_NAMESPACE, "strftime_now", "'%(a)s' % {'a': raise_exception}"]
    for name in [*FILTERS, *names]:
        try:
            text = await renderer.render(call(source % name), "t")
        except InvalidField as error:
            text = error.message
        assert not re.search(r"Errno| at 0x|/", text.replace("</p>", "")), f"{name}: {text}"


async def test_an_address_in_a_message_stays(renderer: TemplateRenderer) -> None:
    told = "<function f at 0x7f00>"
    assert await renderer.render(call("{{ messages[0].content }}{{ range.__class__ }}", text=told), "t") == told


async def test_parts_are_a_list_where_the_template_takes_one_and_a_text_elsewhere(renderer: TemplateRenderer) -> None:
    asked = chat({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}]})
    for source, expected in (
        ("{{ messages[0].content }}", "ab"),
        ("{% for part in messages[0]['content'] %}[{{ part.type }} {{ part.text }}]{% endfor %}", "[text a][text b]"),
    ):
        assert await renderer.render(ChatTemplate(source).call(asked, NOW, 1_000), "acme") == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_a_system_prompt_of_the_settings_stands_in_for_one_that_is_missing(renderer: TemplateRenderer) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    template = template.with_settings(ChatSettings(system_prompt="Be Acme."))
    for messages, expected in (
        ([{"role": "user", "content": "a"}], "system:Be Acme.;user:a;"),
        ([SYSTEM, {"role": "user", "content": "a"}], "system:You are brief.;user:a;"),
    ):
        asked = chat({"messages": messages})
        assert await renderer.render(template.call(asked, NOW, 1_000), "acme") == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_a_caller_that_leaves_does_not_mix_up_answers(renderer: TemplateRenderer) -> None:
    slow = "{% for i in range(20000) %}{% endfor %}"
    leaving = [asyncio.create_task(renderer.render(call(slow + "gone"), "acme")) for _ in range(3)]
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    for index in range(4):
        assert await renderer.render(call("{{ messages[0].content }}", text=str(index)), "acme") == str(index)


async def test_a_child_that_gets_no_processor_is_given_up() -> None:
    renderer = TemplateRenderer(1, wall_s=0.0)
    with pytest.raises(Unavailable) as caught:
        await renderer.render(call("x"), "acme")
    assert caught.value.reason == "TEMPLATES_BUSY"
    assert not renderer.children._idle
    renderer.close()


def name_of(template: ChatTemplate, asked: Chat) -> str:
    form = template.call_format(asked)
    return form.name if form else ""


def test_the_template_among_a_model_s_files() -> None:
    config = {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
              "eos_token": {"content": "<end>"}, "loraplex_chat": {"tool_calls": "llama3"}}  # fmt: skip
    files = {"tokenizer_config.json": json.dumps(config).encode(), "special_tokens_map.json": b'{"bos_token": "<s>"}'}
    template = ChatTemplate.of_files(files)
    assert template.tokens == {"bos_token": "<s>", "eos_token": "<end>"}
    with_tools = chat({"messages": [USER], "tools": TOOLS})
    assert (template.source_for(chat({"messages": [USER]})), template.source_for(with_tools)) == ("a", "b")
    assert name_of(template, with_tools) == "llama3"
    own = template.with_settings(ChatSettings(template="<tool_call>"))
    assert (own.source_for(with_tools), name_of(own, with_tools)) == ("<tool_call>", "hermes")
    assert ChatTemplate.of_files(files | {"chat_template.jinja": b"c"}).source_for(with_tools) == "c"
    beside = ChatTemplate.of_files({"chat_template.jinja": b"c", "tool_use.jinja": b"d"})
    assert (beside.source_for(chat({"messages": [USER]})), beside.source_for(with_tools)) == ("c", "d")
    both = template.with_settings(ChatSettings(template="e", tool_template="f"))
    assert (both.source_for(chat({"messages": [USER]})), both.source_for(with_tools)) == ("e", "f")
    with pytest.raises(InvalidField, match="no chat template"):
        ChatTemplate.of_files({}).call(with_tools, NOW, 1)
    with pytest.raises(ValueError, match="loraplex_chat"):
        ChatTemplate.of_files({"tokenizer_config.json": b'{"loraplex_chat": {"tool_calls": "xml"}}'})


def test_the_families_formats_are_known_by_their_templates() -> None:
    asked = chat({"messages": [USER], "tools": TOOLS})
    formats = {family: name_of(ChatTemplate(source), asked) for family, source in FAMILIES.items()}
    assert {family: found for family, found in formats.items() if found} == {
        "hermes": "hermes", "qwen2": "hermes", "qwen3": "hermes", "smollm3": "hermes", "llama3": "llama3",
        "mistral": "mistral", "mistral_v13": "mistral_args", "granite": "granite",
        "command_r": "command_r", "phi3": "phi4_mini",
    }  # fmt: skip
    reasoning = {family for family, source in FAMILIES.items() if ChatTemplate(source).reasoning_format(asked)}
    assert reasoning == {"qwen3", "deepseek_r1", "smollm3"}
