"""A tenant at ten times its quota, beside a quiet one: `python -m bench.quotas [--quick] [--json FILE]`.

Three routers, two workers with the hash model, and Valkey run as processes of this machine. In three minutes the loud
tenant asks for its quota of output tokens, and in three others, in turns with these, for ten times as much. Then
comes another minute at ten times the quota, in which a router is killed, then Valkey, which loses its data. Granted
are the tokens that clients got, in each minute. `--quick` has a quota a day instead, and takes seconds.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles

import uvloop

from bench.command import run_command
from bench.local_cluster import serving_cluster
from bench.report import Aim, Report, progress
from loraplex.admin.v1.plans_pb2 import Plan
from loraplex.cli.local import ClusterSettings, LocalCluster
from loraplex_client import AsyncClient, LoraplexError, ResourceExhaustedError

MODEL = "hash:?vocab=32000&seed=1&step_ms=5"
PROMPT = tuple(range(16))
AIMS = {
    "least_granted_of_quota": Aim(at_least=0.98),
    "most_granted_of_quota_and_bound": Aim(at_most=1.0),
    "events_of_granted": Aim(at_least=1.0),
    "quiet_p99_ttft_10x_over_1x": Aim(at_most=1.1),
}


@dataclass(frozen=True)
class Setup:
    """The sizes of a run: the quota in output tokens, tokens of an answer, seconds of a phase, and the plan's limit.

    `times` says for each phase how many times its quota the loud tenant asks for; in the last one a router and Valkey
    are killed. The quiet tenant makes a call every `quiet_s`, for an answer of `quiet_answer` tokens.
    """

    quota: int
    answer: int
    phase_s: float
    limit: str
    times: tuple[int, ...]
    quiet_answer: int = 30
    quiet_s: float = 0.05


# The minutes that are compared take turns, so that a machine that becomes slower counts in both.
FULL = Setup(quota=12_000, answer=60, phase_s=60.0, limit="output_tokens_per_minute", times=(1, 10, 10, 1, 1, 10, 10))
QUICK = Setup(quota=3_000, answer=20, phase_s=4.0, limit="tokens_per_day", times=(1, 10, 10))


@dataclass
class Tenant:
    """The calls of a tenant: how they ended, tokens that clients got, and seconds to first tokens."""

    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)


@dataclass
class Phase:
    """The calls of both tenants while the loud one asked for so many times its quota."""

    times: int
    loud: Tenant = field(default_factory=Tenant)
    quiet: Tenant = field(default_factory=Tenant)

    @property
    def is_flood(self) -> bool:
        """Return whether the loud tenant asked for more than its quota."""
        return self.times > 1

    @property
    def rows(self) -> list[dict[str, object]]:
        """Return the rows of the report's table."""
        return [_row(f"loud, {self.times}x", self.loud), _row("quiet beside it", self.quiet)]


def main() -> None:
    """Run the benchmark with the command line's arguments."""
    run_command("quotas", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick))


