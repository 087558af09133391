"""Floods of a gateway that a quiet caller must not notice: spellings of a key, idle connections.

The proxy, the gateway and the check of keys are the real ones. The router behind them begins answers and never ends
them. Floods come from another address than the quiet caller's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.cli.development_ca import DevelopmentCa
from loraplex.gateway.app import serving
from loraplex.gateway.endpoint import GatewayMetrics
from loraplex.gateway.settings import GatewaySettings
from loraplex.runtime.rpc.principal import Role, caller
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.tenancy.api_keys import ApiKeyReader, HashedKey, HashedSecret, KeyDirectory, new_api_key
from loraplex.runtime.tenancy.guard import Guard
from loraplex.runtime.tenancy.permissions import Port
from tests.edge_proxy import edge_proxy, listening
from tests.free_ports import free_port

_BODY = b'{"model":"hash","prompt":"x","max_tokens":9,"stream":true}'
_HELD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n%%s\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
_ASKED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n"
# Timeout in seconds for the first line of an answer: a request that the router holds has none.
_HELD_S = 0.2
_ANSWERED_S = 10.0
# Number of connections for each request that the gateway may run: more than one address may have.
_CONNECTIONS = 32
_FLOODER = "127.0.0.2"
Flood = Callable[["Attack"], Coroutine[Any, Any, None]]


@dataclass
class Attack:
    """A gateway with its limit of requests, the keys of two tenants, and the connections that the floods hold."""

    address: str
    requests_limit: int
    loud: str
    quiet: str
    held: list[asyncio.StreamWriter] = field(default_factory=list)
    _asks: int = 0

    async def send(self, request: bytes, timeout_s: float = _ANSWERED_S, own: str = _FLOODER) -> bytes:
        """Return the status of the answer on a connection of its own, which stays; empty for none."""
        host, _, port = self.address.rpartition(":")
        with suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=(own, 0))
            self.held.append(writer)
            writer.write(request)
            async with asyncio.timeout(timeout_s):
                return (await reader.readuntil(b"\r\n")).split(b" ")[1]
        return b""

    async def ask(self, count: int) -> list[float]:
        """Let the quiet tenant ask, one request after the other; return the seconds of those that were served."""
        seconds = list[float]()
        self._asks += 1  # a connection for each request is a flood too, of one address
        asked = _ASKED % f"Authorization: Bearer {self.quiet}".encode()
        for _ in range(count):
            began = time.monotonic()
            if await self.send(asked, own=f"127.0.1.{self._asks}") == b"200":
                seconds.append(time.monotonic() - began)
                self.held.pop().close()
        return seconds

    def end(self) -> None:
        """Close what the floods hold."""
        while self.held:
            self.held.pop().close()


def spellings(key: str) -> Iterator[bytes]:
    """Yield headers that all carry one key."""
    for scheme in ("Bearer", "bearer", "bEaReR", "BEARER"):
        for space in (" ", "  ", "   "):
            yield f"Authorization: {scheme}{space}{key}".encode()
            yield f"Authorization: {scheme}{space}{key}\r\nX-Api-Key: {key}".encode()


async def one_key_in_many_spellings(attack: Attack) -> None:
    """Hold as many requests as the gateway takes from each spelling."""
    each = attack.requests_limit // 2
    headers = [spelling for spelling in spellings(attack.loud) for _ in range(each)]
    for start in range(0, len(headers), each):  # each spelling at once, one after the other
        part = headers[start : start + each]
        await asyncio.gather(*(attack.send(_HELD % one, _HELD_S) for one in part))


async def made_up_keys(attack: Attack) -> None:
    """Hold requests, each with a key of its own."""
    keys = (f"X-Api-Key: {new_api_key()[1]}".encode() for _ in range(2 * attack.requests_limit))
    await asyncio.gather(*(attack.send(_HELD % key, _HELD_S) for key in keys))


async def connections_without_a_request(attack: Attack) -> None:
    """Open twice as many connections as there may be; every second one has sent a request."""
    for _ in range(_CONNECTIONS * attack.requests_limit):
        await attack.send(_ASKED % b"X-Api-Key:")
        await attack.send(b"GET / HTTP/1.1\r\n", timeout_s=0)


FLOODS: tuple[Flood, ...] = (one_key_in_many_spellings, made_up_keys, connections_without_a_request)


class _Endless(inference_pb2_grpc.InferenceServiceServicer):
    """A router with a model that begins answers and does not end them."""

    async def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        """Return the model and the caller's tenant, which the gateway counts requests by."""
        return pb.ListModelsResponse(
            models=[pb.Model(name="hash", tasks=["generate"])], tenant=caller().tenant, caller=caller().name
        )

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Send nothing."""
        await asyncio.Event().wait()
        yield pb.GenerateResponse()


@asynccontextmanager
async def attacked(directory: Path, requests_limit: int) -> AsyncIterator[Attack]:
    """Serve a gateway with this limit before a router that knows two keys."""
    ca, keys = DevelopmentCa(), KeyDirectory()
    texts = list[str]()
    for tenant in ("mallory", "quiet"):
        key_id, text, sha256 = new_api_key()
        secret = HashedSecret(sha256)
        keys.put([HashedKey(key_id, tenant, Role.TENANT_USER, frozenset(), None, False, (secret,))])
        texts.append(text)
    files = *ca.write(directory, "router", ca.issue("loraplex://router/r", ["127.0.0.1"])), ca.write_ca(directory)
    server = Server(Guard([Port.PUBLIC], [ApiKeyReader(keys)]))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(_Endless(), server.services)  # type: ignore[abstract]
    port = server.bind("127.0.0.1", 0, TlsFiles(*files).server_credentials(client_certificates=False))
    await server.start()
    settings = GatewaySettings(
        f"127.0.0.1:{port}",
        ca=str(files[2]),
        port=0,
        requests_limit=requests_limit,
        drain_s=0.0,
    )
    try:
        edge = free_port()
        address = f"127.0.0.1:{edge}"
        async with (
            serving(settings, GatewayMetrics()) as (gateway, _),
            edge_proxy(EDGE_ADDRESS=address, ROUTERS=gateway, GATEWAYS=gateway),
        ):
            await listening(edge)
            attack = Attack(address, requests_limit, loud=texts[0], quiet=texts[1])
            try:
                yield attack
            finally:
                attack.end()
    finally:
        await server.stop(0)


async def quiet_beside_floods(directory: Path, requests_limit: int, asks: int) -> dict[str, list[float]]:
    """Return the seconds of a quiet tenant's answers by what there is beside it; one that is refused has none."""
    async with attacked(directory, requests_limit) as attack:
        found = {"alone": await attack.ask(asks)}
        for flood in FLOODS:
            await flood(attack)
            found[flood.__name__.replace("_", " ")] = await attack.ask(asks)
            attack.end()
    return found
