"""The SDK's client, with every message written down as it comes from the wire, before the SDK makes sense of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Self

import grpc
from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc

from loraplex_client import AsyncClient
from loraplex_client.connection import AsyncConnection
from loraplex_client.generation import Attempt
from tests.trials.chaos.history import Call, Delta, Observation


class TappedClient(AsyncClient):
    """Calls of a request id that is in `observations` are written down there. `now` gives seconds."""

    def __init__(self, addresses: Sequence[str], tenant: str, now: Callable[[], float]) -> None:
        super().__init__(addresses, tenant)
        self.observations: dict[str, Observation] = {}
        self._connection = _TappedConnection(addresses, tenant, self.observations, now)


class _TappedConnection(AsyncConnection):
    def __init__(
        self, addresses: Sequence[str], tenant: str, observations: dict[str, Observation], now: Callable[[], float]
    ) -> None:
        super().__init__(addresses, inference_pb2_grpc.InferenceServiceStub, tenant=tenant)
        self._observations = observations
        self._now = now

    def start(self, attempt: Attempt, form: str = "__call__") -> Any:
        """The RPC, tapped."""
        request: Any = attempt.call.request
        named = request if isinstance(request, inference_pb2.RerankRequest) else request.spec
        observation = self._observations[named.request_id]
        call = Call(self._now(), attempt.call.method, attempt.address)
        if isinstance(request, inference_pb2.ResumeRequest):
            call.received = {choice.choice: len(choice.token_ids) for choice in request.received}
        observation.calls.append(call)
        if attempt.call.method in {"Score", "Rerank", "Embed", "Classify"}:
            return _TappedAnswer(super().start(attempt, form), call)
        return _TappedCall(super().start(attempt, form), observation, len(observation.calls) - 1, self._now)


class _TappedAnswer:
    """A running RPC without a stream, which notes how it failed."""

    def __init__(self, rpc: Any, call: Call) -> None:
        self._rpc, self._call = rpc, call

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        try:
            return await self._rpc
        except grpc.aio.AioRpcError as error:
            self._call.error = f"{error.code().name}: {error.details()}"
            raise

    async def trailing_metadata(self) -> Any:
        """Return what the router said with the answer's end."""
        return await self._rpc.trailing_metadata()


class _TappedCall:
    """A running RPC that notes what passes."""

    def __init__(self, rpc: Any, observation: Observation, number: int, now: Callable[[], float]) -> None:
        self._rpc = rpc
        self._messages = aiter(rpc)
        self._observation = observation
        self._number = number
        self._now = now

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            response = await anext(self._messages)
        except grpc.aio.AioRpcError as error:
            self._observation.calls[self._number].error = f"{error.code().name}: {error.details()}"
            raise
        if response.event.HasField("delta"):
            delta = response.event.delta
            self._observation.deltas.append(
                Delta(self._now(), self._number, delta.choice, delta.offset, tuple(delta.token_ids))
            )
        return response

    async def initial_metadata(self) -> Any:
        """Return what the router said when it admitted the request."""
        return await self._rpc.initial_metadata()

    def cancel(self) -> bool:
        """Cancel the RPC."""
        return bool(self._rpc.cancel())
