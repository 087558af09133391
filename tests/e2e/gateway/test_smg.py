"""The real smg gateway in front of two routers, by the engine protocol: OpenAI's own client talks to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from loraplex.runtime.rpc.settings import is_installed
from tests.e2e.conftest import Cluster, jobs
from tests.e2e.gateway.conftest import MESSAGES, PROMPT, Eventually, expected
from tests.e2e.gateway.kills import kill_busiest_worker, running
from tests.free_ports import free_ports

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.skipif(
        not (is_installed("smg_grpc_proto") and is_installed("smg")), reason="smg is not installed: make smg"
    ),
]
# The routers' engine protocol is set to adapter a, whose name the model gets.
CHAT: dict[str, Any] = {"messages": MESSAGES, "model": "a", "temperature": 0}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}assistant: "
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}


def write_tokenizer(directory: Path) -> Path:
    """Write the hash model's text as a tokenizer: bytes for ids below 256, `<id>` for the others."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # The letters that byte-level tokenizers have for bytes.
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    vocab = {letters[byte]: byte for byte in range(256)} | {f"<{token}>": token for token in range(256, 32_000)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level}
    tokenizer["model"] = {"type": "BPE", "vocab": vocab, "merges": []}
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def smg(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client of an smg whose engines are the routers, in turn."""
    async with running_smg(cluster, tmp_path_factory.mktemp("smg"), "round_robin") as client:
        yield client


@asynccontextmanager
async def running_smg(
    cluster: Cluster, directory: Path, policy: str, runtime: str = ""
) -> AsyncIterator[openai.AsyncOpenAI]:
    """Run an smg whose engines are the routers, by a protocol that it finds or is told; its log is there."""
    port, metrics = map(str, free_ports(2))  # smg takes no 0
    flags = ["--host", "127.0.0.1", "--port", port, "--prometheus-host", "127.0.0.1", "--prometheus-port", metrics]
    engines = [f"grpc://{address}" for address in cluster.local.routers]
    flags += ["--policy", policy, *(("--enable-igw",) if runtime else ("--worker-urls", *engines))]
    flags += ["--tokenizer-path", str(write_tokenizer(directory / "tokenizer")), "--log-level", "info"]
    with (directory / "log").open("wb") as log:
        environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
        argv = [sys.executable, "-m", "smg", "launch", *flags]
        process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log, env=environ, cwd=directory)
    try:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            for engine in engines if runtime else ():
                await _register(f"http://127.0.0.1:{port}/workers", {"url": engine, "runtime_type": runtime})
            await _serves(client, process)
            yield client
    except TimeoutError:
        print((directory / "log").read_text())
        raise
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _register(url: str, engine: dict[str, str]) -> None:
    """Tell smg of an engine, once it listens."""
    request = urllib.request.Request(url, json.dumps(engine).encode(), {"content-type": "application/json"})
    async with asyncio.timeout(60):
        while True:
            try:
                await asyncio.to_thread(urllib.request.urlopen, request, timeout=10)
                return
            except urllib.error.HTTPError as error:
                raise AssertionError(error.read()) from error
            except OSError:
                await asyncio.sleep(0.1)


async def _serves(client: openai.AsyncOpenAI, process: asyncio.subprocess.Process) -> None:
    """Wait until smg answers: before that it does not listen, knows no engine or has no tokenizer."""
    async with asyncio.timeout(90):
        while True:
            assert process.returncode is None
            try:
                await client.chat.completions.create(**CHAT, max_tokens=1)
                return
            except openai.APIError:
                await asyncio.sleep(0.1)


async def test_whole_answers_and_streams(smg: openai.AsyncOpenAI, cluster: Cluster) -> None:
    text = expected(PROMPT, cluster.digests["a"], 12)
    whole = await smg.chat.completions.create(**CHAT, max_tokens=12)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (text, "length")
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 12)
    streamed, reasons = ["", ""], set()
    stream = await smg.chat.completions.create(
        **CHAT, max_tokens=12, stream=True, n=2, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            reasons.add(choice.finish_reason)
        usage = chunk.usage
    assert streamed == [expected(PROMPT, cluster.digests["a"], 12, choice=choice) for choice in range(2)]
    assert reasons == {None, "length"}
    assert usage is not None
    assert usage.completion_tokens == 24
    completion = await smg.completions.create(model="a", prompt="x", temperature=0, max_tokens=7)
    assert completion.choices[0].text == expected("x", cluster.digests["a"], 7)


async def test_smg_chooses_by_the_blocks_of_the_workers(cluster: Cluster, tmp_path: Path) -> None:
    async with running_smg(cluster, tmp_path, "cache_aware") as client:
        await client.completions.create(model="a", prompt="x" * 40, temperature=0, max_tokens=1)
        log = ""
        async with asyncio.timeout(90):
            while "Learned block_size" not in log:
                await asyncio.sleep(0.05)
                log = (tmp_path / "log").read_text(errors="replace")
    assert log.count("KV event relay snapshot applied") == 2, "one of each router"
    assert "gap" not in log.lower()


async def test_smg_speaks_vllms_protocol_too(cluster: Cluster, tmp_path: Path) -> None:
    async with running_smg(cluster, tmp_path, "round_robin", "vllm") as client:
        await test_whole_answers_and_streams(client, cluster)
        await test_logprobs_stops_and_schemas(client, cluster)
        await test_embeddings(client)
        with pytest.raises(openai.BadRequestError, match=r"sampling_params\.max_tokens"):
            await client.chat.completions.create(**CHAT, max_tokens=10**9)
    assert "connected gRPC client (vllm)" in (tmp_path / "log").read_text(errors="replace")


async def test_logprobs_stops_and_schemas(smg: openai.AsyncOpenAI, cluster: Cluster) -> None:
    text = expected(PROMPT, cluster.digests["a"], 12)
    whole = await smg.chat.completions.create(**CHAT, max_tokens=3, logprobs=True, top_logprobs=2)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content or ()] == [2, 2, 2]
    # The stop string has characters of two tokens, none of which the client gets.
    for stream in (False, True):
        stopped: Any = await smg.chat.completions.create(**CHAT, max_tokens=12, stop=text[15:23], stream=stream)
        if stream:
            got = [choice async for chunk in stopped for choice in chunk.choices]
            content, reason = "".join(choice.delta.content or "" for choice in got), got[-1].finish_reason
        else:
            content, reason = stopped.choices[0].message.content, stopped.choices[0].finish_reason
        assert (content, reason) == (text[:15], "stop")
    schema: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    whole = await smg.chat.completions.create(**CHAT, max_tokens=200, response_format=schema)
    assert list(json.loads(whole.choices[0].message.content or "")) == ["city"]
    assert whole.choices[0].finish_reason == "stop"


async def test_embeddings(smg: openai.AsyncOpenAI) -> None:
    found = await smg.embeddings.create(model="a", input="one", encoding_format="float")
    assert sum(value * value for value in found.data[0].embedding) == pytest.approx(1)


async def test_a_refusal_has_its_status_and_names_the_field(smg: openai.AsyncOpenAI) -> None:
    for given, field in (
        ({"max_tokens": 10**9}, "sampling_params.max_new_tokens"),
        ({"extra_body": {"regex": "("}}, "sampling_params.regex"),
    ):
        with pytest.raises(openai.BadRequestError, match=field):
            await smg.chat.completions.create(**CHAT, **given)
    with pytest.raises(openai.NotFoundError):
        await smg.chat.completions.create(**{**CHAT, "model": "nobody"})


async def test_a_client_that_leaves_cancels_its_work(
    smg: openai.AsyncOpenAI, cluster: Cluster, eventually: Eventually
) -> None:
    stream: Any = await smg.chat.completions.create(**CHAT, max_tokens=20_000, stream=True)
    assert await anext(aiter(stream))
    await stream.close()
    await asyncio.wait_for(eventually(cluster.idle), 60)


@dataclass
class Stream:
    """A stream as far as its client has read it."""

    tokens: int
    texts: Sequence[str] = ()
    request_id: str = ""
    error: str = ""

    async def read(self, smg: openai.AsyncOpenAI, n: int = 1) -> Stream:
        self.texts = texts = [""] * n
        try:
            async for chunk in await smg.chat.completions.create(**CHAT, max_tokens=self.tokens, stream=True, n=n):
                self.request_id = chunk.id
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        except openai.APIError as error:
            self.error = str(error)
        return self


async def whole(smg: openai.AsyncOpenAI, tokens: int) -> Any:
    return (await smg.chat.completions.create(**CHAT, max_tokens=tokens)).choices[0].message.content


async def test_answers_are_the_same_where_a_worker_was_killed(smg: openai.AsyncOpenAI, cluster: Cluster) -> None:
    texts = (await Stream(tokens=200).read(smg, 2)).texts
    assert texts[0] == expected(PROMPT, cluster.digests["a"], 200)
    streams = [Stream(tokens=200) for _ in range(6)]
    reading = [asyncio.create_task(stream.read(smg, 1 + at % 2)) for at, stream in enumerate(streams)]
    wholes = [asyncio.create_task(whole(smg, 200)) for _ in range(4)]
    await kill_busiest_worker(cluster)
    assert [(stream.texts, stream.error) for stream in await asyncio.gather(*reading)] == [
        (texts[: 1 + at % 2], "") for at in range(6)
    ]
    assert await asyncio.gather(*wholes) == [texts[0]] * 4
    await cluster.local.wait_serving()


async def test_what_smg_does_where_a_router_was_killed(
    smg: openai.AsyncOpenAI, cluster: Cluster, eventually: Eventually
) -> None:
    tokens = 400
    text = expected(PROMPT, cluster.digests["a"], tokens)
    streams = [Stream(tokens) for _ in range(4)]
    reading = [asyncio.create_task(stream.read(smg)) for stream in streams]
    await running(cluster, len(streams))
    wholes = [asyncio.create_task(whole(smg, tokens)) for _ in range(4)]
    await running(cluster, len(streams) + len(wholes))
    lost = {job.request_id for job in await jobs(cluster, cluster.local.routers[:1])}
    cluster.local.kill("router-1", signal.SIGKILL)
    for stream in await asyncio.gather(*reading):
        if stream.request_id in lost:  # the protocol has nothing to resume it with: a beginning, and an error
            assert text.startswith(stream.texts[0])
            assert "Stream error" in stream.error
        else:
            assert (stream.texts, stream.error) == ([text], "")
    assert sum(bool(stream.error) for stream in streams) == 2
    assert len(lost) == 4, "two of the whole answers are lost too: smg asks the other router for them"
    assert await asyncio.gather(*wholes) == [text] * 4
    assert [await whole(smg, 20) for _ in range(2)] == [expected(PROMPT, cluster.digests["a"], 20)] * 2
    await cluster.local.restart("router-1")
    await cluster.local.wait_serving()
    await eventually(cluster.idle)
