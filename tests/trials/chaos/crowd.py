"""A crowd: many callers, whose calls are made once. What comes of each is kept for the checker."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.runtime.rpc.server import channel_options
from loraplex_client import AsyncClient, LoraplexError
from loraplex_client.endpoint import TENANT_KEY
from loraplex_client.errors import error_of
from tests.trials.chaos.arena import Arena
from tests.trials.chaos.history import CrowdCall, Request, Revision
from tests.trials.chaos.plan import MODEL, MODEL_NAME, PlannedFault
from tests.trials.hostile.floods import large_resume, resume_once

# Timeout of a call in seconds; one that has not ended by then has no outcome.
CALL_S = 40.0
# Timeout in seconds for a call to be refused.
REFUSED_S = 20.0
# Seconds that a caller waits after a refusal without RetryInfo.
_PAUSE_S = 0.3
# Interval in seconds of new requests of the other tenants, while there is a crowd.
_BESIDE_S = 0.2


@dataclass(frozen=True)
class Sort:
    """A sort of call: whose it is, which model it names, and how long its answer is."""

    tenants: Sequence[str]
    tokens: tuple[int, int] = (50, 150)
    # Name of the model, and the specs of which any may answer; none: the call must be refused.
    model: str = MODEL_NAME
    specs: tuple[str, ...] = (MODEL,)
    # Bytes of the prompt; 0: a short one.
    prompt_bytes: int = 0
    logprobs: int | None = None
    # Seconds for which the caller reads nothing after the first message.
    stops_s: float = 0.0
    may_break: bool = False
    # The SDK's client, which is to get the answer; None: called over plain gRPC.
    sdk: AsyncClient | None = None


class Crowd:
    """Calls of one fault, to all routers in turn; leave the context to wait until all have ended.

    Meanwhile the driver's tenants send new requests too.
    """

    def __init__(self, arena: Arena, planned: PlannedFault, *, channels: int = 1, options: Sequence[Any] = ()) -> None:
        self._arena = arena
        self._planned = planned
        self._channels = channels
        self._options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1), *options]
        self._stack = AsyncExitStack()
        self._stubs: list[tuple[str, Any]] = []
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Condition()
        self._pressed_until = 0.0
        # Calls that have brought tokens and still run.
        self.streaming = 0
        self.begun = 0
        self.calls: list[CrowdCall] = []

    async def __aenter__(self) -> Self:
        for _ in range(self._channels):
            # Not over the doors: their proxies share this process's loop, which a burst keeps busy.
            for name, address in zip(self._arena.cluster.doors, self._arena.cluster.routers, strict=True):
                channel = grpc.aio.insecure_channel(address, options=self._options)
                await self._stack.enter_async_context(channel)
                self._stubs.append((name, inference_pb2_grpc.InferenceServiceStub(channel)))
        self._beside = asyncio.create_task(self._send_beside())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        async with self._stack:
            try:
                if kind is None:
                    await asyncio.gather(*self._tasks)
            finally:
                for task in (self._beside, *self._tasks):
                    task.cancel()
                await asyncio.gather(self._beside, *self._tasks, return_exceptions=True)

    def begin(self, count: int, sort: Sort) -> None:
        """Begin so many calls now."""
        for _ in range(count):
            self._spawn(self._call(sort) if sort.sdk is None else self._ask(sort, sort.sdk))

    def resume(self, received: int) -> None:
        """Say at every router that so many tokens of 16 answers were received, which nobody delivered."""
        for _, stub in self._stubs:
            self._spawn(_resume(stub, received))

    def press(self, callers: int, sort: Sort, seconds: float) -> None:
        """Begin a closed loop of so many callers, each of which waits after a refusal; it lasts `seconds`."""
        self._pressed_until = self._arena.driver.now + seconds
        for _ in range(callers):
            self._spawn(self._call_again(sort))

    async def press_until_refused(self, callers: int, sort: Sort, seconds: float) -> None:
        """Press until a call finds the queue full, and `seconds` longer; return when one has."""
        self.press(callers, sort, REFUSED_S + seconds)
        async with asyncio.timeout(REFUSED_S), self._changed:
            await self._changed.wait_for(lambda: any(call.reason == "QUEUE_FULL" for call in self.calls))
        self._pressed_until = self._arena.driver.now + seconds

    async def until_streaming(self, count: int) -> None:
        """Wait until so many calls have brought tokens and still run."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: self.streaming >= count)

    async def until_ended(self) -> None:
        """Wait until every call has ended."""
        await asyncio.gather(*self._tasks)

    def ends(self) -> str:
        """Return how the calls have ended, by number, status and reason."""
        counts = Counter(f"{call.code} {call.reason}".strip() for call in self.calls)
        return ", ".join(f"{count} {end}" for end, count in counts.most_common())

    async def _send_beside(self) -> None:
        while True:
            await self._arena.driver.allow_more(1)
            await asyncio.sleep(_BESIDE_S)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call_again(self, sort: Sort) -> None:
        while self._arena.driver.now < self._pressed_until:
            ended = await self._call(sort)
            if ended.code != "OK":
                pause_s = _PAUSE_S if ended.retry_s is None else ended.retry_s
                await asyncio.sleep(min(pause_s, max(0.0, self._pressed_until - self._arena.driver.now)))

    async def _call(self, sort: Sort) -> CrowdCall:
        self.begun += 1
        number = next(self._numbers)
        request = self._request(number, sort)
        router, stub = self._stubs[number % len(self._stubs)]
        began, ids, ends, code = self._arena.driver.now, list[int](), 0, "OK"
        reason, retry_s = "", None
        call = stub.Generate(_message(request, sort), timeout=CALL_S, metadata=((TENANT_KEY, request.revision.tenant),))
        try:
            async for response in call:
                came = response.event.delta.token_ids
                begins = bool(came) and not ids
                ids += came
                ends += response.event.HasField("summary")
                if begins:
                    await self._count_streaming(1)
                    await asyncio.sleep(sort.stops_s)
        except grpc.aio.AioRpcError as error:
            failure = error_of(error, router)
            code, reason, retry_s = error.code().name, failure.reason, getattr(failure, "retry_after_s", None)
        kept = CrowdCall(
            *(self._planned.number, request, sort.specs, router, began, self._arena.driver.now, code, reason, retry_s),
            *(tuple(ids), ends, sort.may_break),
        )
        self.calls.append(kept)
        await self._count_streaming(-bool(ids))
        return kept

    async def _ask(self, sort: Sort, client: AsyncClient) -> None:
        self.begun += 1
        number = next(self._numbers)
        request = self._request(number, sort)
        began, ids, ends, code, reason = self._arena.driver.now, list[int](), 0, "OK", ""
        stream = client.for_caller(request.revision.tenant).generate_stream(
            request.prompt, model=sort.model, max_tokens=request.max_tokens, ignore_eos=True, timeout_s=CALL_S
        )
        try:
            async for piece in stream:
                ids += piece.token_ids
                ends += piece.finished is not None
        except LoraplexError as error:
            code, reason = type(error).__name__, error.reason
        self.calls.append(
            CrowdCall(
                *(self._planned.number, request, sort.specs, "", began, self._arena.driver.now, code, reason, None),
                *(tuple(ids), ends, False, True, bool(stream._recovery._token)),  # the SDK shows the token to nobody
            )
        )

    def _request(self, number: int, sort: Sort) -> Request:
        rng = random.Random(f"crowd {self._planned.pick} {number}")
        tenant = sort.tenants[number % len(sort.tenants)]
        # A long prompt is not kept: nothing may answer it.
        prompt = "" if sort.prompt_bytes else f"{self._planned.number} {number} {rng.getrandbits(64):x}"
        options: dict[str, Any] = {"logprobs": sort.logprobs, "ignore_eos": sort.sdk is not None}
        return Request(number, Revision(tenant), prompt, rng.randint(*sort.tokens), **options)

    async def _count_streaming(self, change: int) -> None:
        async with self._changed:
            self.streaming += change
            self._changed.notify_all()


def _message(request: Request, sort: Sort) -> pb.GenerateRequest:
    spec = pb.GenerateSpec(
        model=sort.model,
        prompt=request.prompt or "x" * sort.prompt_bytes,
        stopping=pb.Stopping(max_tokens=request.max_tokens),
        output=pb.Output(logprobs=request.logprobs),
    )
    return pb.GenerateRequest(spec=spec)


async def _resume(stub: Any, received: int) -> None:
    with suppress(grpc.aio.AioRpcError):  # another fault may end it
        await resume_once(stub, await large_resume(stub, received))
