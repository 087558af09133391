"""Files and batches of a real store, as tenants and runners call it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from loraplex.batches.v1 import batches_pb2 as pb
from loraplex.batches.v1 import batches_pb2_grpc

from loraplex.adapter_store.app import Store
from loraplex.adapter_store.embedded import EmbeddedDatabase
from loraplex.admin.v1 import tenants_pb2, tenants_pb2_grpc
from loraplex.batch_runner.app import BatchRunner
from loraplex.batch_runner.metrics import RunnerMetrics
from loraplex.batch_runner.settings import RunnerSettings
from loraplex.batch_store import batches as batches_module
from tests.adapter_store.conftest import metadata

CHAT = "/v1/chat/completions"
_BODY = {"model": "a", "messages": [{"role": "user", "content": "Hi"}]}
LINE = json.dumps({"custom_id": "1", "method": "POST", "url": CHAT, "body": _BODY}).encode()


class Caller:
    """The methods as tenant acme or another calls them."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = batches_pb2_grpc.BatchServiceStub(channel)

    async def __call__(self, method: str, tenant: str = "acme", **fields: Any) -> Any:
        request = getattr(pb, f"{method}Request")(**fields)
        return await getattr(self.stub, method)(request, metadata=metadata(tenant))

    async def upload(self, data: bytes, tenant: str = "acme", **header: str) -> Any:
        """Upload a file in two pieces."""
        header = {"filename": "in.jsonl", "purpose": "batch", **header}
        parts = [pb.UploadFileRequest(header=pb.FileHeader(**header))]
        parts += [pb.UploadFileRequest(data=piece) for piece in (data[:3], data[3:])]
        return (await self.stub.UploadFile(iter(parts), metadata=metadata(tenant))).file

    async def download(self, name: str, tenant: str = "acme") -> bytes:
        """A file's bytes."""
        messages = self.stub.DownloadFile(pb.DownloadFileRequest(name=name), metadata=metadata(tenant))
        return b"".join([message.data async for message in messages])

    async def batch(self, **fields: Any) -> Any:
        """A new batch of a new file."""
        file = await self.upload(b"12345\n")
        return (await self("CreateBatch", input_file=file.name, endpoint=CHAT, **fields)).batch

    async def report(self, lease: Any, **fields: Any) -> Any:
        """Report for a lease."""
        return (await self("ReportBatch", name=lease.batch.name, lease=lease.lease, **fields)).batch


@pytest_asyncio.fixture
async def call(store: Store) -> AsyncIterator[Caller]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        yield Caller(channel)


