"""The check, at the start, that the address which workers are told leads to this router's relay."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from enum import Enum

import grpc
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc

from rpc.tls import LiveChannel, TlsFiles

log = logging.getLogger(__name__)

# Number of attempts before the address counts as wrong, and seconds between them: a name server may be a moment late.
ATTEMPTS = 3
PAUSE_S = 0.5
# Timeout in seconds for the answer of the server at the address.
ANSWER_S = 1.0

_NO_SUCH_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


class AdvertisedAddressError(Exception):
    """An address that leads workers to another server, or nowhere."""


class _Found(Enum):
    """Answers of an address; the text completes `--relay-advertise HOST: `."""

    US = ""
    ANOTHER = "another server answers at {}; workers would send this router's answers there"
    NO_NAME = "no such host name"
    NOBODY_HERE = "nothing answers at {}, an address of this machine alone"
    NOBODY = "nothing answers at {} when it is called from here"


async def check_advertised(
    host: str, port: int, router_id: str, tls: TlsFiles | None = None, *, pause_s: float = PAUSE_S
) -> None:
    """Call the relay's own address. Raises AdvertisedAddressError where it cannot be this router's.

    An address that does not answer from here may be one that only workers reach (behind a NAT): then it only warns.
    """
    found = _Found.US
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(pause_s)
        found = await _who_answers(host, port, router_id, tls)
        if found is _Found.US:
            return
    what = f"--relay-advertise {host}: {found.value.format(f'{host}:{port}')}"
    if found is not _Found.NOBODY:
        raise AdvertisedAddressError(f"{what}; give the host name or IP under which workers reach this router alone")
    log.warning("%s; requests are refused until a worker reaches it", what)


async def _who_answers(host: str, port: int, router_id: str, tls: TlsFiles | None) -> _Found:
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return _Found.NO_NAME if error.errno in _NO_SUCH_NAME else _Found.NOBODY
    hosts = sorted({str(info[4][0]) for info in infos})
    asked = await asyncio.gather(*(_ask(host, one, port, tls) for one in hosts))
    answers = [answer for answer in asked if answer is not None]
    if any(answer != router_id for answer in answers):
        return _Found.ANOTHER
    if answers:
        return _Found.US
    return _Found.NOBODY_HERE if all(ipaddress.ip_address(one).is_loopback for one in hosts) else _Found.NOBODY


async def _ask(name: str, host: str, port: int, tls: TlsFiles | None) -> str | None:
    """Return the id of the router at an IP address; empty for another kind of server, None where nothing answers."""
    target = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
    # Directly: a proxy is for the way to other hosts. Workers compare the certificate with the name.
    options = [("grpc.enable_http_proxy", 0), ("grpc.ssl_target_name_override", name.strip("[]"))]
    async with LiveChannel(target, tls, options) as channel:
        stub = channel.stub(relay_pb2_grpc.IdentityServiceStub)
        try:
            answer = await stub.Identify(pb.IdentifyRequest(), timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            nothing = error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
            return None if nothing else ""
        return str(answer.router_id)
