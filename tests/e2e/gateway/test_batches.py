"""Batches as OpenAI's own client makes them, run by a runner beside the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from loraplex.batches.v1.batches_pb2_grpc import BatchServiceStub

from loraplex.batch_runner.app import BatchRunner, lease_batch
from loraplex.batch_runner.batch_run import BatchRun
from loraplex.batch_runner.line_call import make_client, seed_of
from loraplex.batch_runner.metrics import RunnerMetrics
from loraplex.batch_runner.pace import LinePace
from loraplex.batch_runner.settings import RunnerSettings
from loraplex.contracts.options import SamplingParams
from loraplex_client import AsyncClient, DataLossError, ResourceExhaustedError
from loraplex_client.connection import AsyncConnection
from loraplex_client.endpoint import Credentials
from tests.e2e.conftest import TENANT, Cluster
from tests.e2e.gateway.conftest import Eventually, expected
from tests.plans_file import set_plans

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(60)]


def chat_line(custom_id: str, model: str, text: str, **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(*lines: Any) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    """The batch once it has ended."""
    while True:
        batch = await client.batches.retrieve(batch_id)
        if batch.status in {"completed", "failed", "expired", "cancelled"}:
            return batch
        await asyncio.sleep(0.05)


async def test_each_line_is_answered_once_by_its_own_adapter(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    lines = [chat_line(f"line {n}", "abc"[n % 3], f"Hi {n}", temperature=0) for n in range(30)]
    file = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    assert (file.filename, file.purpose, file.bytes) == ("in.jsonl", "batch", len(jsonl(*lines)))
    made = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"run": "7"}
    )
    assert (made.status, made.output_file_id, made.metadata) == ("validating", None, {"run": "7"})
    batch = await ended(client, made.id)
    assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (30, 30, 0)
    output = await client.files.content(batch.output_file_id)
    answers = [json.loads(line) for line in output.text.splitlines()]  # of texts with any characters
    assert [one["custom_id"] for one in answers] == [f"line {n}" for n in range(30)]
    for n, one in enumerate(answers):
        assert (one["error"], one["response"]["status_code"]) == (None, 200)
        body = one["response"]["body"]
        assert body["model"] == "abc"[n % 3]
        sampling = SamplingParams(temperature=0.0, seed=seed_of(made.id, n + 1))
        text = expected(f"user: Hi {n}\nassistant: ", cluster.digests["abc"[n % 3]], 8, sampling)
        assert body["choices"][0]["message"]["content"] == text


async def begun(client: openai.AsyncOpenAI, data: bytes, endpoint: Any = "/v1/chat/completions") -> Any:
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


async def lines_of(client: openai.AsyncOpenAI, file_id: str) -> list[Any]:
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]


async def test_a_bad_line_fails_the_batch_before_any_runs(client: openai.AsyncOpenAI) -> None:
    given = [chat_line("1", "a", "Hi"), chat_line("2", "nosuch", "Hi"), chat_line("3", "a@nosuch", "Hi")]
    batch = await ended(client, (await begun(client, jsonl(*given))).id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    first, second = batch.errors.data
    assert (first.line, first.param, first.code) == (2, "body.model", "model_not_found")
    assert first.message.startswith("line 2: body.model: model not found: nosuch; looked in tenant acme and")
    assert second.line == 3
    batch = await ended(client, (await begun(client, jsonl(chat_line("1", "a", "Hi", stream=True))[:-9])).id)
    assert batch.errors.data[0].message.startswith("line 1: is not JSON, and the file ends in it: was it sent in full?")


async def test_an_answer_and_an_error_have_files_of_their_own(client: openai.AsyncOpenAI) -> None:
    def line(custom_id: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"model": "a", **body}}

    given = [line("right", prompt=["x", "y"], max_tokens=2, n=2), line("wrong", prompt="x", max_tokens=2, top_p=7.0)]
    batch = await ended(client, (await begun(client, jsonl(*given), "/v1/completions")).id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 1)
    (answer,) = await lines_of(client, batch.output_file_id)
    assert (answer["custom_id"], len(answer["response"]["body"]["choices"])) == ("right", 4)
    (error,) = await lines_of(client, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("wrong", 400)
    assert error["response"]["body"]["error"]["param"] == "top_p"


async def test_a_cancelled_batch_ends_what_has_begun(client: openai.AsyncOpenAI) -> None:
    given = [chat_line(str(number), "b", f"Hi {number}", max_tokens=60) for number in range(400)]
    made = await begun(client, jsonl(*given))
    with pytest.raises(openai.BadRequestError, match="which runs; cancel it first"):
        await client.files.delete(made.input_file_id)
    running: Any = made
    while running.request_counts.completed == 0:
        await asyncio.sleep(0.02)
        running = await client.batches.retrieve(made.id)
    assert (await client.batches.cancel(made.id)).status == "cancelling"
    batch = await ended(client, made.id)
    assert batch.status == "cancelled"
    answers, errors = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
    assert sorted(int(one["custom_id"]) for one in answers + errors) == [*range(400)]
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError, match="is cancelled: nothing is left to cancel"):
        await client.batches.cancel(made.id)
    for file in (made.input_file_id, batch.output_file_id, batch.error_file_id):
        assert (await client.files.delete(file)).deleted


async def test_lists_go_on_behind_an_id_and_others_see_nothing(client: openai.AsyncOpenAI) -> None:
    made = [(await begun(client, jsonl(chat_line("1", "a", "Hi")))).id for _ in range(3)]
    listed = [batch.id async for batch in client.batches.list(limit=1)]
    assert listed[:3] == made[::-1]
    other = client.with_options(default_headers={"x-loraplex-tenant": "globex"})
    assert [batch async for batch in other.batches.list()] == []
    assert [file async for file in other.files.list()] == []
    with pytest.raises(openai.NotFoundError, match="batch not found"):
        await other.batches.retrieve(made[0])
    for batch in made:
        await ended(client, batch)
    files = [file.id async for file in client.files.list(purpose="batch", limit=2)]
    assert len(files) == len(set(files)) >= 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"completion_window": "soon"}, "completion_window: 'soon' is not a time such as 24h or 30m"),
        ({"completion_window": "25h"}, "completion_window: 90000 s; 60 to 86400 s"),
        ({"endpoint": "/v1/moderations"}, "endpoint: '/v1/moderations' is not one of"),
        ({"input_file_id": ""}, "input_file_id: is empty"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a: a key has 1 to 64 characters, a value at most 512"),
    ],
)
async def test_a_bad_batch_is_refused_by_its_field(client: openai.AsyncOpenAI, fields: Any, words: str) -> None:
    given = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h", **fields}
    with pytest.raises(openai.BadRequestError, match=words):
        await client.batches.create(**given)


async def test_a_limit_of_too_many_digits_is_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="limit: '0000000201099999999999' is not a number"):
        await client.get("/batches?limit=0000000201099999999999", cast_to=object)


async def test_a_bad_upload_is_refused_by_its_part(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose: 'vision' is not served; give batch"):
        await client.files.create(file=("a", b"x"), purpose="vision")
    with pytest.raises(openai.BadRequestError, match="file: the file is empty"):
        await client.files.create(file=("a", b""), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        await client.files.create(
            file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )


@pytest_asyncio.fixture(loop_scope="package")
async def no_runner(cluster: Cluster) -> AsyncIterator[AsyncConnection]:
    """A connection to the store's batches while the cluster's own runner stands still."""
    runner = cluster.local.processes["runner"]
    runner.send_signal(signal.SIGSTOP)
    store = AsyncConnection(cluster.local.store, BatchServiceStub, tenant=TENANT, credentials=Credentials())
    try:
        yield store
    finally:
        runner.send_signal(signal.SIGCONT)
        await store.close()


async def run_here(cluster: Cluster, store: AsyncConnection) -> None:
    """Run the only batch in this process."""
    routers = ",".join(cluster.local.routers)
    async with make_client(routers, cluster.local.store, None) as caller:
        run = await lease_batch(store, caller, RunnerMetrics())
        assert run is not None
        await run.run(LinePace(4, 1.1))


@pytest_asyncio.fixture(loop_scope="package")
async def two_places(cluster: Cluster, no_runner: AsyncConnection) -> AsyncIterator[None]:
    """A runner in this process, which runs two batches at once."""
    settings = RunnerSettings(",".join(cluster.local.routers), cluster.local.store, batches_at_once=2)
    runner = BatchRunner(settings, RunnerMetrics())
    following = asyncio.create_task(runner.follow())
    yield
    following.cancel()
    await runner.stop()


async def in_progress(client: openai.AsyncOpenAI, batch_id: str) -> None:
    """Wait until a batch's lines run."""
    while (await client.batches.retrieve(batch_id)).status != "in_progress":  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_lines_that_had_no_time_are_in_the_file_of_errors(
    client: openai.AsyncOpenAI, cluster: Cluster, no_runner: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await begun(client, jsonl(*(chat_line(str(number), "c", "Hi") for number in range(3))))
    later = time.time() + 2 * 86_400
    monkeypatch.setattr("loraplex.batch_runner.batch_run.time.time", lambda: later)
    await run_here(cluster, no_runner)
    batch: Any = await client.batches.retrieve(made.id)
    assert (batch.status, batch.request_counts.failed, batch.output_file_id) == ("expired", 3, None)
    errors = await lines_of(client, batch.error_file_id)
    assert [(one["custom_id"], one["error"]["code"]) for one in errors] == [(str(n), "batch_expired") for n in range(3)]


async def test_a_batch_that_is_cancelled_while_its_file_is_checked_ends(
    client: openai.AsyncOpenAI, cluster: Cluster, no_runner: AsyncConnection
) -> None:
    made = await begun(client, jsonl(chat_line("1", "c", "Hi"), chat_line("2", "a", "Hi")))
    async with make_client(",".join(cluster.local.routers), cluster.local.store, None) as caller:
        run = await lease_batch(no_runner, caller, RunnerMetrics())
        assert run is not None
        await client.batches.cancel(made.id)
        await run.run(LinePace(4, 1.1))
    batch: Any = await client.batches.retrieve(made.id)
    assert (batch.status, batch.request_counts.total, batch.error_file_id) == ("cancelled", 0, None)


async def test_a_file_whose_check_breaks_fails_its_batch_alone(
    client: openai.AsyncOpenAI, cluster: Cluster, no_runner: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("loraplex.batch_runner.batch_run.check_file", breaks)
    made = await begun(client, jsonl(chat_line("1", "c", "Hi")))
    await run_here(cluster, no_runner)
    batch: Any = await client.batches.retrieve(made.id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "internal_error")


async def test_a_file_that_is_damaged_fails_its_batch(
    client: openai.AsyncOpenAI, cluster: Cluster, no_runner: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object) -> None:
        raise DataLossError("other bytes than its digest says", kind="file", name="file-1")

    monkeypatch.setattr("loraplex.batch_runner.batch_run._download", damaged)
    made = await begun(client, jsonl(chat_line("1", "c", "Hi")))
    await run_here(cluster, no_runner)
    batch: Any = await client.batches.retrieve(made.id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "file_damaged")


async def test_a_line_that_began_in_time_is_not_late(
    client: openai.AsyncOpenAI, cluster: Cluster, no_runner: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, later = BatchRun._end_line, time.time() + 2 * 86_400

    def end_late(self: BatchRun, number: int, result: str, *, failed: bool) -> None:
        monkeypatch.setattr("loraplex.batch_runner.batch_run.time.time", lambda: later)
        assert self._stops()
        ends(self, number, result, failed=failed)

    monkeypatch.setattr(BatchRun, "_end_line", end_late)
    made = await begun(client, jsonl(*(chat_line(str(number), "c", "Hi") for number in range(3))))
    await run_here(cluster, no_runner)
    batch: Any = await client.batches.retrieve(made.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 3)


async def test_a_batch_that_waits_for_its_quota_leaves_its_place_to_others(
    client: openai.AsyncOpenAI,
    cluster: Cluster,
    two_places: None,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loraplex.batch_runner.app.WAIT_S", 0.1)
    await know_plan(cluster, eventually, "starves", "requests_per_minute = 1")
    starves = client.with_options(default_headers={"x-loraplex-tenant": "starves"})
    lines = jsonl(*(chat_line(str(number), "hash", "Hi") for number in range(3)))
    waiting = [await begun(starves, lines) for _ in range(2)]
    for made in waiting:
        await in_progress(starves, made.id)
    assert (await ended(client, (await begun(client, jsonl(chat_line("1", "c", "Hi")))).id)).status == "completed"
    for made in waiting:
        await starves.batches.cancel(made.id)
        assert (await ended(starves, made.id)).status == "cancelled"


async def test_a_tenant_with_all_places_leaves_one_to_another(client: openai.AsyncOpenAI, two_places: None) -> None:
    given = jsonl(*(chat_line(str(number), "b", f"Hi {number}", max_tokens=60) for number in range(100)))
    long = [await begun(client, given) for _ in range(2)]
    for made in long:
        await in_progress(client, made.id)
    other = client.with_options(default_headers={"x-loraplex-tenant": "globex"})
    assert (await ended(other, (await begun(other, jsonl(chat_line("1", "hash", "Hi")))).id)).status == "completed"
    for made in long:
        assert (await client.batches.cancel(made.id)).status == "cancelling"
        assert (await ended(client, made.id)).status == "cancelled"


async def know_plan(cluster: Cluster, eventually: Eventually, tenant: str, plan: str) -> None:
    """Give a tenant a plan, and wait until routers know it."""
    await set_plans(cluster.local.store, f"[tenants.{tenant}]\n{plan}\ncontext_tokens = 100\n")
    for router in cluster.local.routers:
        async with AsyncClient(router, tenant) as caller:

            async def knows_the_plan(caller: AsyncClient = caller) -> bool:
                with suppress(ResourceExhaustedError):
                    await caller.generate("x" * 100, max_tokens=1)
                    return False
                return True

            await eventually(knows_the_plan)


async def test_lines_wait_for_a_quota(client: openai.AsyncOpenAI, cluster: Cluster, eventually: Eventually) -> None:
    await know_plan(cluster, eventually, "waits", "concurrent_streams = 2")
    waits = client.with_options(default_headers={"x-loraplex-tenant": "waits"})
    batch = await ended(waits, (await begun(waits, jsonl(*(chat_line(str(n), "hash", "Hi") for n in range(12))))).id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 12)


async def test_the_command_makes_shows_and_downloads_a_batch(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl(chat_line("1", "a", "Hi"), chat_line("2", "a", "Ho", top_p=7.0)))

    async def said(*words: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "loraplex", "batches", *words]
        environ = {**os.environ, "LORAPLEX_STORE_ADDRESS": cluster.local.store, "LORAPLEX_TENANT": TENANT}
        ran = await asyncio.create_subprocess_exec(
            *command, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await ran.communicate()
        assert ran.returncode == code, output
        return output.decode()

    batch, *shown = (await said("create", str(tmp_path / "in.jsonl"), "--wait")).splitlines()
    assert "completed" in shown[1]
    shows, lists = await asyncio.gather(said("show", batch), said("list"))
    assert shows.splitlines() == shown
    assert batch in lists
    wrote, errors, cancelled = await asyncio.gather(
        said("download", batch, "--to", str(tmp_path / "out.jsonl")),
        said("download", batch, "--errors"),
        said("cancel", batch, code=2),
    )
    assert (wrote, json.loads(errors)["custom_id"]) == (f"wrote {tmp_path}/out.jsonl\n", "2")
    assert json.loads((tmp_path / "out.jsonl").read_text())["custom_id"] == "1"
    assert cancelled == f"error: {batch}: is completed: nothing is left to cancel\n"
