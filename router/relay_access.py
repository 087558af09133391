"""The server of a router's relay, and who may come in there: with TLS, workers with certificates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from loraplex.relay.v1 import relay_pb2_grpc

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.relay import RelayService
from router.metrics import RouterMetrics
from router.purge.router_data import RouterData
from router.purge.service import TenantDataService
from rpc.identity.guard import Guard, Refused, open_guard
from rpc.identity.permissions import Port
from rpc.identity.tls import TlsFiles
from rpc.server import Server, relay_options

if TYPE_CHECKING:
    from router.dispatch.relay_credentials import RelayCredentials


class RelayAccess:
    """The relay's server, and the `credentials` of its links; None where TLS is off."""

    def __init__(self, tls: TlsFiles | None, refused: Refused) -> None:
        self._tls = tls
        self.credentials: RelayCredentials | None = None
        if tls is None:
            self.server = Server(open_guard(Port.RELAY, refused=refused), options=relay_options())
            return
        from router.dispatch.relay_credentials import RelayCredentials
        from rpc.identity.certificates import CertificateReader

        self.credentials = RelayCredentials(tls, refused)
        self.server = Server(Guard([Port.RELAY], [CertificateReader()], refused), options=relay_options())

    def service(self, dispatcher: Dispatcher, metrics: RouterMetrics) -> RelayService:
        """Return the service of these links, which the server serves from now on."""
        self._service = RelayService(dispatcher, metrics, self.credentials)
        self._service.add_to(self.server)
        return self._service

    def serve_tenant_data(self, data: RouterData, record: Callable[..., None]) -> RouterData:
        """Let other routers remove this router's data of tenants; `record` keeps an event of the audit log."""
        relay_pb2_grpc.add_TenantDataServiceServicer_to_server(TenantDataService(data, record), self.server.grpc)
        return data

    def bind(self, host: str, port: int) -> int:
        """Listen; return the port. Raises PortInUse."""
        credentials = None if self._tls is None else self._tls.server_credentials(client_certificates=True)
        return self.server.bind(host, port, credentials)

    async def stop(self, grace_s: float) -> None:
        """End the workers' streams, after the messages that are still to be sent; cancel those that last longer."""
        stopping = asyncio.create_task(self.server.stop(grace_s))
        self._service.close()
        await stopping
