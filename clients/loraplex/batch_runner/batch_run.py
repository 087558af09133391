"""Run one leased batch: check its file, run its lines, report their results, end it.

    lease ──▶ file ──▶ check, pin revisions ──▶ lines, some at once ──▶ results, several a report ──▶ finished

Everything that a successor needs is at the store: the names that lines run with, how many lines of the order may have
begun (told before they do), and the results. It runs again what may have begun and has no result: with the same request
id, seed and revision, so that the answer is the same, and it is charged once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
import time
from contextlib import suppress
from typing import Any, BinaryIO

from loraplex.batches.v1 import batches_pb2 as pb

from loraplex.batch_runner.line_call import BatchCluster, LineCalls, retry_after_s
from loraplex.batch_runner.lines import BatchLine, CheckedFile, check_file, read_line
from loraplex.batch_runner.metrics import RunnerMetrics
from loraplex.batch_runner.pace import LinePace
from loraplex.gateway.errors import HttpError
from loraplex_client import (
    AbortedError,
    AsyncClient,
    BatchError,
    DataLossError,
    LoraplexError,
    NotFoundError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from loraplex_client.batches import Batch, batch_of
from loraplex_client.calls import Call, Script
from loraplex_client.connection import AsyncConnection

log = logging.getLogger(__name__)

# Interval in seconds between reports of results, and of one without news, a quarter of the store's lease.
REPORT_S, HEARTBEAT_S = 0.1, 1.25
# Maximum number and bytes of a report's results.
_RESULTS, _BYTES = 256, 3 * 1024 * 1024
# Number of lines that are told to have begun at a time.
_CHUNK = 64
# Timeout in seconds of a line's call, after which it is made again; and for which lines that have begun may go on after
# the window's end or a cancel.
_LINE_S, _ENDING_S = 600.0, 600.0
# Number of times that a line is tried whose credential is refused, until the store has said that its key has ended.
_REFUSALS = 20


class LeaseLost(Exception):
    """Another runner has the batch, or its tenant was purged."""


class BatchRun:
    """Runs a leased batch."""

    def __init__(
        self, lease: pb.LeaseBatchResponse, store: AsyncConnection, client: AsyncClient, metrics: RunnerMetrics
    ) -> None:
        self.name, self._lease, self._failure = lease.batch.name, lease.lease, lease.failure
        self.tenant = self.name.split("/")[1]
        self.batch: Batch = batch_of(lease.batch)
        self._store = store.for_caller(self.tenant, "")
        self._cluster = BatchCluster(client, self.tenant, lease.key_id)
        self._caller = client.for_caller(self.tenant, batch_key=lease.key_id)
        self._metrics = metrics
        self._ended = set(lease.ended_lines)
        # Lines of the order that a former runner may have begun, and that the store knows of.
        self._begun_before = self._begun = lease.begun_count
        self._results: list[pb.LineResult] = []
        self._reporting = asyncio.Lock()
        # Whether lines have ended since the window's end came before their begin.
        self._expired = False
        # When it was seen that no further line begins: the window has ended, or the batch is cancelled; 0 before.
        self._ending_at = 0.0
        # Set when the rest is left to another runner, and when that or the end of new lines has come.
        self._leaving, self._halting, self._left_waiting = asyncio.Event(), asyncio.Event(), False
        # Lines that run, the number of those that wait for their quota, and when a line ended last.
        self._running = set[asyncio.Task[None]]()
        self._waiting, self._ended_at = 0, time.monotonic()

    @property
    def leaves(self) -> bool:
        """Return whether it leaves the rest of the batch to another runner."""
        return self._leaving.is_set()

    @property
    def waits_s(self) -> float:
        """Return for how many seconds no line has ended; 0 unless all that run wait for their quota."""
        waits = self._running and self._waiting == len(self._running)
        return time.monotonic() - self._ended_at if waits else 0.0

    def leave(self) -> None:
        """Begin no further line, and leave the rest of the batch to another runner."""
        self._left_waiting = self.waits_s > 0
        self._leaving.set()
        self._halting.set()

    async def run(self, pace: LinePace) -> None:
        """Run the batch to its end. Raises LeaseLost; cancelling it leaves the rest to another runner."""
        with tempfile.TemporaryFile() as file:
            beating = asyncio.create_task(self._beat())
            try:
                running = asyncio.create_task(self._run(file, pace))
                await asyncio.wait({beating, running}, return_when=asyncio.FIRST_COMPLETED)
                if not running.done():
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)
                    beating.result()
                await running
            finally:
                running.cancel()
                beating.cancel()
                await asyncio.gather(beating, running, return_exceptions=True)

    async def release(self, fault: str = "") -> None:
        """Report what has ended, and leave the batch to other runners.

        They get it at once, unless its lines waited for their quota when it left, or its run has failed by a fault.
        """
        request = self._news()
        request.name, request.lease = self.name, self._lease
        request.released, request.waits, request.fault = not fault, self._left_waiting, fault
        await self._store.run(_once("ReportBatch", request))

    async def _run(self, file: BinaryIO, pace: LinePace) -> None:
        if self._failure:
            await self._fail([BatchError("internal_error", self._failure)])
            return
        if self.batch.state == "validating" or (self.batch.total and self.batch.state != "finalizing"):
            checked = await self._checked(file)
            if self.batch.state == "validating":
                await self._begin(checked)
                if self.batch.has_ended:
                    return
            elif checked.errors:
                raise DataLossError(checked.errors[0].message, kind="file", name=self.batch.input_file)
            if self.batch.total:  # else it was cancelled before its file was checked
                await self._run_lines(file, checked.lines, pace)
        while self._results:
            await self._flush()
        if not self.leaves:
            await self._report(finished=True)

    async def _checked(self, file: BinaryIO) -> CheckedFile:
        request = pb.DownloadFileRequest(name=self.batch.input_file)
        while True:
            try:
                file.seek(0)
                file.truncate()
                await self._store.run(_download(request, file))
                break
            except LoraplexError as error:
                if isinstance(error, DataLossError):
                    why = f"the file is damaged at the store: upload it again; {error.message}"
                    return CheckedFile(errors=[BatchError("file_damaged", why)])
                if retry_after_s(error) is None:
                    raise
                await asyncio.sleep(retry_after_s(error) or REPORT_S)
        file.flush()
        file.seek(0)
        try:
            return await asyncio.to_thread(check_file, file, self.batch.endpoint)
        except OSError:  # of this machine
            raise
        except Exception:  # a fault of this code
            log.exception("%s: its file was not checked", self.name)
            why = "the file was not checked, by an internal error; the runner's log says more"
            return CheckedFile(errors=[BatchError("internal_error", why)])

    async def _begin(self, checked: CheckedFile) -> None:
        """Pin the adapters to their revisions and begin the batch, or fail it with what is wrong with its file."""
        models, errors = dict[str, str](), list(checked.errors)
        for name, line in checked.models.items() if not errors else ():
            try:
                models[name] = await self._pinned(name)
            except (LoraplexError, HttpError) as error:
                message = error.message.replace("adapter not found:", "model not found:", 1)
                errors.append(BatchError("model_not_found", f"line {line}: body.model: {message}", line, "body.model"))
            if self._halting.is_set():  # a cluster that did not answer has not said that there is no such model
                return
        if errors:
            await self._fail(errors)
        else:
            await self._report(total_count=len(checked.lines), models=models)

    async def _fail(self, errors: list[BatchError]) -> None:
        told = [pb.BatchError(code=e.code, message=e.message, line=e.line, param=e.param) for e in errors]
        await self._report(errors=told[:100])

    async def _pinned(self, name: str) -> str:
        """Return a model's name with the revision that it means now. Raises LoraplexError, HttpError."""
        while True:
            try:
                named = await self._cluster.named(self._caller, name)
                if not (adapter_id := named.get("adapter_id")):
                    return name
                adapter, revision = await self._caller.store.get(adapter_id)
                base = f"{named['model']}:" if "model" in named else ""
                return f"{base}{adapter.name}@{revision.digest}"
            except LoraplexError as error:
                if (pause_s := retry_after_s(error)) is None or self._ending_at:
                    raise
                await asyncio.sleep(pause_s)

    async def _run_lines(self, file: BinaryIO, lines: list[BatchLine], pace: LinePace) -> None:
        """Run what has no result, in the order; lines that do not begin end with an error."""
        calls = LineCalls(self._cluster, self.batch.id, self.batch.endpoint, self.batch.models, pace)
        self._ended_at = time.monotonic()
        try:
            for place, line in enumerate(lines):
                if self.leaves:
                    break
                if line.number in self._ended:
                    continue
                if place >= self._begun and not self._stops():
                    self._begun = min(len(lines), place + _CHUNK)
                    await self._report(begun_count=self._begun)
                if self._stops() and place >= self._begun_before:
                    await self._end_unbegun(calls, file, line)
                    await self._room_for_results()
                    continue
                while len(self._running) >= pace.at_once:
                    await self._one_ends()
                await self._room_for_results()
                self._running.add(asyncio.create_task(self._run_line(calls, file, line)))
            while self._running:
                await self._one_ends()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _one_ends(self) -> None:
        done, self._running = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _run_line(self, calls: LineCalls, file: BinaryIO, line: BatchLine) -> None:
        """Run a line until it has a result, or until the batch leaves."""
        fields = await asyncio.to_thread(read_line, file, line)
        number, custom_id, refusals = line.number, fields["custom_id"], 0
        while not self.leaves:
            try:
                async with asyncio.timeout(_LINE_S):
                    status, body = await calls.answer(number, fields)
                self._end_line(number, calls.result(number, custom_id, status, body), failed=status != 200)
                return
            except (HttpError, LoraplexError, TimeoutError) as error:
                refusals += isinstance(error, UnauthenticatedError)
                pause_s = retry_after_s(error)
                if pause_s is None or refusals > _REFUSALS:
                    self._end_line(number, calls.failure(number, custom_id, error), failed=True)
                    return
                is_quota = isinstance(error, ResourceExhaustedError)
                self._metrics.waits.labels("quota" if is_quota else "cluster").inc()
                if self._gives_up(error):
                    await self._end_unbegun(calls, file, line)
                    return
            except Exception:  # a fault of this code: the line's alone, not its batch's
                log.exception("%s: line %d failed", self.batch.id, number)
                result = calls.error(number, custom_id, "internal_error", "internal error; the runner's log says more")
                self._end_line(number, result, failed=True)
                return
            self._waiting += is_quota
            try:
                await self._pause(pause_s * random.uniform(1.0, 1.2))
            finally:
                self._waiting -= is_quota

    def _gives_up(self, error: Exception) -> bool:
        """Return whether a line that waits has no time left: for a quota none once no further line begins."""
        if not self._stops():
            return False
        waits_for_quota = isinstance(error, (ResourceExhaustedError, UnauthenticatedError))
        return waits_for_quota or time.monotonic() > self._ending_at + _ENDING_S

    async def _pause(self, pause_s: float) -> None:
        """Wait, at most until the batch leaves or is cancelled, or its window ends."""
        halt = self._leaving if self._ending_at else self._halting
        left_s = pause_s if self._ending_at else max(0.0, self.batch.expire_time.timestamp() - time.time()) + 0.1
        with suppress(TimeoutError):
            async with asyncio.timeout(min(pause_s, left_s)):
                await halt.wait()

    def _stops(self) -> bool:
        """Return whether no further line begins."""
        if not self._ending_at:
            is_late = time.time() >= self.batch.expire_time.timestamp()
            if (is_late and self.batch.state == "in_progress") or self.batch.state == "cancelling":
                self._ending_at = time.monotonic()
                self._halting.set()
        return self._ending_at > 0

    async def _end_unbegun(self, calls: LineCalls, file: BinaryIO, line: BatchLine) -> None:
        custom_id = (await asyncio.to_thread(read_line, file, line))["custom_id"]
        code, why = ("batch_cancelled", "the batch was cancelled before it could run")
        if self.batch.state != "cancelling":
            self._expired = True
            code, why = ("batch_expired", "the batch's window ended before it could run")
        self._end_line(line.number, calls.error(line.number, custom_id, code, why), failed=True)

    def _end_line(self, number: int, result: str, *, failed: bool) -> None:
        self._results.append(pb.LineResult(line=number, failed=failed, result=result))
        self._metrics.lines.labels("error" if failed else "answer").inc()
        self._ended_at = time.monotonic()

    async def _room_for_results(self) -> None:
        """Wait while the store does not take results."""
        while len(self._results) >= 2 * _RESULTS or sum(len(one.result) for one in self._results) >= 2 * _BYTES:
            await self._flush()

    async def _beat(self) -> None:
        """Report results soon, and the lease in time. Raises LeaseLost."""
        told_at = time.monotonic()
        while True:
            await asyncio.sleep(REPORT_S)
            self._stops()
            if self._results or time.monotonic() > told_at + HEARTBEAT_S:
                await self._flush()
                told_at = time.monotonic()

    def _news(self) -> pb.ReportBatchRequest:
        """Return a report of the first results, as many as it may have."""
        taken, size = list[pb.LineResult](), 0
        for result in self._results[:_RESULTS]:
            size += result.ByteSize() + 16
            if taken and size > _BYTES:
                break
            taken.append(result)
        return pb.ReportBatchRequest(results=taken, expired=self._expired, waits=self.waits_s > 0)

    async def _flush(self) -> None:
        async with self._reporting:
            news = self._news()
            await self._send(news)
            del self._results[: len(news.results)]

    async def _report(self, **fields: Any) -> None:
        async with self._reporting:
            await self._send(pb.ReportBatchRequest(**fields))

    async def _send(self, request: pb.ReportBatchRequest) -> None:
        """Report until the store has taken it. Raises LeaseLost."""
        request.name, request.lease = self.name, self._lease
        while True:
            try:
                answer = await self._store.run(_once("ReportBatch", request))
            except (AbortedError, NotFoundError) as error:
                raise LeaseLost(error.message) from error
            except LoraplexError as error:
                if (pause_s := retry_after_s(error)) is None:
                    raise
                log.warning("%s waits for the store: %s", self.batch.id, error.message)
                await asyncio.sleep(pause_s)
                continue
            self.batch = batch_of(answer.batch)
            return


def _once(method: str, request: Any) -> Script[Any]:
    return (yield Call(method, request, once=True))


def _download(request: pb.DownloadFileRequest, file: BinaryIO) -> Script[None]:
    def take(message: pb.DownloadFileResponse) -> None:
        file.write(message.data)

    yield Call("DownloadFile", request, take=take)
