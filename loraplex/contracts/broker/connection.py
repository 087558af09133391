"""Connects to Redis or Valkey, with one clear line when that does not work.

redis://[USER:PASSWORD@]HOST:PORT/DB   rediss:// the same over TLS   unix://PATH
redis+sentinel://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]/SERVICE[/DB]   the primary that the sentinels name
redis+cluster://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]   some nodes, which name all; with rediss in either, over TLS

Options of a URL name files, which are read again when they change: ?password_file=FILE&ssl_ca_certs=FILE and, where the
server asks for a certificate, &ssl_certfile=FILE&ssl_keyfile=FILE.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.client import Pipeline
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import (
    URL_QUERY_ARGUMENT_PARSERS,
    AbstractConnection,
    Connection,
    RedisSSLContext,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.connection import HiredisRespSerializer
from redis.credentials import CredentialProvider
from redis.exceptions import AskError, MovedError, ReadOnlyError, RedisClusterException, RedisError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.maint_notifications import MaintNotificationsConfig

from loraplex.runtime.files import FollowedFiles
from loraplex.runtime.interpreter import StartError

log = logging.getLogger(__name__)

# Errors of a server that is lost, slow, or refuses to work for now (a replica, a full disk).
REDIS_DOWN = (RedisError, RedisClusterException, OSError)

# Maximum connections of a process, and timeout in seconds for making one.
CONNECTIONS = 16
CONNECT_S = 2.0
# Timeout in seconds of a whole call, from the wait for a connection to the answer; longer than any BLPOP blocks. The
# library's own timeouts for each send and read are off: a server that hangs lets its callers connect again and again,
# and they cost every call a task and two passes of the event loop.
CALL_S = 4.0
_SCHEMES = (
    "redis",
    "rediss",
    "unix",
    *(f"{scheme}+{kind}" for scheme in ("redis", "rediss") for kind in ("sentinel", "cluster")),
)
_PORT, _SENTINEL_PORT = 6379, 26_379


# Options of a URL that name files.
_FILE_OPTIONS = {"password_file", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}


class RedisUnreachableError(StartError):
    """The server does not answer or cannot be used; the message is one line that says what to do."""


# The flag whose URL is meant, as errors name it.
REDIS_URL_FLAG = "--redis-url"


async def connect(url: str, flag: str = REDIS_URL_FLAG) -> Redis:
    """Return a client of bytes whose server has answered. Raises RedisUnreachableError."""
    client = client_of(url, flag)
    try:
        await check_server(client, url, flag)
    except BaseException:
        await client.aclose()
        raise
    return client


def client_of(url: str, flag: str = REDIS_URL_FLAG) -> Redis:
    """Return a client of bytes of a server that may be away. Raises RedisUnreachableError for a bad URL."""
    try:
        return _client(url)
    except ValueError as error:
        server = re.split("[/?#]", url.partition("//")[2], maxsplit=1)[0]
        cut = "@" in url and "@" not in server  # the error may show the beginning of the password
        why = "write /, ? and # of a password as %2F, %3F and %23" if cut else error
        raise RedisUnreachableError(f"{flag} {shown_url(url)}: {why}") from error


async def check_server(client: Redis, url: str, flag: str = REDIS_URL_FLAG) -> None:
    """Raise RedisUnreachableError where a client's server does not answer, or is too old."""
    try:
        info = await client.info("server")
    except REDIS_DOWN as error:
        why = str(error).partition(" : ")[0]  # for sentinels the library adds all their settings
        raise RedisUnreachableError(f"{flag} {shown_url(url)}: no answer ({why}); is the server up?") from error
    version = str(info["redis_version"])
    if int(version.split(".", maxsplit=1)[0]) < 7:
        raise RedisUnreachableError(f"{flag} {shown_url(url)}: version {version} is too old; 7.0 or newer is needed")


