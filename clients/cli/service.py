"""Services that the SDK has no client of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from loraplex_client.calls import Script

R = TypeVar("R")


class Service:
    """A connection to a service of the `server` (router, store) at an address. Every method raises CommandError."""

    def __init__(
        self, server: str, address: str, stub: Callable[[Any], Any], tenant: str = "", timeout_s: float | None = None
    ) -> None:
        from loraplex_client.connection import Connection

        from clients.cli.failures import explained

        self._server, self._address = server, address
        with explained(server, address):
            self._connection = Connection(address, stub, tenant=tenant, timeout_s=timeout_s)

    def ask(self, method: str, request: Any) -> Any:
        """Make one call and return its answer."""
        from loraplex_client.calls import single

        return self.run(single(method, request))

    def list(self, method: str, request: Any, items: Callable[[Any], Iterable[Any]]) -> list[Any]:
        """Return the items of all pages; `items` takes those of one page."""
        from loraplex_client.calls import pages

        return self.run(pages(method, request, items))

    def run(self, script: Script[R]) -> R:
        """Run a script of calls and return its result."""
        from clients.cli.failures import explained

        with explained(self._server, self._address):
            return self._connection.run(script)


def cluster_service(router: str, tenant: str, timeout_s: float | None = None) -> Service:
    """Connect to a router's ClusterService. Raises CommandError."""
    from loraplex.cluster.v1 import cluster_pb2_grpc

    return Service("router", router, cluster_pb2_grpc.ClusterServiceStub, tenant, timeout_s)