def measure(setup: Setup, quick: bool) -> Report:
    """Measure one cluster."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(setup, quick))


async def _measure(setup: Setup, quick: bool) -> Report:
    with tempfile.TemporaryDirectory(prefix="lp-") as name:
        async with _cluster(Path(name), setup) as cluster:
            if setup.limit.endswith("minute"):
                await asyncio.sleep(60.5 - time.time() % 60)
            last = len(setup.times) - 1
            phases = [await _run(cluster, setup, times, kills=at == last) for at, times in enumerate(setup.times)]
            await asyncio.sleep(8.0)  # what was left is held for a while, and then written
            events = _events(Path(name))
    granted, bound = sum(phase.loud.tokens for phase in phases), max(0.02 * setup.quota, setup.answer)
    # Tokens of each window in which the loud tenant asked for ten times its quota: a minute each, or all of them.
    floods = [phase.loud.tokens for phase in phases if phase.is_flood]
    windows = floods if setup.limit.endswith("minute") else [granted]
    compared = phases[:-1]
    return Report(
        name="quotas",
        command="python -m bench.quotas" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup),
        rows=[row for phase in phases for row in phase.rows],
        page_rows=[row for phase in phases[:2] for row in phase.rows],
        ratios={
            "least_granted_of_quota": min(windows) / setup.quota,
            "most_granted_of_quota_and_bound": max(windows) / (setup.quota + bound),
            "events_of_granted": events / granted,
            "quiet_p99_ttft_10x_over_1x": _quiet_p99(compared, True) / _quiet_p99(compared, False),
        },
        aims=AIMS,
    )


async def _run(cluster: LocalCluster, setup: Setup, times: int, *, kills: bool) -> Phase:
    """Run a phase in which the loud tenant asks for so many times its quota."""
    progress(f"{times}x the quota" + (", a router and Valkey die" if kills else ""))
    phase, rate = Phase(times), times * setup.quota / setup.answer / setup.phase_s
    await asyncio.gather(
        _ask(cluster, "loud", phase.loud, setup, 1 / rate),
        _ask(cluster, "quiet", phase.quiet, setup, setup.quiet_s),
        *([_kill(cluster, setup.phase_s)] if kills else []),
    )
    return phase


async def _ask(cluster: LocalCluster, tenant: str, into: Tenant, setup: Setup, pause_s: float) -> None:
    """Make calls at a steady rate for a phase, whatever becomes of them, and wait for their ends."""
    answer = setup.answer if tenant == "loud" else setup.quiet_answer
    async with AsyncClient(list(cluster.routers), tenant) as client:
        began, calls = time.monotonic(), set[asyncio.Task[None]]()
        number = 0
        while (now := time.monotonic() - began) < setup.phase_s - 1.5:
            if now < number * pause_s:
                await asyncio.sleep(number * pause_s - now)
            number += 1
            calls.add(asyncio.create_task(_call(client, into, answer)))
        await asyncio.gather(*calls)
        await asyncio.sleep(max(0.0, setup.phase_s - (time.monotonic() - began)))


async def _call(client: AsyncClient, into: Tenant, answer: int) -> None:
    start, got = time.perf_counter(), 0
    try:
        async with client.generate_stream(token_ids=PROMPT, max_tokens=answer, timeout_s=30.0) as stream:
            async for piece in stream:
                if not got and piece.token_ids:
                    into.ttft_s.append(time.perf_counter() - start)
                got += len(piece.token_ids)
        into.ends["answered"] += 1
    except ResourceExhaustedError as error:
        into.ends[error.reason or "RESOURCE_EXHAUSTED"] += 1
    except LoraplexError as error:
        into.ends[type(error).__name__] += 1
    into.tokens += got


async def _kill(cluster: LocalCluster, phase_s: float) -> None:
    await asyncio.sleep(phase_s / 6)
    for name in ("router-2", "valkey"):
        cluster.kill(name)
        await cluster.restart(name)
        await asyncio.sleep(phase_s / 6)


def _events(directory: Path) -> int:
    """Count the output tokens of the loud tenant's usage events, each id once."""
    counts: dict[str, int] = {}
    for line in (directory / "usage.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["subject"] == "tenants/loud":
            counts[event["id"]] = max(counts.get(event["id"], 0), event["data"]["output_tokens"])
    return sum(counts.values())


@asynccontextmanager
async def _cluster(directory: Path, setup: Setup) -> AsyncIterator[LocalCluster]:
    prompts = len(PROMPT) * setup.quota // setup.answer if setup.limit == "tokens_per_day" else 0
    plan = Plan(name="tenants/loud")
    setattr(plan, setup.limit, setup.quota + prompts)
    settings = ClusterSettings(
        MODEL,
        workers=2,
        routers=3,
        port=0,
        store_port=0,
        router_flags=("--usage-file", str(directory / "usage.jsonl")),
    )
    async with serving_cluster(settings, plan) as cluster:
        await asyncio.sleep(3.0)  # accounts are new until then
        yield cluster


def _p99(seconds: Sequence[float]) -> float:
    return quantiles(seconds, n=100, method="inclusive")[98]


def _quiet_p99(phases: Sequence[Phase], is_flood: bool) -> float:
    """Return the quiet tenant's percentile in all phases with a flood, or in all without."""
    return _p99([seconds for phase in phases if phase.is_flood is is_flood for seconds in phase.quiet.ttft_s])


def _row(name: str, tenant: Tenant) -> dict[str, object]:
    ends = {f"{end}": count for end, count in sorted(tenant.ends.items())}
    return {
        "case": name,
        "tokens": tenant.tokens,
        "ttft p99 ms": _p99(tenant.ttft_s) * 1e3 if tenant.ttft_s else 0.0,
        **ends,
    }


if __name__ == "__main__":
    main()
