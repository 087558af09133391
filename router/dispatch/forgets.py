"""Questions to workers: remove what you have of a tenant. Each is answered over the link that it went out on."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from itertools import count
from typing import Protocol

from loraplex.relay.v1 import relay_pb2 as pb

# Timeout in seconds for a worker's answer: it asks the store and its engine. Workers of older versions give none.
ANSWER_S = 6.0


class ForgetsTenants(Protocol):
    """A link to a worker."""

    incarnation: str

    def forget(self, request: pb.Forget) -> None:
        """Send the question."""


class WorkerForgets:
    """The questions of one router, to workers with one of these links."""

    def __init__(self, links: Collection[ForgetsTenants], answer_s: float = ANSWER_S) -> None:
        self._links = links
        self._answer_s = answer_s
        self._numbers = count(1)
        # By the worker's incarnation and the question's number.
        self._asked: dict[tuple[str, int], asyncio.Future[pb.Forgotten]] = {}

    async def ask(self, incarnation: str, tenant: str) -> pb.Forgotten:
        """Return a worker's answer; one with an error where it gives none."""
        link = next((one for one in self._links if one.incarnation == incarnation), None)
        if link is None:
            return pb.Forgotten(error="it has no link to this router")
        number = next(self._numbers)
        answer: asyncio.Future[pb.Forgotten] = asyncio.get_running_loop().create_future()
        self._asked[incarnation, number] = answer
        link.forget(pb.Forget(number=number, tenant=tenant))
        try:
            async with asyncio.timeout(self._answer_s):
                return await answer
        except TimeoutError:
            return pb.Forgotten(error=f"no answer within {self._answer_s:g} s; workers of older versions give none")
        finally:
            del self._asked[incarnation, number]

    def answered(self, incarnation: str, answer: pb.Forgotten) -> None:
        """Take a worker's answer; one that nobody waits for is dropped."""
        asked = self._asked.get((incarnation, answer.number))
        if asked is not None and not asked.done():
            asked.set_result(answer)
