"""The gRPC servers of a router: for tenants, for operators, and the relay's; and what it makes of its certificate."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraplex.cluster.v1 import cluster_pb2_grpc
from loraplex.inference.v1 import inference_pb2_grpc
from loraplex.relay.v1 import relay_pb2_grpc
from redis.asyncio import Redis

from broker.connection import REDIS_DOWN
from broker.resume_keys import StoredResumeKeys
from router.api.cluster import ClusterService
from router.api.open_calls import OpenCalls
from router.api.operator_commands import AdapterCommands
from router.api.request_telemetry import COUNTED_METHODS, RequestTelemetry
from router.api.service import InferenceService
from router.catalog.models import Models
from router.catalog.store_client import StoreClient
from router.catalog.store_copies import KeyCopy
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.relay import RelayService
from router.generation.resume import DerivedKeys, GivenKeys, SharedKeys
from router.metrics import RouterMetrics
from router.purge import RouterData, TenantDataService
from router.settings import Settings
from rpc.errors import CallError, PermissionDenied
from rpc.interceptors import CallMeter, Context, Handler, Interceptor, Method, wrapped
from rpc.principal import CredentialKind, Principal, Role, caller, set_caller
from rpc.server import Server, channel_options, relay_options
from rpc.tls import TlsFiles
from tenancy.access import GuardedServers
from tenancy.api_keys import KeyDirectory
from tenancy.auditor import Auditor
from tenancy.guard import Guard, Refused, open_guard
from tenancy.permissions import SGLANG_SERVICE, Port

if TYPE_CHECKING:
    from broker.seals import Seals
    from router.dispatch.relay import RelayCredentials

log = logging.getLogger(__name__)


def make_servers(
    settings: Settings,
    tls: TlsFiles | None,
    telemetry: RequestTelemetry,
    store: StoreClient,
    auditor: Auditor,
    seals: Seals | None,
    shared_ports: bool,
) -> tuple[GuardedServers, RelayAccess]:
    """Return the servers for tenants and operators, and the relay's; all report whom they refuse.

    `shared_ports`: other processes may listen on the ports of tenants as well.
    """
    keys = KeyDirectory()
    follow_keys = KeyCopy(store, keys).follow

    def refused(method: str, caller: Principal | None, error: CallError, peer: str) -> None:
        telemetry.refused_caller(method, caller, error)
        auditor.refused(method, caller, error, peer)

    report_to(seals, refused)
    make = partial(_server, settings, telemetry, auditor, shared_ports)
    return GuardedServers(settings, tls, make, keys, refused, follow_keys), RelayAccess(tls, refused)


def add_services(
    servers: GuardedServers,
    settings: Settings,
    inference: InferenceService,
    cluster: ClusterService,
    dispatcher: Dispatcher,
    commands: AdapterCommands,
    waits_for: Callable[[], str],
) -> None:
    """Serve the services, where the permissions table lets somebody call them.

    `waits_for` returns what is missing before requests can be served, or nothing.
    """
    servers.add(lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server))
    servers.add(lambda server: cluster_pb2_grpc.add_ClusterServiceServicer_to_server(cluster, server))
    if settings.engine_protocol:
        # Imported where it is served alone: its package need not be installed.
        from router.api.sglang import SglangScheduler, register

        engine = SglangScheduler(inference, dispatcher, commands, settings.engine_adapter, waits_for)
        servers.add(lambda server: register(engine, server))


def _server(
    settings: Settings, telemetry: RequestTelemetry, auditor: Auditor, shared_ports: bool, guard: Guard, port: Port
) -> Server:
    meter = CallMeter(*telemetry.metrics.calls, COUNTED_METHODS)
    if port is Port.OPERATORS:
        return Server(guard, outer=[meter], interceptors=[auditor])
    open_calls = OpenCalls(settings.open_calls_limit, settings.open_bytes_limit, telemetry.refused)
    # Maximum calls of one connection: above the limit of open calls, so that this limit refuses them.
    calls = 2 * settings.open_calls_limit
    unnamed = [UnnamedCallers(settings.engine_tenant)] if settings.engine_protocol else []
    inner = [*unnamed, open_calls, auditor]
    options = [*channel_options(), ("grpc.max_concurrent_streams", calls)]
    return Server(
        guard,
        outer=[meter],
        interceptors=inner,
        options=options,
        calls=calls,
        shared_ports=shared_ports,
    )


class RelayAccess:
    """The relay's server, and the `credentials` of its links; None where TLS is off."""

    def __init__(self, tls: TlsFiles | None, refused: Refused) -> None:
        self._tls = tls
        self.credentials: RelayCredentials | None = None
        if tls is None:
            self.server = Server(open_guard(Port.RELAY, refused=refused), options=relay_options())
            return
        from router.dispatch.relay import RelayCredentials
        from tenancy.certificates import CertificateReader

        self.credentials = RelayCredentials(tls, refused)
        self.server = Server(Guard([Port.RELAY], [CertificateReader()], refused), options=relay_options())

    def service(self, dispatcher: Dispatcher, metrics: RouterMetrics) -> RelayService:
        """Return the service of these links, which the server serves from now on."""
        self._service = RelayService(dispatcher, metrics, self.credentials)
        self._service.add_to(self.server)
        return self._service

    def serve_tenant_data(self, data: RouterData, record: Callable[..., None]) -> RouterData:
        """Let other routers remove this router's data of tenants; `record` keeps an event of the audit log."""
        relay_pb2_grpc.add_TenantDataServiceServicer_to_server(TenantDataService(data, record), self.server.services)
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


