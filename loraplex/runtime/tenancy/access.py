"""The settings of a router's and a store's ports and credentials, and the servers that they make."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from importlib import import_module

import grpc

from loraplex.runtime.rpc.server import Server
from loraplex.runtime.rpc.settings import check_installed, setting
from loraplex.runtime.rpc.tls import CA_HELP, CERT_HELP, KEY_HELP, TlsFiles, tls_of
from loraplex.runtime.tenancy.api_keys import ApiKeyReader, KeyDirectory
from loraplex.runtime.tenancy.guard import CredentialReader, Guard, Refused, check_exposure, open_guard
from loraplex.runtime.tenancy.permissions import Port

log = logging.getLogger(__name__)

# The package at the edge that reads tokens.
ISSUERS = "loraplex.issuers.tokens"
_PORTS = ("mtls_port", "operator_port", "operator_mtls_port")


@dataclass(frozen=True, kw_only=True)
class AccessSettings:
    """The part of a process's settings that says who may come in, and where."""

    tls_cert: str = setting(CERT_HELP, "")
    tls_key: str = setting(KEY_HELP, "")
    tls_ca: str = setting(CA_HELP, "")
    mtls_port: int | None = setting("port for tenants with client certificates", None)
    operator_host: str = setting("address of the operators' ports and of the metrics; empty: --host", "")
    operator_port: int | None = setting("port for operators with API keys or tokens", None)
    operator_mtls_port: int | None = setting("port for operators, routers and workers with certificates", None)

    reflection: bool = setting("serve gRPC server reflection to operators (docs/reference/grpc.md)", False)

    jwt_issuers: str = setting("file of the issuers whose tokens (JWT) are accepted, and of their rules", "")

    def check_access(self, host: str, insecure_tenants: bool) -> None:
        """Raise ValueError if the settings admit unauthenticated callers, or lack one that another needs."""
        if self.tls_files() is None:
            for name in _PORTS:
                if getattr(self, name) is not None:
                    raise ValueError(f"--{name.replace('_', '-')}: needs --tls-cert, --tls-key and --tls-ca")
            check_exposure(host, insecure_tenants)
        if self.reflection:
            check_installed("--reflection", "grpc_reflection")
        if self.jwt_issuers:
            import_module(ISSUERS).JwtReader(self.jwt_issuers)
            if not self.tls_cert:
                raise ValueError(f"--jwt-issuers {self.jwt_issuers}: needs --tls-cert, --tls-key and --tls-ca")
        for name in _PORTS:
            if not 0 <= (getattr(self, name) or 0) <= 65_535:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: not a port")

    def host_of_operators(self, host: str) -> str:
        """Return the address of what tenants are not to reach: the operators' ports, and the metrics, which ask nobody.

        `host` is the address of the port for tenants.
        """
        return self.operator_host or host

    def tls_files(self) -> TlsFiles | None:
        """Return the certificate files; None where TLS, and with it every credential, is off. Raises ValueError."""
        return tls_of(self.tls_cert, self.tls_key, self.tls_ca)


class GuardedServers:
    """The gRPC servers of a process: without credentials one, with them one for tenants and one for operators.

    Each listens on up to two ports: one for keys and tokens, and one for certificates, since gRPC either requires a
    certificate of a port's clients or does not ask for it. `keys` are those that callers are admitted with.
    """

    def __init__(
        self,
        settings: AccessSettings,
        tls: TlsFiles | None,
        make: Callable[[Guard, Port], Server],
        keys: KeyDirectory,
        refused: Refused,
        follow_keys: Callable[[], Coroutine[None, None, None]] | None = None,
    ) -> None:
        self._settings, self._tls, self.keys = settings, tls, keys
        self._followed: list[Callable[[], Coroutine[None, None, None]]] = []
        if tls is None:
            log.info("no credentials: whoever reaches this process's ports may act as any tenant and as an operator")
            self._servers = {Port.PUBLIC: make(open_guard(refused=refused), Port.PUBLIC)}
            return
        from loraplex.runtime.tenancy.certificates import CertificateReader

        readers: list[CredentialReader] = [CertificateReader(), ApiKeyReader(keys)]
        if follow_keys is not None:
            self._followed.append(follow_keys)
        if settings.jwt_issuers:
            tokens = import_module(ISSUERS).JwtReader(settings.jwt_issuers)
            readers.append(tokens)
            self._followed.append(tokens.follow)
        self._servers = {
            port: make(Guard([port], readers, refused, calls=keys.calls), port)
            for port in (Port.PUBLIC, Port.OPERATORS)
        }

    def add(self, register: Callable[[grpc.aio.Server], None]) -> None:
        """Let generated code register a service; the permissions table says who may call it at which port."""
        for server in self._servers.values():
            register(server.services)

    def bind(self, host: str, port: int) -> Sequence[str]:
        """Listen; return the addresses: the first one's HOST:PORT, then words like mtls=HOST:PORT. Raises PortInUse."""
        settings, public = self._settings, self._servers[Port.PUBLIC]
        if self._tls is None:
            return [f"{host}:{public.bind(host, port)}"]
        addresses = [f"{host}:{public.bind(host, port, self._tls.server_credentials(client_certificates=False))}"]
        operators, inner = self._servers[Port.OPERATORS], settings.host_of_operators(host)
        for word, server, at, number, certificates in (
            ("mtls", public, host, settings.mtls_port, True),
            ("operators", operators, inner, settings.operator_port, False),
            ("operators-mtls", operators, inner, settings.operator_mtls_port, True),
        ):
            if number is not None:
                credentials = self._tls.server_credentials(client_certificates=certificates)
                addresses.append(f"{word}={at}:{server.bind(at, number, credentials)}")
        return addresses

    async def start(self) -> None:
        """Serve; health says NOT_SERVING until `set_serving(True)`."""
        for server in self._servers.values():
            if self._settings.reflection:
                server.add_reflection()
            await server.start()

    async def follow(self) -> None:
        """Follow what credentials are checked with; never returns where there is something to follow."""
        await asyncio.gather(*(follow() for follow in self._followed))

    async def set_serving(self, serving: bool) -> None:
        """Set what the health services answer from now on."""
        for server in self._servers.values():
            await server.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls of tenants, let running ones end for `grace_s`, then end those of operators too."""
        for server in self._servers.values():
            await server.stop(grace_s)