def _client(url: str) -> Redis:
    """Return a client for a URL. Raises ValueError on a bad one."""
    parts = urlsplit(url)
    unknown = sorted(set(parse_qs(parts.query)) - set(URL_QUERY_ARGUMENT_PARSERS) - _FILE_OPTIONS - {"ssl_cert_reqs"})
    if unknown:
        raise ValueError(f"unknown option {unknown[0]}")
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"{parts.scheme}:// is not one of {'://, '.join(_SCHEMES)}://")
    scheme, _, kind = parts.scheme.partition("+")
    if kind == "sentinel":
        return _sentinel(url)
    if kind == "cluster":
        return _cluster(url)
    options = _url_options(urlunsplit(parts._replace(scheme=scheme)))
    pool = _Pool(connection_class=_FOLLOWING[options.pop("connection_class", Connection)], **{**_waits(), **options})
    return _Redis.from_pool(pool)


def _waits() -> dict[str, Any]:
    # A timeout is not tried again: that would keep its caller waiting for a server that hangs, several times as long.
    retry = Retry(ExponentialWithJitterBackoff(cap=0.2, base=0.02), 3, supported_errors=(RedisConnectionError,))
    return {
        "socket_timeout": None,
        "socket_connect_timeout": CONNECT_S,
        "retry": retry,
        # The library would tell its name, which users may not do (broker/acl.py) and Redis 7.0 does not know.
        "driver_info": None,
        # Of Redis's own cloud; to ask for them takes each new connection a round trip.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }


def _url_options(url: str) -> dict[str, Any]:
    """Return the options of a URL of one server. Raises ValueError where a file that it names cannot be read."""
    options: dict[str, Any] = dict(parse_url(url))
    for name in _FILE_OPTIONS & set(options):
        if not os.access(options[name], os.R_OK):
            raise ValueError(f"{name}: cannot read {options[name]}")
    if "password_file" in options:
        if "password" in options:
            raise ValueError("give a password or a password_file")
        user, path = options.pop("username", ""), Path(options.pop("password_file"))
        options["credential_provider"] = _PasswordFile(user, path)
    return options


class _PasswordFile(CredentialProvider):
    """A user whose password is the first line of a file, read for every connection."""

    def __init__(self, user: str, path: Path) -> None:
        self._user = user
        self._path = path
        self._read()

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the user, unless it is the default one, and the password. The library makes errors its own."""
        password = self._read()
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Return the same."""
        return self.get_credentials()

    def _read(self) -> str:
        try:
            password = self._path.read_text().partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"password_file: cannot read {self._path}") from error
        if not password:
            raise ValueError(f"password_file: {self._path} is empty")
        return password


class _TLSConnection(SSLConnection):
    """A connection over TLS that is opened with the files as they are then."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        options = self.ssl_context
        arguments = dict(Connection._connection_arguments(self))
        arguments["ssl"] = _context(options)
        return arguments


# Contexts of connections, by the files that they are made of.
_CONTEXTS: dict[tuple[str | None, ...], FollowedFiles[ssl.SSLContext]] = {}


def _context(options: RedisSSLContext) -> ssl.SSLContext:
    """Return the context of a new connection. Raises OSError where the files were never good."""
    names = options.ca_certs, options.certfile, options.keyfile
    if (files := _CONTEXTS.get(names)) is None:
        paths = [Path(name) for name in names if name]
        files = _CONTEXTS[names] = FollowedFiles("--redis-url", paths, lambda: _make_context(options), OSError)
    files.look()
    return files.content


def _make_context(options: RedisSSLContext) -> ssl.SSLContext:
    """Return a context that trusts the given authorities alone; the system's where none are given."""
    context = ssl.create_default_context(cafile=options.ca_certs)
    context.check_hostname = options.check_hostname
    context.verify_mode = ssl.VerifyMode(options.cert_reqs)
    for flag in options.include_verify_flags or ():
        context.verify_flags |= flag
    for flag in options.exclude_verify_flags or ():
        context.verify_flags &= ~flag
    if options.certfile or options.keyfile:
        context.load_cert_chain(options.certfile or "", options.keyfile, password="")  # no question at a terminal
    if options.min_version is not None:
        context.minimum_version = options.min_version
    return context