# Interval in seconds between looks for pins whose grants end soon.
PINS_S = 60.0


def seals_of(tls: TlsFiles | None, job_key: str) -> Seals | None:
    """Return the seals of a router; None without credentials. Raises ValueError where the files cannot be used."""
    if tls is None:
        return None
    from broker.job_keys import JobKeys
    from broker.seals import Seals
    from tenancy.signatures import Signer, Verifier

    return Seals(JobKeys(Path(job_key)), Verifier(tls, Role.ROUTER), Signer(tls, Role.ROUTER))


def report_to(seals: Seals | None, refused: Refused) -> None:
    """Report what is not opened as the guard reports callers."""
    if seals is not None:
        seals.on_refused = lambda kind, error: refused(
            f"redis/{kind}", None, PermissionDenied(str(error), error.reason), "redis:"
        )


def resume_keys_of(settings: Settings, redis: Redis, seals: Seals | None) -> GivenKeys:
    """Return the keys of resume tokens: the given ones, derived ones, or without credentials those in Redis."""
    if settings.resume_key:
        return GivenKeys(settings.resume_key, settings.former_keys)
    if seals is not None:
        return DerivedKeys(lambda: seals.keys.derived(b"resume tokens"), settings.former_keys)
    return SharedKeys(StoredResumeKeys(redis), settings.former_keys)


async def renew_pins(models: Models) -> None:
    """Give pinned adapters new grants before theirs end; never returns."""
    while True:
        await asyncio.sleep(PINS_S)
        for model in models.served:
            try:
                await model.queue.pins.renew_grants()
            except REDIS_DOWN as error:
                log.warning("the grants of pinned adapters are not renewed: %s", error)


class UnnamedCallers(Interceptor):
    """Gives callers without a credential and a name to a tenant. Put it behind the guard, which sets the caller."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Wrap the methods of the engine protocol."""
        return wrapped(handler, self._named) if method.startswith(f"/{SGLANG_SERVICE}/") else handler

    def _named(self, inner: Method) -> Method:
        def named(request: Any, context: Context) -> Any:
            who = caller()
            if who.kind is CredentialKind.HEADER and not who.tenant:
                set_caller(replace(who, name=self._tenant, tenant=self._tenant))
            return inner(request, context)

        return named
