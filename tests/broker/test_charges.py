"""Charges of tenants, and the fair service that follows from them."""

from __future__ import annotations

import random
from dataclasses import replace

from loraplex.contracts.broker import terms
from loraplex.contracts.broker.messages import Capacity
from loraplex.contracts.broker.queue import CHARGES_AT_ONCE
from loraplex.contracts.broker.terms import OUTPUT_WEIGHT, Placement, UsageReport
from tests.broker.clocked_queue import ClockedQueue, make_job

ROOMY = Capacity(rows=8, rows_limit=8, tokens=10_000, max_tokens=4096, max_rank=64)
ONE = replace(ROOMY, rows=1)


async def claim(queue: ClockedQueue, capacity: Capacity = ROOMY, worker: str = "w") -> list[str]:
    return [job.job_id for job in (await queue.claim(worker, capacity)).jobs]


async def test_service_goes_by_weight(queue: ClockedQueue) -> None:
    for number in range(60):
        for tenant, weight in (("heavy", 3.0), ("light", 1.0)):
            await queue.enqueue(make_job(f"{tenant}/{number}", tenant), Placement(weight))
    got = [await claim(queue, ONE) for _ in range(60)]
    assert sum(ids[0].startswith("heavy") for ids in got) == 45


async def test_a_tenant_back_from_idle_gets_no_credit_for_it(queue: ClockedQueue) -> None:
    for number in range(40):
        await queue.enqueue(make_job(f"busy/{number}", "busy", prompt=10))
    await queue.enqueue(make_job("back/first", "back", prompt=10))
    for _ in range(21):
        await claim(queue, ONE)
    for number in range(10):
        await queue.enqueue(make_job(f"back/{number}", "back", prompt=10))
    # Just above: of equals the one that came first is first.
    assert await queue.counter("busy") == 200 < await queue.counter("back") < 200.01
    got = [(await claim(queue, ONE))[0].partition("/")[0] for _ in range(10)]
    assert got == ["busy", "back"] * 5


async def test_charges_count_once_whatever_is_repeated(queue: ClockedQueue) -> None:
    adapter = make_job("j", "a", prompt=10, adapter="sha256:x")
    await queue.enqueue(adapter, Placement(2.0, (), 30.0))
    await queue.enqueue(make_job("other", "a"))
    assert await claim(queue, ONE) == ["j"]
    assert await queue.counter("a") == (10 + 30) / 2
    for _ in range(2):
        await queue.charge(UsageReport("j", 1, 6))
        assert await queue.counter("a") == 20 + 2 * 6 / 2
    await queue.charge(UsageReport("j", 1, 4))
    # Its worker is lost: the next attempt pays neither the prompt nor the adapter again.
    await queue.enqueue(replace(adapter, attempt=2, emitted={0: tuple(range(6))}), Placement(2.0, (), 30.0))
    assert await claim(queue, ONE) == ["j"]
    await queue.charge(UsageReport("j", 1, 50), UsageReport("j", 1, 50, ended=True))
    assert await queue.counter("a") == 26
    for _ in range(2):
        await queue.charge(UsageReport("j", 2, 3, ended=True))
        assert await queue.counter("a") == 29


async def test_what_ended_counts_for_whose_turn_the_next_claim_is(queue: ClockedQueue) -> None:
    names = [f"a{index}" for index in range(CHARGES_AT_ONCE + 6)]
    for name in (*names, "a-next"):
        await queue.enqueue(make_job(name, "a", prompt=1))
    for name in ("b0", "b-next"):
        await queue.enqueue(make_job(name, "b", prompt=1_000))
    assert set(await claim(queue, replace(ROOMY, rows=len(names) + 1))) == {*names, "b0"}
    assert await queue.counter("a") < await queue.counter("b")
    # More than one function takes; without them it were a's turn.
    reports = [UsageReport(name, 1, 1_000 if name == "a0" else 1, ended=True) for name in names]
    assert [job.job_id for job in (await queue.claim("w", ONE, *reports)).jobs] == ["b-next"]
    assert await queue.counter("a") == len(names) + OUTPUT_WEIGHT * (1_000 + len(names) - 1)


async def test_a_worker_that_holds_the_adapter_costs_nothing_for_it(queue: ClockedQueue) -> None:
    for name in ("first", "second"):
        await queue.enqueue(make_job(name, "a", prompt=10, adapter="sha256:x"), Placement(load_tokens=30))
    await claim(queue, replace(ONE, adapters=("sha256:x",)))
    assert await queue.counter("a") == 10


async def test_what_never_ran_is_refunded_once(queue: ClockedQueue) -> None:
    await queue.enqueue(make_job("j", "a", prompt=10))
    await queue.enqueue(make_job("waits", "a"))
    await claim(queue, ONE)
    for _ in range(2):
        await queue.charge(UsageReport("j", 1, 0, ended=True, ran=False))
        assert await queue.counter("a") == 0