class _FollowsPrimary(AbstractConnection):
    """A connection that closes when its server has become a replica: the address may lead to the new primary now.

    While a cluster moves a slot key by key, either node has a part of a queue or ledger. A call that went to the new
    node (ASK) would begin these anew there, and the keys that follow could not be moved: BUSYKEY. So it fails. The
    library would fail too: it sends ASKING over another connection, and raises AttributeError for a node that is new.

    Commands are encoded by hiredis, as the library's blocking connections do it: three times as fast.
    """

    _encoder = HiredisRespSerializer()

    def pack_command(self, *arguments: Any) -> list[bytes]:
        """Encode a command."""
        encoded: list[bytes] = self._encoder.pack(*arguments)
        return encoded

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        """Encode commands that are sent together."""
        return [b"".join(part for command in commands for part in self._encoder.pack(*command))]

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*arguments, **options)
        except ReadOnlyError as error:
            await self.disconnect()
            raise RedisConnectionError("the server is a replica now") from error
        except MovedError:  # which is an AskError
            raise
        except (AskError, TryAgainError) as error:
            raise RedisError("the cluster is moving the slot of these keys, key by key") from error


class _FollowsPrimaryTCP(_FollowsPrimary, Connection):
    """A connection over TCP."""


class _FollowsPrimaryTLS(_FollowsPrimary, _TLSConnection):
    """A connection over TLS."""


class _FollowsPrimaryLocally(_FollowsPrimary, UnixDomainSocketConnection):
    """A connection over a Unix socket."""


# The class of connections that follows the primary, by the library's class.
_FOLLOWING: Mapping[type, type] = {
    Connection: _FollowsPrimaryTCP,
    SSLConnection: _FollowsPrimaryTLS,
    UnixDomainSocketConnection: _FollowsPrimaryLocally,
}


class _Redis(Redis):
    """A client whose calls end within CALL_S."""

    async def execute_command(self, *arguments: Any, **options: Any) -> Any:
        async with _within_time():
            return await super().execute_command(*arguments, **options)  # type: ignore[no-untyped-call]  # theirs

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """Return a pipeline that ends in time too."""
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _Pipeline(Pipeline):
    """Commands that are sent together, and end in time."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Send the commands; their answers in order. Raises an error of REDIS_DOWN."""
        async with _within_time():
            return await super().execute(raise_on_error)


@asynccontextmanager
async def _within_time() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(CALL_S):
            yield
    except TimeoutError as error:
        raise RedisTimeoutError(f"no answer in {CALL_S:g} s") from error


