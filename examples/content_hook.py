"""A content hook (docs/guides/security.md) that refuses one word: `python content_hook.py 127.0.0.1:9000`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

from loraplex.hooks.v1 import hooks_pb2 as pb
from loraplex.hooks.v1 import hooks_pb2_grpc

WORD = "password"


def decide(answer: Any, text: str) -> Any:
    """Return the answer about a text; here a guard model would be asked."""
    if WORD in text.lower():
        return answer(decision=pb.DECISION_REFUSE, reason=f"no {WORD}s, please")
    return answer(decision=pb.DECISION_ALLOW)


class Guard(hooks_pb2_grpc.ContentHookServiceServicer):
    """Decides on prompts, and on parts of answers with the end of the part before."""

    async def CheckPrompt(self, request: pb.CheckPromptRequest, context: Any) -> Any:
        """Decide on a prompt."""
        texts = [*request.texts, *(message.text for message in request.messages)]
        return decide(pb.CheckPromptResponse, "\n".join(texts))

    async def CheckAnswer(self, request: pb.CheckAnswerRequest, context: Any) -> Any:
        """Decide on a part of an answer."""
        text = request.before[1 - len(WORD) :] + request.text
        return decide(pb.CheckAnswerResponse, "\n".join((text, request.reasoning, request.tool_calls)))


async def main(address: str) -> None:
    """Serve until the process is ended."""
    server = grpc.aio.server()
    hooks_pb2_grpc.add_ContentHookServiceServicer_to_server(Guard(), server)
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
