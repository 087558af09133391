"""Floods of one tenant's calls, which are served one by one without harm, and another tenant beside them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.runtime.rpc.principal import TENANT_KEY
from loraplex.runtime.rpc.server import channel_options
from loraplex_client import AsyncClient
from tests.trials.hostile.cases import TENANT

# A model with steps as long as on a GPU, and a context in which a prompt or an answer may be long.
MODEL = "hash:?vocab=32000&seed=1&step_ms=10&context=131072"
WORKER_FLAGS = ("--kv-blocks", "160000")
# Tokens of each of 16 answers that a client says it has, which make 4 MB.
RECEIVED = 118_000
# Number of a quiet tenant's streams beside a large Resume, and seconds for which they are timed.
STREAMS, GAPS_S = 8, 8.0
_METADATA = ((TENANT_KEY, TENANT),)
_TIMEOUT_S = 60.0
# Numbers for texts of which none is sent twice.
_numbers = count()

# Stubs are typed for calls that block.
Stub = Any


@dataclass(frozen=True, slots=True)
class Flood:
    """Calls that are sent `per_s` a second, which leaves the cluster at least one of two cores."""

    call: Callable[[Stub], Awaitable[None]]
    per_s: float


def _generate(stub: Stub, spec: pb.GenerateSpec) -> Any:
    return stub.Generate(pb.GenerateRequest(spec=spec), metadata=_METADATA, timeout=_TIMEOUT_S)


async def _read(call: Any) -> None:
    async for _ in call:
        pass


async def _cancelled(stub: Stub) -> None:
    """Cancel a call at once, or when it has begun."""
    number = next(_numbers)
    call = _generate(stub, pb.GenerateSpec(prompt=f"cancelled {number}", stopping=pb.Stopping(max_tokens=1_000)))
    if number % 2:
        await call.read()
    else:
        await asyncio.sleep(0.001 * (number % 10))
    call.cancel()


async def _long_prompt(stub: Stub) -> None:
    prompt = f"{next(_numbers)} " + "a long prompt " * 2_000
    await _read(_generate(stub, pb.GenerateSpec(prompt=prompt, stopping=pb.Stopping(max_tokens=1))))


async def _detokenize(stub: Stub) -> None:
    ids = [next(_numbers) % 32_000] * 30_000
    await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids), metadata=_METADATA, timeout=_TIMEOUT_S)


async def _new_regex(stub: Stub) -> None:
    number = next(_numbers)
    regex = f"(a|b){{1,{number % 50 + 2}}}-{number}"
    await _read(_generate(stub, pb.GenerateSpec(prompt="x", regex=regex, stopping=pb.Stopping(max_tokens=4))))


FLOODS = {
    "rapid cancels": Flood(_cancelled, 100.0),
    "long prompts": Flood(_long_prompt, 1.0),
    "Detokenize": Flood(_detokenize, 20.0),
    "new regexes": Flood(_new_regex, 10.0),
}


@asynccontextmanager
async def flooded(router: str, flood: Flood) -> AsyncIterator[None]:
    """Send a flood meanwhile; refusals are part of it."""
    calls = set[asyncio.Task[None]]()

    async def send_one() -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await flood.call(stub)

    async def send() -> None:
        due = time.monotonic()
        while True:
            calls.add(call := asyncio.create_task(send_one()))
            call.add_done_callback(calls.discard)
            due += 1 / flood.per_s
            await asyncio.sleep(due - time.monotonic())

    async with grpc.aio.insecure_channel(router, options=channel_options()) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        sending = asyncio.create_task(send())
        try:
            yield
        finally:
            sending.cancel()
            for call in calls:
                call.cancel()
            await asyncio.gather(sending, *calls, return_exceptions=True)


async def large_resume(stub: Stub, received: int = RECEIVED) -> pb.ResumeRequest:
    """Return a Resume that says its client has so many tokens of each of 16 answers, after one was delivered."""
    spec = pb.GenerateSpec(
        prompt=f"resumed {next(_numbers)}",
        stopping=pb.Stopping(max_tokens=received + 100, stop=[f"never{i}-" + "z" * 50 for i in range(16)]),
        output=pb.Output(n=16),
    )
    call = _generate(stub, spec)
    first = await call.read()
    call.cancel()
    assert isinstance(first, pb.GenerateResponse), "the stream has a message"
    ids = random.Random(1).choices(range(256, 16_000), k=received)
    parts = [pb.ReceivedTokens(choice=choice, token_ids=ids) for choice in range(16)]
    return pb.ResumeRequest(spec=spec, resume_token=first.event.resume_token, received=parts)


async def resume_once(stub: Stub, request: pb.ResumeRequest) -> str:
    """Send a Resume, and leave it once it is answered; return the name of its status or of its first message."""
    call = stub.Resume(request, metadata=_METADATA, timeout=_TIMEOUT_S)
    try:
        first = await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code().name
    call.cancel()
    return str(first.event.WhichOneof("kind")) if isinstance(first, pb.ResumeResponse) else "nothing"


async def longest_gap_beside_a_resume(router: str) -> float:
    """Return the longest time in seconds between two tokens of a quiet tenant's streams, beside a Resume of 4 MB."""
    async with (
        AsyncClient(router, "quiet") as client,
        grpc.aio.insecure_channel(router, options=channel_options()) as channel,
    ):
        stub, longest = inference_pb2_grpc.InferenceServiceStub(channel), 0.0
        request = await large_resume(stub)

        async def time_gaps(number: int) -> None:
            nonlocal longest
            last = None
            async for _ in client.generate_stream(f"stream {number}", max_tokens=100_000, model="hash"):
                now = time.monotonic()
                longest, last = max(longest, now - (last or now)), now

        timing = [asyncio.create_task(time_gaps(number)) for number in range(STREAMS)]
        await asyncio.sleep(2.0)
        longest = 0.0
        resuming = asyncio.create_task(resume_once(stub, request))
        await asyncio.sleep(GAPS_S)
        for task in (resuming, *timing):
            task.cancel()
        await asyncio.gather(resuming, *timing, return_exceptions=True)
        return longest
