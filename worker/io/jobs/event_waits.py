"""Waits for the first of several events, with a timeout."""

from __future__ import annotations

import asyncio


async def one_is_set_within(timeout_s: float, *events: asyncio.Event) -> bool:
    """Wait for the first of some events; returns whether one is set."""
    # Not wait_for: in Python 3.11 that loses a cancellation which comes together with the event.
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return any(event.is_set() for event in events)