class _Pool(BlockingConnectionPool):
    """A pool in which callers wait for a connection, rather than open hundreds at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"max_connections": CONNECTIONS, "timeout": CALL_S, **options})
        # Number of callers that wait for a connection.
        self._waiting = 0

    async def get_connection(self, *arguments: Any, **options: Any) -> Any:
        """Return an idle connection at once. The library would take a lock, a timeout and a condition first: half of a
        call's time in this process. A connection that the server has closed fails at its first use, which is retried.
        """
        if self._available_connections and self._available_connections[-1].is_connected:
            connection = self._available_connections.pop()
            self._in_use_connections.add(connection)
            return connection
        self._waiting += 1
        try:
            return await super().get_connection(*arguments, **options)  # type: ignore[no-untyped-call]  # theirs
        finally:
            self._waiting -= 1

    async def release(self, connection: AbstractConnection) -> None:
        """Take a connection back at once, unless a caller waits for it or it must be opened again."""
        if self._waiting or connection.should_reconnect():  # type: ignore[no-untyped-call]  # theirs
            await super().release(connection)
        else:
            self._in_use_connections.remove(connection)
            self._available_connections.append(connection)


class _SentinelPool(SentinelConnectionPool, _Pool):
    """A pool of connections to the primary that sentinels name; the connections follow it by themselves."""


class _SentinelTLSConnection(SentinelManagedConnection, _TLSConnection):
    """A connection over TLS to the primary that sentinels name."""


def _sentinel(url: str) -> Redis:
    parts = urlsplit(url)
    _, service, database = (f"{parts.path}/0".split("/", 3))[:3] if parts.path.strip("/") else ("", "", "")
    if not service:
        raise ValueError("name the service that the sentinels watch: redis+sentinel://HOST:PORT/SERVICE")
    addresses, options = _of_several(url, f"/{database}", _SENTINEL_PORT)
    over_tls = options.pop("connection_class", None) is SSLConnection
    names = {name: value for name, value in options.items() if name.startswith("ssl_")}
    to_primary = {"connection_class": _SentinelTLSConnection} if over_tls else {}
    # A sentinel that does not answer is not asked again: there are others.
    once = Retry(NoBackoff(), 0)
    to_sentinels = {**names, "ssl": over_tls, "socket_timeout": 1.0, "socket_connect_timeout": 1.0, "retry": once}
    options = {**_waits(), **options, **to_primary, "connection_pool_class": _SentinelPool, "redis_class": _Redis}
    sentinels: Any = Sentinel(addresses, sentinel_kwargs=to_sentinels)  # type: ignore[no-untyped-call]  # theirs
    if over_tls:  # the library lets nobody choose the class of these connections
        for sentinel in sentinels.sentinels:
            sentinel.connection_pool.connection_class = _TLSConnection
    return cast(Redis, sentinels.master_for(service, **options))


def _of_several(url: str, path: str, default_port: int) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Return the servers of a URL, and its options as those of one server. Raises ValueError."""
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    addresses = [_address(address, default_port) for address in hosts.split(",")]
    server = f"{credentials}@unknown" if credentials else "unknown"
    options = _url_options(urlunsplit((parts.scheme.partition("+")[0], server, path, parts.query, "")))
    options.pop("host", None)
    return addresses, options


def _address(text: str, default_port: int) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, str(default_port)
    if not host or not port.isdecimal():
        raise ValueError(f"{text!r}: write HOST:PORT")
    return host.strip("[]"), int(port)


class _Cluster(RedisCluster):
    """A cluster's pools refuse whom they have no connection for: here callers wait as with one server."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"max_connections": 2 * CONNECTIONS, **options})
        # The library takes no connection class here, as with sentinels.
        following = _FOLLOWING[SSLConnection if options.get("ssl") else Connection]
        self.connection_kwargs["connection_class"] = following
        for node in self.startup_nodes:
            node.connection_class = following
        self._places = asyncio.Semaphore(CONNECTIONS)

    async def execute_command(self, *arguments: Any, **options: Any) -> Any:
        async with _within_time(), self._places:
            return await super().execute_command(*arguments, **options)

    async def _determine_slot(self, command: str, *arguments: Any) -> int:
        # Before each FCALL the library would ask the server which arguments are keys; they stand where EVALSHA's do.
        return await super()._determine_slot("EVALSHA" if command == "FCALL" else command, *arguments)


def _cluster(url: str) -> Redis:
    addresses, options = _of_several(url, urlsplit(url).path, _PORT)
    nodes = [ClusterNode(host, port) for host, port in addresses]
    tls = options.pop("connection_class", None) is SSLConnection
    if options.pop("db", 0):
        raise ValueError("a cluster has database 0 alone")
    # A cluster takes the same commands, and all keys of a cell lie in one slot.
    return cast(Redis, _Cluster(**{**_waits(), **options, "startup_nodes": nodes, "ssl": tls}))


def shown_url(url: str) -> str:
    """Return the URL without its password, which must not reach a terminal or a log."""
    return re.sub(r"//([^:/@]*):.*@", r"//\1:***@", url)
