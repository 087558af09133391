"""Ends of answers: stop strings, cancelled calls, deadlines, and request ids that are used again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loraplex.contracts.options import StoppingParams
from loraplex_client import AlreadyExistsError, DeadlineExceededError, FinishReason
from tests.e2e.answers.conftest import MODEL, Eventually, expected
from tests.e2e.conftest import Cluster
from tests.hash_oracle import expected_ids

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_stop_strings_end_the_answer_and_free_the_worker(cluster: Cluster, eventually: Eventually) -> None:
    whole = await cluster.client.generate("stop", max_tokens=40)
    stop = f"<{whole.token_ids[20]}>"
    answer = await cluster.client.generate("stop", max_tokens=4000, stop=[stop])
    assert answer.token_ids == whole.token_ids[:20]
    assert (answer.finish_reason, answer.stop) == (FinishReason.STOP, stop)
    assert answer.usage.completion_tokens == 20
    await eventually(cluster.idle)


async def test_a_stop_string_ends_its_own_choice_alone(cluster: Cluster, eventually: Eventually) -> None:
    truth = [expected_ids(MODEL, [ord("x")], stopping=StoppingParams(max_tokens=40), choice=c) for c in range(3)]
    answer = await cluster.client.generate("x", n=3, max_tokens=40, stop=[f"<{truth[1][10]}>"])
    assert [choice.token_ids for choice in answer.choices] == [truth[0], truth[1][:10], truth[2]]
    await eventually(cluster.idle)


async def test_a_deadline_ends_the_work(cluster: Cluster, eventually: Eventually) -> None:
    got: list[int] = []

    async def read(timeout_s: float) -> None:
        async for piece in cluster.client.generate_stream("x", max_tokens=20_000, timeout_s=timeout_s):
            got.extend(piece.token_ids)

    for timeout_s in (1.0, 5.0, 20.0):  # a busy machine takes longer for the first token
        with pytest.raises(DeadlineExceededError):
            await read(timeout_s)
        if got:
            break
    assert got
    assert got == expected("x", "", len(got))
    await eventually(cluster.idle)


async def test_an_id_that_is_used_again_at_once_gets_its_own_tokens(cluster: Cluster, eventually: Eventually) -> None:
    async def ask_and_leave_and_ask(number: int) -> None:
        for turn in range(5):
            prompt = f"prompt {number} {turn}"
            options: dict[str, Any] = {"request_id": f"same-{number}", "max_tokens": 30}
            while True:
                try:
                    async with cluster.client.generate_stream(prompt, **options) as stream:
                        first = await anext(stream)
                        if turn % 2 == 0:
                            break  # leaves in mid-stream, and the next turn comes at once
                        whole = await stream.result()
                        assert list(whole.token_ids) == expected(prompt, "", 30)
                        break
                except AlreadyExistsError:  # the router has not yet seen that the last one left
                    await asyncio.sleep(0.01)
            assert first.token_ids[0] == expected(prompt, "", 1)[0]

    async with asyncio.timeout(60):
        await asyncio.gather(*(ask_and_leave_and_ask(number) for number in range(8)))
    await eventually(cluster.idle)
