"""Connections to Redis that follow a failover or a moved slot, over TCP, TLS and Unix sockets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.connection import HiredisRespSerializer
from redis.exceptions import AskError, MovedError, ReadOnlyError, RedisError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError

from broker.connection_files import TLSConnection


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


class _FollowsPrimaryTLS(_FollowsPrimary, TLSConnection):
    """A connection over TLS."""


class _FollowsPrimaryLocally(_FollowsPrimary, UnixDomainSocketConnection):
    """A connection over a Unix socket."""


FOLLOWING: Mapping[type, type] = {
    Connection: _FollowsPrimaryTCP,
    SSLConnection: _FollowsPrimaryTLS,
    UnixDomainSocketConnection: _FollowsPrimaryLocally,
}
