"""Requests that kill or hang every engine they meet end alone, are kept as dead letters, and take nobody with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from typer.testing import CliRunner

from loraplex.cli.__main__ import app
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex_client import AsyncClient, AsyncGenerationStream, InternalError, ResourceExhaustedError
from tests.hash_oracle import expected_ids

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

TOKENS = 150
PLAIN = "hash:?vocab=32000&seed=1&step_ms=10"
# The fifth token of its own answer: the engine dies of it in mid-stream.
LATE_POISON = "ends badly"
DEADLY = expected_ids(PLAIN, list(LATE_POISON.encode()))[4]
DRAWN = {"temperature": 0.9, "top_k": 50, "seed": 7, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "n": 2}


async def command(router: str, *arguments: str) -> str:
    """Return what `loraplex` prints for a command."""
    result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--router", router])
    assert result.exit_code == 0, result.output
    return result.stdout


async def jobs(router: str, *arguments: str) -> Any:
    """Return the jobs that `loraplex jobs --json` prints."""
    return json.loads(await command(router, "jobs", *arguments, "--json"))


async def read(stream: AsyncGenerationStream, got: list[int]) -> None:
    """Append every id that comes to `got`."""
    async for piece in stream:
        got += piece.token_ids


async def poisoned(cluster: Any, tenant: str, **options: Any) -> list[int]:
    """Return the ids that a tenant's request gets before it ends INTERNAL."""
    got: list[int] = []
    async with AsyncClient(cluster.local.router, tenant) as client:
        with pytest.raises(InternalError) as caught:
            await read(client.generate_stream(max_tokens=TOKENS, **options), got)
    assert caught.value.reason == "POISON_REQUEST"
    return got


async def quarantined(cluster: Any, tenant: str) -> float:
    """Return for how many seconds more a tenant's requests are refused."""
    async with AsyncClient(cluster.local.router, tenant) as client:
        with pytest.raises(ResourceExhaustedError) as caught:
            await client.generate("harmless", max_tokens=2)
    assert (caught.value.reason, caught.value.subject) == ("QUARANTINED", f"tenants/{tenant}/quarantine")
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


async def test_poison_ends_alone_and_everybody_else_is_served_exactly(
    start_cluster: StartCluster, eventually: Eventually
) -> None:
    flags = ("--rows", "10")  # too few for all innocents: both workers have some
    async with start_cluster(f"{PLAIN}&die_on={DEADLY}", {}, workers=2, worker_flags=flags) as cluster:
        client = cluster.client
        prompts = [f"innocent {number}" for number in range(8)]
        sampling = SamplingParams(**{name: value for name, value in DRAWN.items() if name != "n"})  # type: ignore[arg-type]
        options: dict[str, Any] = {"sampling": sampling, "stopping": StoppingParams(max_tokens=TOKENS)}
        truths = [
            [expected_ids(PLAIN, list(prompt.encode()), choice=choice, **options) for choice in range(2)]
            for prompt in prompts
        ]
        assert all(DEADLY not in ids for truth in truths for ids in truth)
        streams = [client.generate_stream(prompt, max_tokens=TOKENS, **DRAWN) for prompt in prompts]
        for stream in streams:
            await anext(stream)

        at_once, late, *wholes = await asyncio.gather(
            poisoned(cluster, "mallory", token_ids=[1, 2, DEADLY], request_id="at-once"),
            poisoned(cluster, "trudy", prompt=LATE_POISON, request_id="late"),
            *(stream.result() for stream in streams),
        )
        assert at_once == []
        assert late == list(expected_ids(PLAIN, list(LATE_POISON.encode())))[:5]
        for truth, whole in zip(truths, wholes, strict=True):
            assert [choice.token_ids for choice in whole.choices] == truth
        assert sum(whole.continuations for whole in wholes) > 0, "no innocent was on an engine that died"
        # Of the one engine of mallory that had others, and the two of trudy, whose first death a token cleared; and
        # once more each time where it was struck too, and had to go before the next suspect began.
        assert max(whole.continuations for whole in wholes) <= 6

        for tenant in ("mallory", "trudy"):
            assert 0 < await quarantined(cluster, tenant) <= 60
        assert (await client.generate("harmless", max_tokens=2)).token_ids
        router = cluster.local.router
        listed = json.loads(await command(router, "quarantine", "list", "--json"))
        assert {(one["model"], one["tenant"], one["adapter"]) for one in listed} == {
            ("hash", tenant, "") for tenant in ("mallory", "trudy")
        }
        assert await command(router, "quarantine", "lift", "mallory") == "mallory: 2 records removed\n"
        assert await command(router, "quarantine", "lift", "mallory") == "mallory: nothing to lift\n"
        async with AsyncClient(cluster.local.router, "mallory") as mallory:
            assert (await mallory.generate("harmless", max_tokens=2)).token_ids

        newest_first = await jobs(cluster.local.router, "dead")
        assert newest_first == sorted(newest_first, key=lambda job: job["died_at"], reverse=True)
        dead = {job["request_id"]: job for job in newest_first}
        assert set(dead) == {"at-once", "late"}
        assert {job["reason"] for job in dead.values()} == {"POISON_REQUEST"}
        assert [dead[name]["tenant"] for name in ("at-once", "late")] == ["mallory", "trudy"]
        assert [dead[name]["completion_tokens"] for name in ("at-once", "late")] == [0, 5]
        assert min(job["attempts"] for job in newest_first) >= 3
        header, *rows = (await command(cluster.local.router, "jobs", "dead")).splitlines()
        cells = [dict(zip(header.split("\t"), row.split("\t"), strict=True)) for row in rows]
        assert sorted(row["answer"] for row in cells) == ["0", "5"]
        assert [row["job"] for row in cells] == [job["job_id"] for job in newest_first]
        assert await jobs(cluster.local.router) == []
        await eventually(cluster.idle)
        async with client.generate_stream("still here", max_tokens=4000) as stream:
            await anext(stream)
            (running,) = await jobs(cluster.local.router)
            assert (running["tenant"], running["model"], running["strikes"]) == ("acme", "hash", 0)
            header, row = (await command(cluster.local.router, "jobs")).splitlines()
            assert dict(zip(header.split("\t"), row.split("\t"), strict=True))["worker"] == running["worker_id"]


async def test_two_tenants_poison_in_turn_does_not_put_the_only_worker_out_of_service(
    start_cluster: StartCluster,
) -> None:
    async with start_cluster(f"{PLAIN}&die_on={DEADLY}", {}, workers=1) as cluster:
        # Both wait for the worker's next engine, after the death of the first one.
        got = await asyncio.gather(
            poisoned(cluster, "mallory", token_ids=[1, 2, DEADLY]),
            poisoned(cluster, "trudy", token_ids=[1, 3, DEADLY]),
        )
        assert not any(got)
        assert (await cluster.client.generate("harmless", max_tokens=2)).token_ids
        log = (cluster.local.data_dir / "logs" / "worker-1.log").read_text()
        assert "claims nothing" not in log
