"""The check of a batch's lines, and the order in which they run."""

from __future__ import annotations

import io
import json
import tempfile
from typing import Any

import pytest

from loraplex.batch_runner import lines
from loraplex.batch_runner.lines import CheckedFile, check_file, read_line
from loraplex.batch_runner.pace import LinePace

CHAT = "/v1/chat/completions"


def line(custom_id: str = "1", model: str = "a", text: str = "Hi", **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def check(*given: Any, end: str = "\n") -> CheckedFile:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in given) + end
    return check_file(io.BufferedReader(io.BytesIO(text.encode())), CHAT)


def test_lines_run_by_adapter_and_then_by_prompt() -> None:
    given = [line("1", "b", "x"), line("2", "a", "y"), line("3", "b", "a"), line("4", "a", "x")]
    with tempfile.TemporaryFile() as file:
        file.write("\n".join(map(json.dumps, given)).encode())
        file.seek(0)
        checked = check_file(file, CHAT)
        assert (checked.errors, checked.models) == ([], {"b": 1, "a": 2})
        assert [one.number for one in checked.lines] == [4, 2, 3, 1]
        assert [read_line(file, one)["custom_id"] for one in checked.lines] == ["4", "2", "3", "1"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([line("1"), line("2"), line("1")], "line 3: custom_id: '1' is line 1's too; give each line its own"),
        ([line(stream=True)], "line 1: body.stream: is not served in a batch; leave it out"),
        ([line() | {"url": "/v1/completions"}], f"line 1: url: '/v1/completions' is not the batch's endpoint {CHAT}"),
        ([line() | {"method": "GET"}], "line 1: method: 'GET' is not POST"),
        ([line() | {"custom_id": ""}], "line 1: custom_id: has 1 to 512 characters"),
        ([line() | {"custom_id": 7}], "line 1: custom_id: is not a text"),
        ([line() | {"more": 7}], "line 1: more: unknown parameter"),
        ([{"custom_id": "1"}], "line 1: method: is required"),
        (["[]"], "line 1: is not a JSON object"),
        (["[" + "[]," * 20_001 + "[]]"], "line 1: the body has more than 20000 objects and lists"),
        ([line(), ""], "line 2: is not JSON: Input data was truncated"),
        ([line(temperature="hot")], "line 1: body.temperature: input should be a valid number"),
        ([line(nosuch=1)], "line 1: body.nosuch: unknown parameter"),
        ([line(functions=[{"name": "f"}])], "line 1: body.functions: is not served"),
        ([line() | {"body": {"model": "a"}}], "line 1: body.messages: is required"),
        ([line(model="")], "line 1: body.model: is empty"),
        ([line(model="m" * 301)], "line 1: body.model: has more than 300 characters"),
    ],
)
def test_a_bad_line_is_named_with_its_field(given: list[Any], message: str) -> None:
    (error,) = check(*given).errors
    assert error.message == message
    assert f"line {error.line}: {error.param}" in f"{message}"


def test_a_file_that_was_cut_says_so() -> None:
    (error,) = check(line("1"), json.dumps(line("2"))[:40], end="").errors
    assert error.message.startswith("line 2: is not JSON, and the file ends in it: was it sent in full?")
    assert check(end="").errors[0].message == "the file has no line"


def test_a_file_has_so_many_lines_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINES", 2)
    assert [one.message for one in check(line("1"), line("2"), line("3"), "{}").errors] == [
        "line 3: a batch has at most 2 lines"
    ]
    monkeypatch.setattr(lines, "ERRORS", 3)
    assert len(check(*["{}"] * 9).errors) == 3
    monkeypatch.setattr(lines, "LINE_BYTES", 100)
    assert check(line(text="x" * 200), line()).errors[0].message == "line 1: is larger than 100 bytes"


def test_bytes_that_are_no_utf8_are_an_error_of_their_line() -> None:
    text = json.dumps(line("1")).encode().replace(b"Hi", b"\xff")
    (error,) = check_file(io.BufferedReader(io.BytesIO(text)), CHAT).errors
    assert (error.code, error.message[:24]) == ("invalid_json_line", "line 1: is not JSON, and")
    assert "'utf-8' codec can't decode byte 0xff" in error.message


def test_a_batch_has_so_many_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MODELS", 2)
    assert check(line("1", "a"), line("2", "b"), line("3", "a")).errors == []
    (error,) = check(*(line(str(n), f"m{n}") for n in range(9))).errors
    assert error.message == "line 3: body.model: a batch has at most 2 models; give the others a batch of their own"


def test_as_many_lines_run_at_once_as_slow_nobody_down() -> None:
    now = 0.0
    pace = LinePace(64, 1.1, lambda: now)

    def lines(count: int, seconds: float) -> int:
        for _ in range(count):
            pace.took(seconds * 9, 10)
        return pace.at_once

    assert pace.at_once == 4
    assert lines(8, 0.005) == 5  # the base is known
    assert lines(2_000, 0.005) == 64
    assert lines(128, 0.006) == 48  # somebody else's answers, or too many lines
    assert lines(5_000, 0.006) == 4
    assert lines(5_000, 0.0053) == 4  # neither slow nor near the base
    assert lines(100, 0.005) > 4
    pace.took(0.0, 1)  # has no time between two tokens
    at_once, now = lines(0, 0.0), 31.0
    assert lines(2 * at_once + 8, 0.007) == 4  # a measurement
    assert lines(16, 0.007) >= at_once
    assert LinePace(2, 1.1).at_once == 2
