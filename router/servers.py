"""The gRPC servers of a router: for tenants, for operators, and the relay's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from loraplex.cluster.v1 import cluster_pb2_grpc
from loraplex.inference.v1 import inference_pb2_grpc

from router.api.cluster import ClusterService
from router.api.open_calls import OpenCalls
from router.api.request_telemetry import COUNTED_METHODS, RequestTelemetry
from router.api.service import InferenceService
from router.api.sglang.intake import Intake
from router.api.sglang.unnamed_callers import UnnamedCallers
from router.catalog.key_copy import KeyCopy
from router.catalog.store_client import StoreClient
from router.relay_access import RelayAccess
from router.seals import report_to
from router.settings import Settings
from rpc.audit.auditor import Auditor
from rpc.errors import CallError
from rpc.identity.access import GuardedServers
from rpc.identity.api_keys import KeyDirectory
from rpc.identity.guard import Guard
from rpc.identity.permissions import Port
from rpc.identity.principal import Principal
from rpc.identity.tls import TlsFiles
from rpc.metrics import CallMeter
from rpc.server import Server, channel_options
from rpc.unread_messages import STALL_S

if TYPE_CHECKING:
    from broker.seals import Seals


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
    intake: Intake,
    waits_for: Callable[[], str],
) -> None:
    """Serve the services, where the permissions table lets somebody call them.

    `waits_for` returns what is missing before requests can be served, or nothing.
    """
    servers.add(lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server))
    servers.add(lambda server: cluster_pb2_grpc.add_ClusterServiceServicer_to_server(cluster, server))
    if settings.engine_protocol:
        # Imported where it is served alone: its package need not be installed.
        from router.api.sglang.service import SglangScheduler, register

        engine = SglangScheduler(intake, settings.engine_adapter, waits_for)
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
    # A client that was dropped because it does not read gets at least as long again to read why.
    stall_s = max(STALL_S, 2 * settings.client_stall_s)
    return Server(
        guard,
        outer=[meter],
        interceptors=inner,
        options=options,
        calls=calls,
        stall_s=stall_s,
        shared_ports=shared_ports,
    )
