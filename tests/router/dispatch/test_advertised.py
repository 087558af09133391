"""The address that workers are told, checked at the start: this router's, another server's, or nobody's."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loraplex.router.dispatch import relay
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.relay import AdvertisedAddressError, RelayService, check_advertised
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.tenancy.guard import open_guard


@asynccontextmanager
async def listening(dispatcher: Dispatcher | None) -> AsyncIterator[tuple[int, str]]:
    """Serve a router's relay, and yield its port and id; without a dispatcher another kind of server."""
    server = Server(open_guard())
    service = None if dispatcher is None else RelayService(dispatcher)
    if service is not None:
        service.add_to(server)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        yield port, service.router_id if service is not None else ""
    finally:
        await server.stop(0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_an_address_that_leads_back_is_right(dispatcher: Dispatcher, host: str) -> None:
    async with listening(dispatcher) as (port, router_id):
        await check_advertised(host, port, router_id, pause_s=0.0)


async def test_another_router_s_address_is_refused(dispatcher: Dispatcher) -> None:
    async with listening(dispatcher) as (port, _):
        with pytest.raises(AdvertisedAddressError, match=f"localhost: another server answers at localhost:{port}"):
            await check_advertised("localhost", port, "me", pause_s=0.0)


async def test_another_server_s_address_is_refused() -> None:
    async with listening(None) as (port, _):
        with pytest.raises(AdvertisedAddressError, match="another server answers"):
            await check_advertised("127.0.0.1", port, "me", pause_s=0.0)


async def test_a_name_that_nobody_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    with pytest.raises(AdvertisedAddressError, match="no-such-host: no such host name"):
        await check_advertised("no-such-host", 1, "me", pause_s=0.0)


async def test_this_machine_s_own_address_must_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(AdvertisedAddressError, match="nothing answers"):
        await check_advertised("127.0.0.1", port, "me", pause_s=0.0)


async def test_an_address_that_only_workers_may_reach_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relay, "ANSWER_S", 0.05)
    await check_advertised("192.0.2.1", 1, "me", pause_s=0.0)  # TEST-NET-1: nobody has it
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "--relay-advertise 192.0.2.1: nothing answers at 192.0.2.1:1" in record.getMessage()