async def test_two_backlogged_tenants_differ_by_a_bounded_service_and_nobody_starves(queue: ClockedQueue) -> None:
    """A claim's prompt and the output tokens in flight, twice, over random lengths and a random worker."""
    seed, rows, longest, most = 3, 6, 40, 30
    print(f"seed {seed}")
    chance = random.Random(seed)
    served = dict.fromkeys("abc", 0)
    count, running = 0, dict[str, tuple[int, int]]()
    gaps = []
    for _ in range(500):
        for tenant in served:
            # The tenants send different work; c as much as it may.
            while len(await queue.newcomers(tenant)) < (20 if tenant == "c" else 3):
                prompt = {"a": 1, "b": longest, "c": chance.randint(1, longest)}[tenant]
                await queue.enqueue(make_job(f"{tenant}/{count}", tenant, prompt=prompt, max_tokens=most))
                count += 1
        for job in (await queue.claim("w", Capacity(rows - len(running), rows, 10_000, 4096, 64))).jobs:
            running[job.job_id] = (0, chance.randint(1, most))
            served[job.tenant] += len(job.prompt_ids)
        reports = []
        for job_id, (made, length) in list(running.items()):
            served[job_id[0]] += terms.OUTPUT_WEIGHT
            running[job_id] = (made + 1, length)
            reports.append(UsageReport(job_id, 1, made + 1, ended=made + 1 == length))
            if made + 1 == length:
                del running[job_id]
        await queue.charge(*reports)
        gaps.append(max(served.values()) - min(served.values()))
    bound = 2 * (longest + terms.OUTPUT_WEIGHT * rows * most)
    assert 0 < max(gaps) <= bound
    assert min(served.values()) > 3 * bound


async def test_the_lead_that_a_claim_makes_is_its_prompt_and_its_answer(queue: ClockedQueue) -> None:
    """Claims of the lower counter alone: the lead goes from one tenant's prompt and answer to the other's."""
    prompt, answer, leads, lead = 60, 12, list[int](), 0
    for tenant, job in (("a", "a/0"), ("b", "b/0"), ("b", "b/1"), ("a", "a/waits"), ("b", "b/waits")):
        await queue.enqueue(make_job(job, tenant, prompt=prompt))
    for job, tokens in (("a/0", answer), ("b/0", answer - 1), ("b/1", answer)):
        assert await claim(queue, ONE) == [job]
        await queue.charge(UsageReport(job, 1, tokens, ended=True))
        cost = prompt + OUTPUT_WEIGHT * tokens
        lead += cost if job < "b" else -cost
        leads.append(lead)
    difference = max(leads) - min(leads)
    assert 2 * max(prompt, OUTPUT_WEIGHT * answer) < difference <= 2 * (prompt + OUTPUT_WEIGHT * answer)


async def test_a_job_given_back_before_it_ran_is_charged_when_it_runs(queue: ClockedQueue) -> None:
    await queue.enqueue(make_job("j", "a", prompt=10))
    await queue.enqueue(make_job("waits", "a"))
    for attempt in (1, 2):
        assert await claim(queue, ONE) == ["j"]
        assert await queue.counter("a") == 10
        for _ in range(2):
            await queue.charge(UsageReport("j", attempt, 0, ended=True, ran=False))
            assert await queue.counter("a") == 0
        await queue.enqueue(make_job("j", "a", prompt=10, attempt=attempt + 1))
    assert await claim(queue, ONE) == ["j"]
    await queue.charge(UsageReport("j", 3, 5, ended=True))
    assert await queue.counter("a") == 10 + OUTPUT_WEIGHT * 5


async def test_each_token_is_charged_once_however_often_a_job_is_given_back(queue: ClockedQueue) -> None:
    """Random attempts: some never run, some report late, twice or never that they have not, some die in the middle."""
    chance, seed, jobs, due = random.Random(5), 5, 60, 0
    print(f"seed {seed}")
    await queue.enqueue(make_job("never taken", "a", base="sha256:other"))  # the tenant stays active
    late: list[UsageReport] = []
    for number in range(jobs):
        name, prompt, attempt, runs = f"j{number}", chance.randint(1, 50), 0, False
        while not runs or chance.random() < 0.5:
            attempt += 1
            await queue.enqueue(make_job(name, "a", prompt=prompt, attempt=attempt))
            taken = await queue.claim("w", ROOMY, *late)
            assert [(job.job_id, job.attempt) for job in taken.jobs] == [(name, attempt)]
            late = []
            if chance.random() < 0.6:
                never_ran = UsageReport(name, attempt, 0, ended=True, ran=False)
                when = chance.choice(("now", "twice", "late", "never"))
                await queue.charge(*[never_ran] * {"now": 1, "twice": 2, "late": 0, "never": 0}[when])
                late += [never_ran] if when == "late" else []
                continue
            tokens, runs = chance.randint(0, 9), True
            due += OUTPUT_WEIGHT * tokens
            await queue.charge(UsageReport(name, attempt, tokens // 2), UsageReport(name, attempt, tokens))
            if chance.random() < 0.5:  # else its worker died
                late.append(UsageReport(name, attempt, tokens, ended=True))
        due += prompt
        await queue.charge(*late)
        await queue.finish(name, attempt)
        late = []
        assert await queue.counter("a") == due
