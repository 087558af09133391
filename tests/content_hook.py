"""A content hook as its operator would write it, which refuses texts with a word and can hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from loraplex.hooks.v1 import hooks_pb2 as pb
from loraplex.hooks.v1 import hooks_pb2_grpc

REASON = "that word is not allowed"


class ContentHook(hooks_pb2_grpc.ContentHookServiceServicer):
    """Refuses texts with `word`; while it `hangs` no call ends. Keeps what it was asked and has allowed."""

    def __init__(self) -> None:
        self.address = ""
        self.word = ""
        self.decision = pb.DECISION_ALLOW
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.asked = asyncio.Event()
        self.prompts: list[pb.CheckPromptRequest] = []
        self.parts: list[pb.CheckAnswerRequest] = []

    async def _decide(self, text: str) -> tuple[pb.Decision.ValueType, str]:
        self.asked.set()
        await self.goes_on.wait()
        if self.word and self.word in text:
            return pb.DECISION_REFUSE, REASON
        return self.decision, ""

    async def CheckPrompt(
        self, request: pb.CheckPromptRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.CheckPromptResponse:
        """Decide on a prompt."""
        self.prompts.append(request)
        decision, reason = await self._decide("\n".join([*request.texts, *(one.text for one in request.messages)]))
        return pb.CheckPromptResponse(decision=decision, reason=reason)

    async def CheckAnswer(
        self, request: pb.CheckAnswerRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.CheckAnswerResponse:
        """Decide on a part of an answer."""
        # A word may begin before the part.
        decision, reason = await self._decide(request.before[-len(self.word) :] + request.text + request.reasoning)
        if decision == pb.DECISION_ALLOW:
            self.parts.append(request)
        return pb.CheckAnswerResponse(decision=decision, reason=reason)

    def text_of(self, request_id: str, choice: int = 0) -> str:
        """Return the text of a choice that was allowed, parts of several calls of it laid over each other."""
        text = ""
        for part in self.parts:
            if (part.call.request_id, part.choice) == (request_id, choice):
                assert part.offset <= len(text), "a part was not asked for"
                text = text[: part.offset] + part.text
        return text


@asynccontextmanager
async def serving_hook() -> AsyncIterator[ContentHook]:
    """A hook on a port of the system's choice."""
    hook, server = ContentHook(), grpc.aio.server()
    hooks_pb2_grpc.add_ContentHookServiceServicer_to_server(hook, server)
    hook.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield hook
    hook.goes_on.set()
    await server.stop(0)
