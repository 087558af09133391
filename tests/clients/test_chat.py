"""Chats through the SDK and `loraplex chat`: tools, reasoning, formats, and lines of a pipe."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pydantic
import pytest
from loraplex.inference.v1 import inference_pb2 as pb

import loraplex_client as lx
from loraplex.cli.__main__ import main
from loraplex.runtime.rpc import errors

MESSAGES = [{"role": "user", "content": "Weather?"}]
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
SUMMARY = pb.GenerateEvent(summary=pb.Summary(request_id="r"))


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=10)
    age: int


def events(*deltas: pb.Delta, reason: Any = pb.FINISH_REASON_END) -> list[Any]:
    """Return a stream of these deltas, each of one token."""
    stream = []
    for offset, delta in enumerate(deltas):
        delta.offset = offset
        delta.token_ids.append(7)
        stream.append(pb.GenerateEvent(delta=delta))
    return [*stream, pb.GenerateEvent(finished=pb.Finished(reason=reason)), SUMMARY]


def saying(text: str) -> list[Any]:
    return events(pb.Delta(text=text))


CALLING = events(
    pb.Delta(reasoning="Hm, "),
    pb.Delta(reasoning="Bern.", text="Let me look."),
    pb.Delta(tool_calls=[pb.ToolCallDelta(index=0, id="c1", name="weather")]),
    pb.Delta(tool_calls=[pb.ToolCallDelta(index=0, arguments='{"city":')]),
    pb.Delta(
        tool_calls=[
            pb.ToolCallDelta(index=0, arguments=' "Bern"}'),
            pb.ToolCallDelta(index=1, id="c2", name="now", arguments="{}"),
        ]
    ),
    reason=pb.FINISH_REASON_TOOL_CALLS,
)


def _chat(address: str, **options: Any) -> lx.Generation:
    with lx.Client(address, tenant="acme") as client:
        return client.chat(MESSAGES, **options)


def _chat_async(address: str, **options: Any) -> lx.Generation:
    async def run() -> lx.Generation:
        async with lx.AsyncClient(address, tenant="acme") as client:
            return await client.chat(MESSAGES, **options)

    return asyncio.run(run())


@pytest.mark.parametrize("chat", [_chat, _chat_async])
def test_an_answer_that_calls_tools(server: Any, chat: Callable[..., lx.Generation]) -> None:
    server.service.script = CALLING
    answer = chat(server.address, tools=[TOOL], response_format=Person)
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("Let me look.", "Hm, Bern.", "tool_calls")
    assert answer.tool_calls == (lx.ToolCall("c1", "weather", '{"city": "Bern"}'), lx.ToolCall("c2", "now", "{}"))
    assert answer.tool_calls[0].parsed == {"city": "Bern"}
    assert answer.parsed is None
    spec = server.service.requests[0].spec
    assert [tool.name for tool in spec.chat.tools] == ["weather"]
    # The answer goes back with the tools' results as it came.
    result = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    server.service.script = saying("Rain.")
    with lx.Client(server.address) as client:
        client.chat([*MESSAGES, answer.message, result])
    back = server.service.requests[1].spec.chat.messages[1]
    assert (back.role, back.content, back.reasoning) == ("assistant", "Let me look.", "Hm, Bern.")
    assert [(call.id, call.arguments) for call in back.tool_calls] == [("c1", '{"city": "Bern"}'), ("c2", "{}")]


def test_pieces_have_the_parts_of_calls(server: Any) -> None:
    server.service.script = CALLING
    with lx.Client(server.address) as client, client.chat_stream(MESSAGES, tools=[TOOL]) as stream:
        parts = [part for piece in stream for part in piece.tool_calls]
    assert [(part.index, part.name, part.arguments) for part in parts] == [
        (0, "weather", ""), (0, "", '{"city":'), (0, "", ' "Bern"}'), (1, "now", "{}"),
    ]  # fmt: skip


def test_arguments_without_a_call_break_the_protocol(server: Any) -> None:
    server.service.script = events(pb.Delta(tool_calls=[pb.ToolCallDelta(index=1, arguments="{}")]))
    with lx.Client(server.address, resume_attempts=0) as client, pytest.raises(lx.InternalError, match="did not begin"):
        client.chat(MESSAGES, tools=[TOOL])


@pytest.mark.parametrize("on_asyncio", [False, True])
def test_a_format_comes_back_as_its_object(server: Any, on_asyncio: bool) -> None:
    server.service.script = saying('{"name": "Ann", "age": 3}')

    async def run(response_format: Any) -> Any:
        async with lx.AsyncClient(server.address) as client:
            return await client.generate("Who?", response_format=response_format)

    with lx.Client(server.address) as client:
        for response_format, expected in (
            (Person, Person(name="Ann", age=3)),
            (Person.model_json_schema(), {"name": "Ann", "age": 3}),
            ({"type": "json_object", "schema": Person.model_json_schema()}, {"name": "Ann", "age": 3}),
            ({"type": "json_schema", "json_schema": {"schema": json.dumps(Person.model_json_schema())}},
             {"name": "Ann", "age": 3}),
        ):  # fmt: skip
            parsed: Any = (
                asyncio.run(run(response_format))
                if on_asyncio
                else client.generate("Who?", response_format=response_format)
            )
            assert parsed == expected
            assert json.loads(server.service.requests[-1].spec.json_schema) == Person.model_json_schema()
        assert client.generate("Who?", response_format=dict[str, Any]) == {"name": "Ann", "age": 3}
        assert client.chat(MESSAGES, response_format=Person).parsed == Person(name="Ann", age=3)
        with pytest.raises(lx.InvalidRequestError, match="json_schema"):
            client.generate("Who?", response_format=Person, json_schema="{}")
        with pytest.raises(lx.InvalidRequestError, match="no schema of"):
            client.generate("Who?", response_format=cast(Any, 3))


def test_an_answer_that_was_cut_is_not_of_its_format(server: Any) -> None:
    server.service.script = events(pb.Delta(text='{"name": "A'), reason=pb.FINISH_REASON_LENGTH)
    with (
        lx.Client(server.address) as client,
        pytest.raises(lx.AnswerFormatError, match="was cut at max_tokens and does not match response_format") as caught,
    ):
        client.generate("Who?", response_format=Person)
    assert caught.value.text == '{"name": "A'


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the command to its end in this process, with a text as its input."""

    def bound(*arguments: str, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "argv", ["loraplex", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Done(int(ended.value.code or 0), captured.out, captured.err)

    return bound


def test_each_line_of_a_pipe_is_a_turn(run: Callable[..., Done], server: Any) -> None:
    server.service.scripts = [events(pb.Delta(reasoning="Hm.", text="Hi")), saying("there")]
    done = run("chat", "-a", "pirate", "--system", "Be.", "--router", server.address, stdin="Hello\n\nAgain\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hi\nthere\n", "")
    messages = [(message.role, message.content) for message in server.service.requests[1].spec.chat.messages]
    assert messages == [("system", "Be."), ("user", "Hello"), ("assistant", "Hi"), ("user", "Again")]
    assert server.service.requests[0].spec.adapter == "pirate"


def test_a_pipe_ends_at_the_first_turn_that_fails(run: Callable[..., Done], server: Any) -> None:
    server.service.script = [errors.NotFound("adapter", "nope")]
    done = run("chat", "--router", server.address, stdin="Hello\nAgain\n")
    assert (done.returncode, done.stderr.count("\n"), len(server.service.requests)) == (2, 1, 1)
    assert "adapter not found: nope" in done.stderr


def test_what_is_not_utf8_ends_a_pipe(run: Callable[..., Done], server: Any) -> None:
    done = run("chat", "--router", server.address, stdin="caf\udce9\n")
    assert (done.returncode, done.stderr) == (2, "error: stdin is not UTF-8 text\n")
    assert not server.service.requests


def test_generate_takes_formats(run: Callable[..., Done], server: Any, tmp_path: Path) -> None:
    server.service.script = saying("yes")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    for flags, field, value in (
        (("--json-schema", str(schema)), "json_schema", '{"type": "object"}'),
        (("--regex", "a+"), "regex", "a+"),
        (("--choices", "yes", "--choices", "no"), "choices", pb.Choices(values=["yes", "no"])),
    ):
        assert run("generate", "x", *flags, "--router", server.address).stdout == "yes\n"
        assert getattr(server.service.requests[-1].spec, field) == value
    done = run("generate", "x", "--json-schema", str(tmp_path / "none.json"), "--router", server.address)
    assert done.returncode == 2
    assert "--json-schema" in done.stderr
