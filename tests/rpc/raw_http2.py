"""A client of HTTP/2 made of frames, which lets a server send no byte of an answer."""

from __future__ import annotations

import asyncio
import ssl

SETTINGS, HEADERS, DATA, RESET, PING = 4, 1, 0, 3, 6
WINDOW_UPDATE = 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
# Code of a call that its client cancels.
_CANCEL = b"\0\0\0\x08"


def frame(kind: int, body: bytes, stream: int = 0, flags: int = 0) -> bytes:
    """Return a frame of HTTP/2."""
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def headers(method: str) -> bytes:
    """Return the packed headers of a call."""
    texts = [":method POST", ":scheme http", f":path {method}", ":authority x", "te trailers", "x-loraplex-tenant acme"]
    pairs = [text.encode().split() for text in (*texts, "content-type application/grpc")]
    return b"".join(b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in pairs)


def _window(size: int) -> bytes:
    return frame(SETTINGS, b"\0\x04" + size.to_bytes(4, "big"))


class UnreadingClient:
    """A connection whose streams have no window for messages until `read` opens it. `kinds`: frames by stream."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        """`host`: the address that it calls from."""
        self._port, self._tls, self._host = port, tls, host
        self.kinds: dict[int, list[int]] = {}
        self.arrived = asyncio.Condition()

    async def __aenter__(self) -> UnreadingClient:
        self._reader, self._writer = await asyncio.open_connection(
            "127.0.0.1", self._port, ssl=self._tls, local_addr=(self._host, 0)
        )
        self._writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _window(0))
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        self._writer.close()

    def call(self, stream: int, method: str, message: bytes | None = b"") -> None:
        """Begin a call with one message; None: the message does not come."""
        self._writer.write(frame(HEADERS, headers(method), stream, _END_HEADERS))
        if message is not None:
            body = b"\0" + len(message).to_bytes(4, "big") + message
            self._writer.write(frame(DATA, body, stream, _END_STREAM))

    def reset(self, stream: int) -> None:
        """Cancel a call."""
        self._writer.write(frame(RESET, _CANCEL, stream))

    async def drain(self) -> None:
        """Send what is still here."""
        await self._writer.drain()

    def read(self) -> None:
        """Open the window of all streams."""
        self._writer.write(_window(65_535))

    async def frame_of(self, stream: int, kind: int) -> None:
        """Return once a stream has a frame of a kind; others may have come behind it in the same read."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: kind in self.kinds.get(stream, ()))

    async def _read(self) -> None:
        while True:
            head = await self._reader.readexactly(9)
            body = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, stream = head[3], int.from_bytes(head[5:], "big")
            if kind in (SETTINGS, PING) and not head[4] & _ACK:
                self._writer.write(frame(kind, body if kind == PING else b"", flags=_ACK))
            if kind == WINDOW_UPDATE:
                continue
            async with self.arrived:
                self.kinds.setdefault(stream, []).append(kind)
                self.arrived.notify_all()
