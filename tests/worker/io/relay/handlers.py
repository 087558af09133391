"""Handlers of routers' requests, for tests of the links to routers."""

from __future__ import annotations

import asyncio


class NoRequests:
    """A handler of routers that ask for nothing."""

    def remove(self, job_id: str, attempt: int) -> None:
        raise AssertionError

    def cancel_choice(self, job_id: str, attempt: int, choice: int) -> None:
        raise AssertionError

    def router_gone(self, address: str) -> None:
        raise AssertionError


class AckHandler(NoRequests):
    """A handler that notes an ack: all responses before it are handled."""

    def __init__(self) -> None:
        self.got_ack = asyncio.Event()

    def remove(self, job_id: str, attempt: int) -> None:
        self.got_ack.set()
