"""Times of answers as an outsider sees them: `python -m bench.timing [--quick] [--json FILE]`.

Tenant `eve` asks for an adapter of `acme` and for one that does not exist, at the router and at the store, and for
prompts that acme has just asked and for new ones. The area under the curve (AUC) of a classifier by time alone says how
well the two can be told apart: 0.5 is chance. One of eve's own prompts shows that the times would tell.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop
from loraplex.adapters.v1 import adapters_pb2, adapters_pb2_grpc
from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc

from bench.command import run_command
from bench.local_cluster import serving_cluster
from bench.report import Aim, Report, progress
from loraplex.cli.local import ClusterSettings
from loraplex_client import AsyncStoreClient

MODEL = "hash:?vocab=32000&seed=1&step_ms=4"
PROMPT_TOKENS = 1_536
AIMS = {
    "adapter_at_router_auc": Aim(at_most=0.55),
    "adapter_at_store_auc": Aim(at_most=0.55),
    "prefix_of_another_auc": Aim(at_most=0.55),
    "own_prefix_auc": Aim(at_least=0.9),
}
SEED = 16
ACME, EVE = (("x-loraplex-tenant", "acme"),), (("x-loraplex-tenant", "eve"),)


@dataclass(frozen=True)
class Setup:
    """The sizes of a run: timings of each kind, of the control, and acme's adapters."""

    timings: int
    control: int
    adapters: int


FULL, QUICK = Setup(timings=5_000, control=500, adapters=200), Setup(timings=200, control=50, adapters=20)


@dataclass(frozen=True)
class Outsider:
    """Stubs of router and store, and names and numbers that are used once."""

    router: Any
    store: Any
    names: Sequence[str]
    draw: random.Random

    def prompt(self) -> list[int]:
        """Return a prompt that nobody has asked."""
        return [self.draw.randrange(256, 30_000) for _ in range(PROMPT_TOKENS)]

    def adapter(self, exists: bool) -> str:
        """Return the name of an adapter of acme, or of none."""
        name = self.draw.choice(self.names) if exists else f"{self.draw.getrandbits(64):016x}"
        return f"tenants/acme/adapters/{name}"


def main() -> None:
    """Run the benchmark with the command line's arguments."""
    run_command("timing", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick))


def measure(setup: Setup, quick: bool) -> Report:
    """Measure one cluster."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(setup, quick))


async def _measure(setup: Setup, quick: bool) -> Report:
    rows, ratios = [], {}
    async with _outsider(setup) as eve:

        async def at_router(known: bool) -> float:
            spec = inference_pb2.GenerateSpec(adapter=eve.adapter(known), prompt="x")
            return await _refused_s(eve.router.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=EVE).read())

        async def at_store(known: bool) -> float:
            request = adapters_pb2.GetAdapterRequest(name=eve.adapter(known))
            return await _refused_s(eve.store.GetAdapter(request, metadata=EVE))

        async def prefix(known: bool, owner: Any = ACME) -> float:
            prompt, other = eve.prompt(), eve.prompt()
            await _answer_s(eve, prompt, owner)
            return await _answer_s(eve, prompt if known else other, EVE)

        probes: dict[str, tuple[int, Callable[[bool], Awaitable[float]]]] = {
            "adapter_at_router": (setup.timings, at_router),
            "adapter_at_store": (setup.timings, at_store),
            "prefix_of_another": (setup.timings, prefix),
            "own_prefix": (setup.control, lambda known: prefix(known, EVE)),
        }
        for name, (count, probe) in probes.items():
            progress(f"{name}: {count} timings of each kind")
            known, unknown = await _timings(probe, count, eve.draw)
            ratios[f"{name}_auc"] = auc(known, unknown)
            medians = {"known_ms": statistics.median(known) * 1e3, "unknown_ms": statistics.median(unknown) * 1e3}
            rows.append({"probe": name, "timings": count, **medians, "auc": ratios[f"{name}_auc"]})
    return Report(
        name="timing",
        command="python -m bench.timing" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup),
        rows=rows,
        ratios=ratios,
        aims=AIMS,
    )


def auc(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return how often a time of the one kind is above one of the other, or below, whichever is more often.

    That is the area under the curve of the best classifier by a threshold; ties count half.
    """
    sorted_others = sorted(others)
    below = sum(bisect_left(sorted_others, one) + bisect_right(sorted_others, one) for one in ones) / 2
    share = below / (len(ones) * len(others))
    return max(share, 1 - share)


async def _timings(
    probe: Callable[[bool], Awaitable[float]], count: int, draw: random.Random
) -> tuple[list[float], list[float]]:
    """Return the times of both kinds, drawn in one order by chance."""
    kinds = [True, False] * count
    draw.shuffle(kinds)
    found: dict[bool, list[float]] = {True: [], False: []}
    for kind in kinds:
        found[kind].append(await probe(kind))
    return found[True], found[False]


async def _refused_s(call: Awaitable[Any]) -> float:
    """Return the seconds until a call is refused, as all of these must be, alike."""
    began = time.perf_counter()
    try:
        await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return time.perf_counter() - began
        raise
    raise AssertionError("another tenant's adapter was served")


async def _answer_s(eve: Outsider, prompt: Sequence[int], caller: Any) -> float:
    """Return the seconds to the end of an answer of one token."""
    spec = inference_pb2.GenerateSpec(token_ids=inference_pb2.TokenIds(ids=prompt))
    spec.stopping.max_tokens = 1
    began = time.perf_counter()
    call = eve.router.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=caller)
    while await call.read() is not grpc.aio.EOF:
        pass
    return time.perf_counter() - began


@asynccontextmanager
async def _outsider(setup: Setup) -> AsyncIterator[Outsider]:
    """Run a cluster in which acme has adapters."""
    draw = random.Random(SEED)
    names = [f"{draw.getrandbits(64):016x}" for _ in range(setup.adapters)]
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lp-")))
        settings = ClusterSettings(MODEL, port=0, store_port=0, data_dir=directory)
        cluster = await stack.enter_async_context(serving_cluster(settings))
        files = directory / "adapter"
        files.mkdir()
        (files / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}')
        (files / "adapter_model.safetensors").write_bytes(b"weights")
        async with AsyncStoreClient(cluster.store, "acme") as store:
            for name in names:
                await store.push(files, name)
        router = await stack.enter_async_context(grpc.aio.insecure_channel(cluster.router))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(cluster.store))
        yield Outsider(
            inference_pb2_grpc.InferenceServiceStub(router), adapters_pb2_grpc.AdapterServiceStub(channel), names, draw
        )


if __name__ == "__main__":
    main()
