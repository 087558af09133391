"""Questions to workers over their links: each answer is that of the worker that was asked."""

from __future__ import annotations

import asyncio

from loraplex.relay.v1 import relay_pb2 as pb

from router.dispatch.link import WorkerLink
from router.dispatch.relay import WorkerForgets


class RecordingLink(WorkerLink):
    """A link that keeps the questions that are sent."""

    def __init__(self, incarnation: str) -> None:
        super().__init__("w", incarnation)
        self.sent: list[pb.Forget] = []

    def forget(self, request: pb.Forget) -> None:
        self.sent.append(request)


async def test_an_answer_counts_only_from_the_worker_that_was_asked() -> None:
    links = [RecordingLink("a"), RecordingLink("b")]
    forgets = WorkerForgets(links)
    asked = asyncio.create_task(forgets.ask("a", "acme"))
    await asyncio.sleep(0)
    assert [(one.tenant, one.number) for one in links[0].sent] == [("acme", 1)]
    forgets.answered("b", pb.Forgotten(number=1, error="of another"))
    forgets.answered("a", pb.Forgotten(number=2, error="of another question"))
    forgets.answered("a", pb.Forgotten(number=1, removals=[pb.Removal(place="jobs", left=2)]))
    assert [one.left for one in (await asked).removals] == [2]


async def test_a_worker_without_a_link_or_an_answer_is_an_error() -> None:
    forgets = WorkerForgets([RecordingLink("a")], answer_s=0.01)
    assert "no link" in (await forgets.ask("gone", "acme")).error
    assert "no answer" in (await forgets.ask("a", "acme")).error
