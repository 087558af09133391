"""Calls each case at the real servers, and compares the answer with the table's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from loraplex.adapters.v1 import adapters_pb2, releases_pb2
from loraplex.batches.v1 import batches_pb2
from loraplex.inference.v1 import inference_pb2

from loraplex.admin.v1 import accounts_pb2, grants_pb2, keys_pb2, plans_pb2, tenants_pb2
from loraplex.cluster.v1 import cluster_pb2
from loraplex.runtime.rpc.principal import TENANT_KEY, Role
from loraplex.runtime.rpc.status import DETAILS_KEY
from loraplex.runtime.tenancy.permissions import ENGINE_SERVICES, REFLECTION_SERVICE
from tests.trials.authz.cases import NAMING, OPTIONAL, OTHER, REASONS, TWO, Case
from tests.trials.authz.cluster import Cluster
from tests.trials.authz.credentials import OTHER as OTHER_TENANT
from tests.trials.authz.credentials import TENANT

# Number of calls at once.
_CALLS = 32
_TIMEOUT_S = 60.0
# Methods of the packages that need not be installed whose answers are streams.
_OTHER_STREAMS = frozenset(
    {
        *(
            f"/{service}/{method}"
            for service in ENGINE_SERVICES
            for method in ("Generate", "GetTokenizer", "SubscribeKvEvents")
        ),
        f"/{REFLECTION_SERVICE}/ServerReflectionInfo",
    }
)
_SERVICES = {
    service.full_name: service
    for messages in (
        accounts_pb2,
        adapters_pb2,
        batches_pb2,
        cluster_pb2,
        grants_pb2,
        inference_pb2,
        keys_pb2,
        plans_pb2,
        releases_pb2,
        tenants_pb2,
    )
    for service in messages.DESCRIPTOR.services_by_name.values()
}


@dataclass
class Outcome:
    """Numbers of cases by what was expected, and lines about those that came out otherwise."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Caller:
    """Calls cases. Cases with the same port and certificate share a connection."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._channels: dict[tuple[str, Role | None, str], grpc.aio.Channel] = {}

    async def settle(self) -> None:
        """Wait until the router knows every key that the store has made."""
        last = Case("/loraplex.cluster.v1.ClusterService/ListJobs", "operators", "key", Role.AUDITOR, "other scope")
        async with asyncio.timeout(_TIMEOUT_S):
            while await self.call(last) != last.expected:  # noqa: ASYNC110  # the router looks twice a second
                await asyncio.sleep(0.02)

    async def run(self, cases: Iterable[Case]) -> Outcome:
        """Call all of the cases."""
        outcome, waiting = Outcome(), iter(cases)

        async def work() -> None:
            for case in waiting:
                got = await self.call(case)
                outcome.counts[case.expected] += 1
                if got != case.expected:
                    outcome.failures.append(f"{case}: {got}, not {case.expected}")

        await asyncio.gather(*(work() for _ in range(_CALLS)))
        return outcome

    async def call(self, case: Case) -> str:
        """Return what came of a case, in the words of Case.expected."""
        try:
            await self._ask(case)
        except grpc.aio.AioRpcError as error:
            return _word(error)
        return "admitted"

    async def _ask(self, case: Case) -> None:
        """Make the call with one empty message, on the wire a stream of one; read one message of the answer."""
        channel = self._channel(case)
        options: dict[str, Any] = {"timeout": _TIMEOUT_S, "metadata": self._metadata(case)}
        if _streams_answers(case.method):
            call = channel.unary_stream(case.method)(b"", **options)
            try:
                await call.read()
            finally:
                call.cancel()
        else:
            await channel.unary_unary(case.method)(b"", **options)

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            await channel.close()

    def _channel(self, case: Case) -> Any:
        address = self._cluster.ports[case.server][case.port]
        certificates = self._cluster.credentials.certificates
        fault = "none" if case.fault in {OTHER, TWO} else case.fault
        key = (address, case.role, fault) if case.kind == "certificate" else (address, None, "")
        if key not in self._channels:
            cert, private = certificates[case.role, fault] if case.kind == "certificate" and case.role else (None, None)
            credentials = grpc.ssl_channel_credentials(self._cluster.credentials.ca.pem, private, cert)
            # Channels share connections otherwise, though their certificates differ.
            options = (("grpc.use_local_subchannel_pool", 1),)
            self._channels[key] = grpc.aio.secure_channel(address, credentials, options)
        return self._channels[key]

    def _metadata(self, case: Case) -> tuple[tuple[str, str], ...]:
        bearers, found = self._cluster.credentials.bearers, []
        if case.kind in {"key", "jwt"} and case.role is not None:
            fault = "none" if case.fault == OTHER else case.fault
            found.append(("authorization", f"Bearer {bearers[case.kind, case.role, fault]}"))
        if case.fault == TWO:
            found.append(("authorization", f"Bearer {bearers['key', Role.TENANT_USER, 'none']}"))
        if case.fault == OTHER:
            found.append((TENANT_KEY, OTHER_TENANT))
        elif case.role in NAMING and case.fault != TWO:
            found.append((TENANT_KEY, TENANT))
        return tuple(found)


def _streams_answers(method: str) -> bool:
    _, service, name = method.split("/")
    if service in OPTIONAL:
        return method in _OTHER_STREAMS
    return bool(_SERVICES[service].methods_by_name[name].server_streaming)


def _word(error: grpc.aio.AioRpcError) -> str:
    packed = dict(error.trailing_metadata() or ()).get(DETAILS_KEY)
    if packed is None:
        unreached = error.code() is grpc.StatusCode.UNAVAILABLE
        return "no connection" if unreached else f"{error.code().name} without a reason: {error.details()}"
    info = error_details_pb2.ErrorInfo()
    Status.FromString(bytes(packed)).details[0].Unpack(info)
    return info.reason if info.reason in REASONS else "admitted"
