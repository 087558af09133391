"""Messages of every origin, as templates of every kind get them: arguments, contents, roles and ids."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer, models

from loraplex.router.api.convert import read_chat
from loraplex.router.text.chat import ChatTemplate, TemplateRenderer, shielded_chat
from loraplex.router.text.chat_templates import MessageForm, template_messages
from loraplex.router.text.file_tokenizer import SpecialTokens
from loraplex_client.chat import chat_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
NOW = 1_732_000_000.0
USER = {"role": "user", "content": "Go"}
ARGUMENTS = {"city": 'Zü"ri\\ch ☀ 😀', "days": [1, -2.5e3, {"a": None}], "more": {"x": True, "y": []}}
# Ways in which templates show calls: by name, with the arguments as they expect them, and a content beside.
JOINED = "{% for c in m.tool_calls or [] %}<{{ c.function.name + ' ' + c.function.arguments }}>{% endfor %}"
PRINTED = "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments }}>{% endfor %}"
DUMPED = "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
ITEMS = (
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}"
    "{% for key, value in c.function.arguments.items() %} {{ key }}={{ value | tojson }}{% endfor %}>{% endfor %}"
)
EITHER = (
    "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
    "<{{ c.function.name }} {{ a if a is string else a | tojson }}>{% endfor %}"
)
CONTENTS = {
    "if given": "{% if m.content %}{{ m.content }}{% endif %}%s",
    "always": "{{ m.content + '.' }}%s",
    "parts": "{% for part in m.content %}{{ part.text }}{% endfor %}%s",
    # DeepSeek's show calls where there is no content.
    "none": "{% if m.role == 'assistant' and m.content is none %}%s{% else %}{{ m.content + '.' }}{% endif %}",
}


def template(calls: str, content: str = "if given") -> ChatTemplate:
    shown = CONTENTS[content].replace("%s", calls)
    return ChatTemplate("{% for m in messages %}[{{ m.role }}]" + shown + "{% endfor %}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def renderer() -> AsyncIterator[TemplateRenderer]:
    renderer = TemplateRenderer(1, wall_s=100.0)
    yield renderer
    renderer.close()


def called(arguments: str, content: Any = None) -> list[dict[str, Any]]:
    message = {"role": "assistant", "content": content, "tool_calls": [{"name": "f", "arguments": arguments}]}
    return [USER, message, {"role": "tool", "content": "ok"}]


async def render(renderer: TemplateRenderer, source: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    return await renderer.render(source.call(read_chat(chat_of(messages)), NOW, 100_000), "acme")


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (JOINED, '<f {"a": "x", "b": 2}>'),
        (PRINTED, '<f {"a": "x", "b": 2}>'),
        (DUMPED, '<f {"a": "x", "b": 2}>'),
        (ITEMS, '<f a="x" b=2>'),
        (EITHER, '<f {"a": "x", "b": 2}>'),
    ],
    ids=["joined", "printed", "dumped", "items", "either"],
)
async def test_arguments_and_contents_are_what_the_template_expects(
    renderer: TemplateRenderer, calls: str, expected: str, content: str
) -> None:
    for empty in (None, ""):
        text = await render(renderer, template(calls, content), called('{"a": "x", "b": 2}', empty))
        assert expected in text


@pytest.mark.parametrize(
    ("text", "mapping"),
    [
        ("", {}),
        (" ", {}),
        ("null", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}),
        ('{"a": "x', {"a": "x"}),
        ('{"a": 12', {"a": 12}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1, "b": tr', {"a": 1}),
        ('{"a": [1, {"b": "c\\', {"a": [1, {"b": "c"}]}),
        ('{"a": "x\\\\', {"a": "x\\"}),
        ('{"a": "x\\u00', {"a": "x"}),
        ('{"a": "x\\ud83d\\ud', {"a": "x"}),
        ("[]", {"INVALID_JSON": "[]"}),
        ('{"a": 1}}', {"a": 1}),
        ("{'a': 1}", {"INVALID_JSON": "{'a': 1}"}),
        ("go to Bern", {"INVALID_JSON": "go to Bern"}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
    ],
)
async def test_arguments_that_are_no_object_are_shown(
    renderer: TemplateRenderer, text: str, mapping: dict[str, Any]
) -> None:
    shown = await render(renderer, template(DUMPED), called(text))
    assert f"<f {json.dumps(mapping, ensure_ascii=False)}>" in shown
    assert f"<f {text.strip() or '{}'}>" in await render(renderer, template(JOINED), called(text))


@pytest.mark.parametrize("ascii_only", [False, True])
async def test_arguments_may_be_cut_anywhere(ascii_only: bool) -> None:
    """A value that is cut is as much of the whole one."""

    def is_part(part: Any, whole: Any) -> bool:
        if isinstance(part, dict):
            return part.keys() <= whole.keys() and all(is_part(value, whole[key]) for key, value in part.items())
        if isinstance(part, list):
            return all(map(is_part, part, whole))
        if isinstance(part, str):
            return str(whole).startswith(part)
        return part == whole or str(whole).startswith(str(part).removesuffix(".0"))

    text, sizes = json.dumps(ARGUMENTS, ensure_ascii=ascii_only), []
    for length in range(1, len(text) + 1):
        (message,) = template_messages(read_wire(called(text[:length])[1]), MessageForm())
        shown = message["tool_calls"][0]["function"]["arguments"]
        json.dumps(shown, ensure_ascii=False).encode()
        assert is_part(shown, ARGUMENTS), text[:length]
        sizes.append(len(json.dumps(shown)))
    assert shown == ARGUMENTS
    assert sizes[-1] / 3 < sum(sizes) / len(sizes) < sizes[-1], "what came before the cut is kept"


def read_wire(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Return messages as the renderer's process gets them."""
    made = []
    for message in read_chat(chat_of(messages)).messages:
        fields = {name: getattr(message, name) for name in message.__slots__}
        fields["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls
        ]
        made.append(fields)
    return made