class Clock:
    """The store's clock."""

    def __init__(self) -> None:
        self._now, self._ahead_s = time.time_ns, 0.0

    def add_s(self, seconds: float) -> None:
        """Let time pass."""
        self._ahead_s += seconds

    def __call__(self) -> int:
        """The time in ns."""
        return self._now() + round(self._ahead_s * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the store's batches."""
    clock = Clock()
    monkeypatch.setattr("loraplex.batch_store.batches.time.time_ns", clock)
    return clock


def result(line: int, text: str = "", *, failed: bool = False) -> pb.LineResult:
    return pb.LineResult(line=line, failed=failed, result=text or f'{{"line":{line}}}')


async def test_a_file_is_kept_whole_and_is_its_tenants_alone(call: Caller) -> None:
    file = await call.upload(b"one\ntwo\n")
    assert (file.bytes, file.purpose, file.filename) == (8, "batch", "in.jsonl")
    assert await call.download(file.name) == b"one\ntwo\n"
    assert (await call("ListFiles")).files == [file]
    assert (await call("ListFiles", purpose="batch_output")).files == []
    with pytest.raises(grpc.aio.AioRpcError, match="file not found"):
        await call("GetFile", tenant="other", name=file.name)
    with pytest.raises(grpc.aio.AioRpcError, match="file not found"):
        await call("GetFile", tenant="other", name=file.name.rpartition("/")[2])
    await call("DeleteFile", name=file.name)
    with pytest.raises(grpc.aio.AioRpcError, match="file not found"):
        await call.download(file.name)


async def test_bad_uploads_and_batches_are_refused_by_field(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.batch_store.service.FILE_BYTES", 10)
    for data, header, words in (
        (b"x", {"purpose": "vision"}, "header.purpose: 'vision' is not served; give 'batch'"),
        (b"x", {"filename": ""}, "header.filename: is not a text"),
        (b"", {}, "data: the file is empty"),
        (b"0123456789x", {}, "data: the file is larger than the 10 bytes"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=words):
            await call.upload(data, **header)
    assert (await call("ListFiles")).files == []
    file = await call.upload(b"x")
    for fields, words in (
        ({"input_file": "file-0"}, "file not found"),
        ({"endpoint": "/v1/moderations"}, "endpoint: '/v1/moderations' is not one of"),
        ({"completion_window": {"seconds": 3}}, "completion_window: 3 s; 60 to 86400 s"),
        ({"metadata": {"k" * 65: ""}}, "metadata.k+: a key has 1 to 64"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=words):
            await call("CreateBatch", **{"input_file": file.name, "endpoint": CHAT, **fields})
    monkeypatch.setattr(batches_module, "OPEN_BATCHES", 1)
    await call.batch()
    with pytest.raises(grpc.aio.AioRpcError, match="tenant acme has 1 batches that run, the maximum"):
        await call.batch()


async def test_a_batch_ends_with_each_lines_first_result(call: Caller) -> None:
    batch = await call.batch(metadata={"a": "b"})
    assert (batch.state, dict(batch.metadata)) == (pb.BATCH_STATE_VALIDATING, {"a": "b"})
    with pytest.raises(grpc.aio.AioRpcError, match="which runs; cancel it first"):
        await call("DeleteFile", name=batch.input_file)
    lease = await call("LeaseBatch")
    assert (lease.batch.name, lease.lease, lease.begun_count) == (batch.name, 1, 0)
    assert not (await call("LeaseBatch")).HasField("batch")
    await call.report(lease, total_count=3, models={"a": "a@1"})
    running = await call.report(lease, begun_count=2, results=[result(2), result(3, failed=True)])
    assert (running.state, running.completed_count, running.failed_count) == (pb.BATCH_STATE_IN_PROGRESS, 1, 1)
    with pytest.raises(grpc.aio.AioRpcError, match="finished: 2 of 3 lines"):
        await call.report(lease, finished=True)
    ended = await call.report(lease, results=[result(2, "again"), result(1)], finished=True)
    assert (ended.state, ended.completed_count, ended.failed_count) == (pb.BATCH_STATE_COMPLETED, 2, 1)
    assert await call.download(ended.output_file) == b'{"line":1}\n{"line":2}\n'
    assert await call.download(ended.error_file) == b'{"line":3}\n'
    assert (await call("GetBatch", name=batch.name)).batch == ended
    with pytest.raises(grpc.aio.AioRpcError, match="is completed: nothing is left to cancel"):
        await call("CancelBatch", name=batch.name)
    with pytest.raises(grpc.aio.AioRpcError, match="or it has ended"):
        await call.report(lease, results=[result(1)])
    with pytest.raises(grpc.aio.AioRpcError, match="has answers of a batch"):
        await call("CreateBatch", input_file=ended.output_file, endpoint=CHAT)


async def test_a_lease_that_lapsed_is_anothers_and_its_holder_writes_no_more(call: Caller, clock: Clock) -> None:
    await call.batch()
    former = await call("LeaseBatch")
    await call.report(former, total_count=2, models={"a": "a@1"}, begun_count=2, results=[result(1)])
    clock.add_s(6)
    later = await call("LeaseBatch")
    assert (later.lease, later.begun_count, list(later.ended_lines)) == (2, 2, [1])
    assert dict(later.batch.models) == {"a": "a@1"}
    with pytest.raises(grpc.aio.AioRpcError, match="another runner has batch_"):
        await call.report(former, results=[result(2)])
    await call.report(later, released=True)
    assert (await call("LeaseBatch")).lease == 3


async def test_nobody_takes_a_batch_while_the_store_writes_its_files(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    await call.batch()
    lease = await call("LeaseBatch")
    await call.report(lease, total_count=1, models={"a": "a"}, results=[result(1)])
    pieces, now, taken = batches_module.Batches._result_pieces, time.time_ns, list[Any]()

    def slow_pieces(self: batches_module.Batches, batch: str, failed: int) -> Any:
        monkeypatch.setattr("loraplex.batch_store.batches.time.time_ns", lambda: now() + 60 * 10**9)
        taken.append(self.lease())
        return pieces(self, batch, failed)

    monkeypatch.setattr(batches_module.Batches, "_result_pieces", slow_pieces)
    assert (await call.report(lease, finished=True)).state == pb.BATCH_STATE_COMPLETED
    assert taken == [None, None]


async def test_a_batch_expires_fails_or_is_cancelled(call: Caller) -> None:
    await call.batch()
    lease = await call("LeaseBatch")
    failed = await call.report(lease, errors=[pb.BatchError(code="c", message="line 1: m", line=1, param="url")])
    assert (failed.state, failed.errors[0].message) == (pb.BATCH_STATE_FAILED, "line 1: m")
    await call.batch()
    lease = await call("LeaseBatch")
    await call.report(lease, total_count=1, models={"a": "a"})
    late = await call.report(lease, results=[result(1, failed=True)], finished=True, expired=True)
    assert (late.state, late.output_file) == (pb.BATCH_STATE_EXPIRED, "")
    batch = await call.batch()
    lease = await call("LeaseBatch")
    cancelling = (await call("CancelBatch", name=batch.name)).batch
    assert cancelling == (await call("CancelBatch", name=batch.name)).batch
    assert cancelling.state == pb.BATCH_STATE_CANCELLING
    assert (await call.report(lease, finished=True)).state == pb.BATCH_STATE_CANCELLED


async def test_tenants_have_turns_at_the_runners(call: Caller) -> None:
    for _ in range(3):
        await call.batch()
    file = await call.upload(b"1", "other")
    await call("CreateBatch", "other", input_file=file.name, endpoint=CHAT)
    leased = [(await call("LeaseBatch")).batch.name.split("/")[1] for _ in range(4)]
    assert leased == ["acme", "other", "acme", "acme"]


async def test_a_runner_asks_for_batches_of_other_tenants(call: Caller) -> None:
    await call.batch()
    assert not (await call("LeaseBatch", except_tenants=["acme", "more"])).HasField("batch")
    assert (await call("LeaseBatch", except_tenants=["more"])).HasField("batch")


async def test_a_caller_that_gives_a_place_back_waits_for_its_quota(call: Caller, clock: Clock) -> None:
    first, second = await call.batch(), await call.batch()
    lease = await call("LeaseBatch")
    await call.report(lease, waits=True, released=True)
    assert not (await call("LeaseBatch")).HasField("batch")
    await call("CancelBatch", name=second.name)  # which has not to wait
    assert (await call("LeaseBatch")).batch.name == second.name
    clock.add_s(61)
    assert (await call("LeaseBatch")).batch.name == first.name


async def test_a_batch_whose_runs_always_fail_ends_with_what_was_answered(call: Caller, clock: Clock) -> None:
    await call.batch()
    lease = await call("LeaseBatch")
    await call.report(lease, total_count=2, models={"a": "a"}, results=[result(1)])
    pauses = list[int]()
    for _ in range(1 + batches_module.ATTEMPTS):
        await call.report(lease, fault="ZeroDivisionError")
        pauses.append(0)
        while not (lease := await call("LeaseBatch")).HasField("batch"):
            clock.add_s(10)
            pauses[-1] += 10
        if len(pauses) == 1:  # progress
            await call.report(lease, waits=True)
    assert (pauses[:5], lease.failure) == ([10, 10, 10, 20, 40], "")
    await call.report(lease, fault="ZeroDivisionError")
    clock.add_s(10_000)
    lease = await call("LeaseBatch")
    assert lease.failure.endswith("without a further result, have failed, the last by ZeroDivisionError")
    failed = await call.report(lease, errors=[pb.BatchError(code="internal_error", message=lease.failure)])
    assert (failed.state, failed.completed_count, failed.total_count) == (pb.BATCH_STATE_FAILED, 1, 2)
    assert failed.errors[0].message == lease.failure
    assert await call.download(failed.output_file) == b'{"line":1}\n'


async def test_a_runner_fails_a_batch_whose_runs_always_fail(
    call: Caller, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_module, "FAULT_S", 0.0)
    monkeypatch.setattr("loraplex.batch_runner.app.LOOK_S", 0.01)
    batch = await call.batch()  # its line is no request, which a check before has not seen
    await call.report(await call("LeaseBatch"), total_count=1, models={"a": "a"}, released=True)
    runner = BatchRunner(RunnerSettings("127.0.0.1:1", f"127.0.0.1:{store.port}"), RunnerMetrics())
    following = asyncio.create_task(runner.follow())
    while not (batch := (await call("GetBatch", name=batch.name)).batch).errors:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    following.cancel()
    await runner.stop()
    why = (
        "10 attempts, one after the other and without a further result, have failed, the last by line 1: is not a JSON"
    )
    assert batch.errors[0].message.startswith(why)
    assert (batch.state, batch.errors[0].code) == (pb.BATCH_STATE_FAILED, "internal_error")


async def test_a_batch_that_ends_its_runners_fails_no_other(call: Caller, clock: Clock) -> None:
    poison, others = await call.batch(), [await call.batch() for _ in range(3)]
    failures = list[str]()
    for _ in range(4 * batches_module.ATTEMPTS):
        leases = list[Any]()
        while (lease := await call("LeaseBatch")).HasField("batch"):
            leases.append(lease)
        failures += [lease.batch.name for lease in leases if lease.failure]
        if failures:
            break
        if poison.name in {lease.batch.name for lease in leases}:
            clock.add_s(6)  # the runner has ended
        else:
            for lease in leases:
                await call.report(lease, waits=True)
                await call.report(lease, released=True)
    assert failures == [poison.name]
    for other in others:
        assert (await call("GetBatch", name=other.name)).batch.state == pb.BATCH_STATE_VALIDATING


async def test_a_suspect_whose_runner_lives_holds_up_no_other(call: Caller, clock: Clock) -> None:
    """Its lines may take hours, as those of another tenant do while no router answers."""
    batches = [await call.batch() for _ in range(3)]
    for _ in range(3):
        for batch in batches:
            assert (await call("LeaseBatch")).batch.name == batch.name
        clock.add_s(6)  # their runners have ended
    leases = list[Any]()
    for batch in batches:
        leases.append(await call("LeaseBatch"))
        assert leases[-1].batch.name == batch.name
        assert not (await call("LeaseBatch")).HasField("batch")
        for _ in range(20):
            clock.add_s(4)
            for lease in leases:
                await call.report(lease)


async def test_a_window_ends_although_no_runner_has_checked_the_file(call: Caller, clock: Clock) -> None:
    batch = await call.batch(completion_window={"seconds": 60})
    lease = await call("LeaseBatch")
    clock.add_s(61)
    async with asyncio.timeout(10):
        while (await call("GetBatch", name=batch.name)).batch.state != pb.BATCH_STATE_EXPIRED:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    with pytest.raises(grpc.aio.AioRpcError, match="or it has ended"):
        await call.report(lease, total_count=1, models={"a": "a"})
    await call("DeleteFile", name=batch.input_file)


async def test_a_batch_that_a_store_of_an_older_version_began_keeps_no_window_open(
    call: Caller, store: Store, clock: Clock
) -> None:
    """That store does not know the column of the window's end."""
    begun, unchecked = [await call.batch(completion_window={"seconds": 60}) for _ in range(2)]
    await call.report(await call("LeaseBatch"), total_count=1, models={"a": "a"})
    with store._database.transaction() as rows:
        rows.execute("UPDATE batches SET expire_ns = 1 WHERE batch = ?", (begun.name.rpartition("/")[2],))
    clock.add_s(61)
    async with asyncio.timeout(10):
        while (await call("GetBatch", name=unchecked.name)).batch.state != pb.BATCH_STATE_EXPIRED:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert (await call("GetBatch", name=begun.name)).batch.state == pb.BATCH_STATE_IN_PROGRESS


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_batch_that_is_to_end_does_not_wait_long_after_a_fault(
    call: Caller, clock: Clock, cancelled: bool
) -> None:
    batch = await call.batch(completion_window={"seconds": 3600 if cancelled else 60})
    lease = await call("LeaseBatch")
    await call.report(lease, total_count=1, models={"a": "a"})
    if cancelled:
        await call("CancelBatch", name=batch.name)
    for _ in range(6):
        await call.report(lease, fault="ZeroDivisionError")
        clock.add_s(30 if cancelled else 60)
        lease = await call("LeaseBatch")
        assert lease.HasField("batch")


async def test_a_runner_leaves_batches_alone_that_an_older_store_gives_it_unasked(
    call: Caller, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = batches_module.Batches.lease
    monkeypatch.setattr(batches_module.Batches, "lease", lambda self, _except_tenants: leases(self))
    file = await call.upload(LINE)
    made = [(await call("CreateBatch", input_file=file.name, endpoint=CHAT)).batch for _ in range(3)]
    settings = RunnerSettings("127.0.0.1:1", f"127.0.0.1:{store.port}", batches_at_once=2, drain_s=0.0)
    runner = BatchRunner(settings, RunnerMetrics())
    assert [await runner._begin() for _ in range(3)] == [True, True, False]
    assert [run.leaves for run in runner._running.values()] == [False, False]
    assert (await call("LeaseBatch")).batch.name == made[-1].name
    await runner.stop()


async def test_a_batch_that_is_cancelled_while_no_router_answers_is_not_failed(
    call: Caller, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.batch_runner.batch_run.HEARTBEAT_S", 0.1)
    file = await call.upload(LINE)
    name = (await call("CreateBatch", input_file=file.name, endpoint=CHAT)).batch.name
    runner = BatchRunner(RunnerSettings("127.0.0.1:1", f"127.0.0.1:{store.port}", drain_s=0.0), RunnerMetrics())
    assert await runner._begin()
    await call("CancelBatch", name=name)
    async with asyncio.timeout(20):
        while (batch := (await call("GetBatch", name=name)).batch).state == pb.BATCH_STATE_CANCELLING:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert (batch.state, list(batch.errors)) == (pb.BATCH_STATE_CANCELLED, [])
    await runner.stop()


async def test_results_count_among_the_bytes_of_a_tenant(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    await call.batch()
    lease = await call("LeaseBatch")
    for module in ("batches", "files"):
        monkeypatch.setattr(f"loraplex.batch_store.{module}.TENANT_BYTES", 50)
    running = await call.report(lease, total_count=9, models={"a": "a"}, results=[result(1), result(2)])
    assert running.state == pb.BATCH_STATE_IN_PROGRESS
    running = await call.report(lease, results=[result(1), result(2)])  # again: counted once
    with pytest.raises(grpc.aio.AioRpcError, match="tenant acme has 1 files and results of 26 bytes"):
        await call.upload(b"x" * 30)
    full = await call.report(lease, results=[result(3, "x" * 25)])
    assert (full.state, full.errors[0].code) == (pb.BATCH_STATE_CANCELLING, "storage_full")
    assert full.errors[0].message.startswith("tenant acme has files and results of 51 bytes, more than 50: delete")


async def test_batches_and_their_answers_do_not_fill_the_store(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "KEPT", 2)
    first, second = await call.batch(), await call.batch()
    for _ in range(2):
        lease = await call("LeaseBatch")
        await call.report(lease, errors=[pb.BatchError(code="c", message="m")])
    open_one = await call.batch()
    assert [one.name for one in (await call("ListBatches")).batches] == [open_one.name, second.name]
    with pytest.raises(grpc.aio.AioRpcError, match="batch not found"):
        await call("GetBatch", name=first.name)
    await call.batch()
    await call.batch()
    assert (await call("GetBatch", name=open_one.name)).batch.state == pb.BATCH_STATE_VALIDATING
    file = await call.upload(b"x")
    monkeypatch.setattr("loraplex.batch_store.files.TENANT_FILES", 1)
    with pytest.raises(grpc.aio.AioRpcError, match=r"at most 1 files of .* together: delete some"):
        await call("CreateBatch", input_file=file.name, endpoint=CHAT)


def test_results_are_counted_without_reading_them(tmp_path: Path) -> None:
    query = "EXPLAIN QUERY PLAN SELECT count(*), coalesce(sum(failed), 0) FROM batch_results WHERE batch = 'b'"
    with closing(EmbeddedDatabase(tmp_path / "catalog.db")) as database, database.reading() as rows:
        (step,) = rows.execute(query).fetchall()
    assert "USING COVERING INDEX" in step["detail"]


async def test_pages_are_newest_first_and_begin_behind_a_batch(call: Caller) -> None:
    names = [(await call.batch()).name for _ in range(3)]
    first = await call("ListBatches", page_size=2)
    assert [batch.name for batch in first.batches] == names[:0:-1]
    rest = await call("ListBatches", page_size=2, page_token=first.next_page_token)
    assert ([batch.name for batch in rest.batches], rest.next_page_token) == ([names[0]], "")
    assert (await call("ListBatches", tenant="other")).batches == []
    with pytest.raises(grpc.aio.AioRpcError, match="page_token: 'x' is not a batch of this list"):
        await call("ListBatches", page_token="x")


async def test_a_page_reads_little_more_than_it_has(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [(await call.batch()).name for _ in range(5)][::-1]
    assert [batch.name for batch in (await call("ListBatches", page_size=5)).batches] == names
    reads, read = list[Any](), batches_module._batch
    monkeypatch.setattr(batches_module, "_batch", lambda rows, row: reads.append(row) or read(rows, row))  # type: ignore[func-returns-value]
    monkeypatch.setattr("loraplex.adapter_store.convert._MAX_BYTES", 1)
    monkeypatch.setattr(batches_module, "_READ", 2, raising=False)
    first = await call("ListBatches", page_size=5)
    assert ([batch.name for batch in first.batches], len(reads)) == (names[:1], 2)
    assert names[0].endswith(first.next_page_token)


async def test_a_purge_of_a_tenant_takes_its_files_and_batches(call: Caller, store: Store) -> None:
    batch = await call.batch()
    other = await call.upload(b"others", "other")
    lease = await call("LeaseBatch")
    await call.report(lease, total_count=2, models={"a": "a"}, results=[result(1)])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        stub: Any = tenants_pb2_grpc.TenantServiceStub(channel)
        purged = await stub.PurgeTenant(tenants_pb2.PurgeTenantRequest(tenant="acme"))
    kinds = [name.split("/")[-2] for name in purged.removed]
    assert (sorted(kinds), list(purged.left)) == (["batches", "blobs", "files"], [])
    with pytest.raises(grpc.aio.AioRpcError, match="batch not found"):
        await call.report(lease, results=[result(2)])
    with pytest.raises(grpc.aio.AioRpcError, match="file not found"):
        await call.download(batch.input_file)
    assert await call.download(other.name, "other") == b"others"
