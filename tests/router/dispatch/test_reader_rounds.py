"""Rounds of readers: an urgent reader is woken at once, the others together in the next round."""

from __future__ import annotations

import asyncio

from router.dispatch.routed_job import ReaderRounds


async def test_what_is_urgent_is_read_at_once() -> None:
    rounds, reader = ReaderRounds(), asyncio.Event()
    rounds.wake(reader, urgent=False)
    assert not reader.is_set()
    rounds.wake(reader, urgent=True)
    assert reader.is_set()
    reader.clear()
    another = asyncio.Event()
    rounds.wake(another, urgent=False)
    await another.wait()
    # Its turn was the urgent one: it has none in the round.
    assert not reader.is_set()


async def test_what_comes_during_a_round_is_read_in_the_next_one_all_at_once() -> None:
    rounds, events = ReaderRounds(), [asyncio.Event() for _ in range(3)]
    come = [0, 0, 0]

    async def source() -> None:
        for _ in range(300):
            for index, event in enumerate(events):
                come[index] += 1
                rounds.wake(event, urgent=False)
            await asyncio.sleep(0)

    async def reader(index: int) -> int:
        taken = messages = 0
        while taken < 300:
            await events[index].wait()
            events[index].clear()
            taken, messages = come[index], messages + 1
        return messages

    async with asyncio.timeout(30):
        readers = asyncio.gather(*(reader(index) for index in range(3)))
        await source()
        messages = await readers
    assert come == [300, 300, 300]
    assert all(1 <= count < 300 for count in messages)


async def test_it_goes_on_after_a_pause() -> None:
    rounds, reader = ReaderRounds(), asyncio.Event()
    for _ in range(3):
        rounds.wake(reader, urgent=False)
        async with asyncio.timeout(30):
            await reader.wait()
        reader.clear()
        while rounds._going:  # noqa: ASYNC110 — nobody is told of the end of the rounds
            await asyncio.sleep(0.001)