async def test_very_long_arguments_that_are_cut_take_little_time(renderer: TemplateRenderer) -> None:
    for text in ('{"a": [' + "[1," * 100_000, '{"a": "' + "\\\\" * 100_000, "[" * 200_000, '{"a": ' + '"b",' * 50_000):
        asked = template(DUMPED).call(read_chat(chat_of(called(text))), NOW, 4_000_000)
        assert "<f " in await renderer.render(asked, "acme")


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([("developer", "a"), ("user", "b")], "[system]a[user]b"),
        ([("system", "a"), ("developer", "b"), ("user", "c")], "[system]a\n\nb[user]c"),
        ([("developer", "a"), ("developer", "b"), ("user", "c")], "[system]a\n\nb[user]c"),
        ([("developer", ["a", "b"]), ("developer", "c"), ("user", "d")], "[system]ab\n\nc[user]d"),
        ([("system", "a"), ("system", "b")], "[system]a[system]b"),
        ([("user", "a"), ("developer", "b")], "[user]a[system]b"),
    ],
)
async def test_the_role_developer_is_system_where_the_template_does_not_know_it(
    renderer: TemplateRenderer, messages: list[tuple[str, Any]], shown: str
) -> None:
    asked = [
        {"role": role, "content": [{"text": part} for part in content] if isinstance(content, list) else content}
        for role, content in messages
    ]
    assert await render(renderer, template("", "if given"), asked) == shown
    knows = ChatTemplate("{% for m in messages %}[{{ 'developer' if m.role == 'developer' else m.role }}]{% endfor %}")
    assert await render(renderer, knows, asked) == "".join(f"[{role}]" for role, _ in messages)


# Templates that take a system message at the beginning alone, by a check of their own or because roles alternate.
FIRST = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
ALTERNATE = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 is even) %}{{ raise_exception('no') }}{% endif %}"
)
SHOWN = "[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("source", [FIRST + SHOWN, ALTERNATE + SHOWN, "{% for m in messages %}" + SHOWN])
async def test_a_system_message_in_the_middle_is_the_user_s_where_the_template_refuses_it(
    renderer: TemplateRenderer, source: str
) -> None:
    """Claude Code sends one behind its first message."""
    roles = ("system", "user", "system", "assistant", "system", "user", "assistant", "developer")
    asked = [{"role": role, "content": str(number)} for number, role in enumerate(roles)]
    text = await render(renderer, ChatTemplate(source), asked)
    if source.startswith(("{% if", FIRST)):
        assert text == "[system]0[user]1\n\n2[assistant]3[user]4\n\n5[assistant]6[user]7"
    else:
        assert text == "[system]0[user]1[system]2[assistant]3[system]4[user]5[assistant]6[system]7"


async def test_calls_and_results_without_ids_get_some(renderer: TemplateRenderer) -> None:
    source = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.type }} {% endfor %}"
        "{% if m.role == 'tool' %}({{ m.tool_call_id }}) {% endif %}{% endfor %}"
    )
    calls: list[dict[str, Any]] = [{"name": "f"}, {"name": "g", "id": "own"}, {"name": "h", "id": None}]
    results: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": "own", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    asked: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "tool_calls": calls},
        *results,
        {"role": "tool", "content": "3"},
    ]
    text = await render(renderer, source, asked)
    assert text == "call00000function ownfunction call00001function (own) (call00000) (call00001) "


async def test_no_special_token_hides_in_the_escapes_of_a_json_text() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(["<|end|>", "</s>", "<｜bos｜>"])
    shield = SpecialTokens(tokenizer, "").shield
    for text in (r'{"a": "\u003c|end|>"}', r'{"a": "<\/s>"}', r'{"a": "<\uff5cbos\uff5c>"}'):
        ((_, message),) = [shielded_chat(read_chat(chat_of(called(text)[:2])), shield).messages]
        shown = json.loads(message.tool_calls[0].arguments)["a"]
        assert shown not in ("<|end|>", "</s>", "<｜bos｜>")
    kept = r'{"a": "\\u003c|end|\\u003e \u003cb \u00fc"}'
    ((_, message),) = [shielded_chat(read_chat(chat_of(called(kept)[:2])), shield).messages]
    assert message.tool_calls[0].arguments == kept


async def test_the_texts_of_a_tool_are_shielded_and_its_other_fields_stay() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(["<|end|>"])
    chat = chat_of([USER])
    chat.tools.add(name="f", description="<|end|>", strict=True)
    (tool,) = shielded_chat(read_chat(chat), SpecialTokens(tokenizer, "").shield).tools
    assert tool.description not in ("", "<|end|>")
    assert (tool.name, tool.strict) == ("f", True)
