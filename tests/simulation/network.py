"""The network between nodes: streams whose bytes arrive in order, each message after a delay of its own.

What comes over different streams overtakes each other. A direction between two nodes can be held (packets vanish,
nobody is told, all is there once it heals), a link cut (streams break, none opens).
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from random import Random
from typing import Any, TypeAlias

import grpc

from tests.simulation.loop import Node

Handlers: TypeAlias = "dict[str, grpc.RpcMethodHandler[Any, Any]]"

_FAST_S, _SLOW_S = (0.0002, 0.002), (0.005, 0.06)
_SLOW_CHANCE = 0.05
_APART_S = 1e-6
# loraplex.runtime.rpc.server.relay_options: a ping each second, two seconds to answer it.
_LOOK_S, _SILENT_S = 0.25, 3.0
_OUTSIDE = Context()


class Network:
    """The simulated network: who listens where, and which streams are open."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._servers: dict[str, tuple[Node, Handlers]] = {}
        self._held: set[tuple[Node, Node]] = set()
        self._cut: set[frozenset[Node]] = set()
        # In their order, which a set would not keep.
        self.streams: dict[Stream, None] = {}

    def listen(self, address: str, node: Node) -> Handlers:
        """Return the handlers of a node's server, by method, to be filled."""
        handlers: Handlers = {}
        self._servers[address] = (node, handlers)
        return handlers

    def delay_s(self) -> float:
        """Of one message."""
        return self._chance.uniform(*(_SLOW_S if self._chance.random() < _SLOW_CHANCE else _FAST_S))

    def find(self, address: str) -> tuple[Node, Handlers] | None:
        """Return the node that listens at an address."""
        return self._servers.get(address)

    def is_held(self, source: Node, target: Node) -> bool:
        """Tell whether what the first node sends to the second is held up."""
        return (source, target) in self._held

    def is_cut(self, first: Node, second: Node) -> bool:
        """Tell whether the link between two nodes is cut, which both notice."""
        return frozenset((first, second)) in self._cut

    def hold(self, source: Node, target: Node) -> None:
        """Hold up everything in this direction."""
        self._held.add((source, target))

    def cut(self, first: Node, second: Node) -> None:
        """Break what is open between them."""
        self._cut.add(frozenset((first, second)))
        for stream in tuple(self.streams):
            if {stream.client, stream.server} == {first, second}:
                stream.break_off()

    def heal(self, first: Node, second: Node) -> None:
        """Restore the link between two nodes; what was held up arrives."""
        self._cut.discard(frozenset((first, second)))
        self._held -= {(first, second), (second, first)}
        for stream in tuple(self.streams):
            stream.flush()

    async def watch(self) -> None:
        """Break streams of which an end has heard nothing for long, as keepalives do; never returns."""
        silent: dict[Stream, int] = {}
        while True:
            await asyncio.sleep(_LOOK_S)
            silent = {stream: silent.get(stream, 0) + 1 for stream in self.streams if self._is_silent(stream)}
            for stream, looks in silent.items():
                if looks * _LOOK_S >= _SILENT_S:
                    stream.break_off()

    def _is_silent(self, stream: Stream) -> bool:
        ends = (stream.client, stream.server)
        return any(end.frozen for end in ends) or self.is_held(*ends) or self.is_held(*reversed(ends))

    def lost(self, node: Node) -> None:
        """A process ended: its peers see their streams break."""
        for stream in tuple(self.streams):
            if node in (stream.client, stream.server):
                stream.break_off()


class _Pipe:
    """A direction of a stream. Bytes arrive; None: it broke."""

    def __init__(self, network: Network, source: Node, target: Node) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._last_at = 0.0
        self._kept: list[bytes | None] = []
        self.arrived: asyncio.Queue[bytes | None] = asyncio.Queue()

    def send(self, data: bytes | None) -> None:
        loop = asyncio.get_running_loop()
        # Timers of one time run in any order.
        self._last_at = max(self._last_at + _APART_S, loop.time() + self._network.delay_s())
        # Not in the sender's context: what is under way arrives though the sender is frozen.
        loop.call_at(self._last_at, self._arrive, data, context=_OUTSIDE)

    def _arrive(self, data: bytes | None) -> None:
        if data is not None and self._network.is_held(self._source, self._target):
            self._kept.append(data)
        else:
            self.arrived.put_nowait(data)

    def flush(self) -> None:
        if not self._network.is_held(self._source, self._target):
            kept, self._kept = self._kept, []
            for data in kept:
                self.arrived.put_nowait(data)


class Stream:
    """An open call."""

    def __init__(self, network: Network, client: Node, server: Node) -> None:
        self.client = client
        self.server = server
        self._network = network
        self.up = _Pipe(network, client, server)
        self.down = _Pipe(network, server, client)
        self.broken = False
        self.serving: asyncio.Task[None] | None = None
        network.streams[self] = None

    def break_off(self) -> None:
        """Both ends learn of it, each after a while."""
        if self.broken:
            return
        self.broken = True
        self._network.streams.pop(self, None)
        self.up.send(None)
        self.down.send(None)

    def flush(self) -> None:
        """Let through what was held."""
        self.up.flush()
        self.down.flush()

    def end(self) -> None:
        """End the stream in order."""
        self._network.streams.pop(self, None)
