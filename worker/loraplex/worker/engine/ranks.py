"""The ranks of a split model: rank 0 is the engine, and starts a process for each other one, which computes its part.

rank 0                                         rank 1, 2, ...
    │  Start, then layouts of steps, and Install  ──▶
    │  ◀── Unusable, where the rank's part can't be loaded

The messages are framed as those of worker.ipc; a file's descriptor goes with an Install. A rank ends with its socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loraplex.worker.engine.lora.rank_adapters import AdapterShapes, SharedMemory
from loraplex.worker.engine.model.layouts import DecodeLayout, Layout, StepLayout
from loraplex.worker.engine_api import EngineConfig, ModelUnusableError
from loraplex.worker.ipc import Splitter, Unusable, frame

log = logging.getLogger(__name__)

# Timeout in seconds for a rank to end once its socket is closed.
_STOP_S = 2.0
# Maximum bytes and descriptors of one read.
_READ_BYTES, _READ_FILES = 1 << 18, 16


class Start(msgspec.Struct, frozen=True, tag=True):
    """Build this rank's part of an engine: the first message. `store` is a file by which the ranks meet."""

    config: EngineConfig
    rank: int
    store: str


class Install(msgspec.Struct, frozen=True, tag=True):
    """Put the adapter in the file that comes with this into a slot."""

    shapes: AdapterShapes
    slot: int


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """Execute a step of any rows."""

    layout: StepLayout


class RunDecode(msgspec.Struct, frozen=True, tag=True):
    """Execute a step of one token a row."""

    layout: DecodeLayout


ToRank = Start | RunStep | RunDecode | Install


def _encode_array(value: Any) -> Any:
    """Return what msgspec encodes in place of an array."""
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    raise NotImplementedError(type(value))


def _decode_array(kind: Any, value: Any) -> NDArray[np.int64]:
    """Return the array that _encode_array has encoded."""
    shape, numbers = value
    return np.frombuffer(bytearray(numbers), np.int64).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder = msgspec.msgpack.Decoder(ToRank, dec_hook=_decode_array)
_unusable_decoder = msgspec.msgpack.Decoder(Unusable)

# Called with a rank that has ended, and why its part can't be loaded, or None.
OnLost = Callable[[int, Unusable | None], None]


def end_process(rank: int, why: Unusable | None) -> None:
    """End this process, whose steps would wait for a rank that has died, for ever on some devices."""
    log.critical("rank %d has ended%s", rank, f": {why.message}" if why else "")
    if not why:  # else this rank finds the same, or its connections are closed
        os._exit(1)


def start_process(sock: socket.socket) -> subprocess.Popen[bytes]:
    """Start the process of a rank, with its end of a socket."""
    # -P: a folder named worker in the working directory must not take the place of this worker.
    command = (sys.executable, "-P", "-m", "loraplex.worker.engine.process", "--fd", str(sock.fileno()), "--rank")
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(sock.fileno(),))


class Followers:
    """The processes of the ranks from 1 on, as rank 0 has them."""

    def __init__(self, config: EngineConfig, on_lost: OnLost | None = None) -> None:
        """Start them; `on_lost` is called from a thread of its own, by default to end this process."""
        # An adapter in host memory is an open file.
        with contextlib.suppress(OSError, ValueError):
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._directory = tempfile.TemporaryDirectory(prefix="loraplex-ranks-")
        self.store = os.path.join(self._directory.name, "store")
        self._on_lost = on_lost or end_process
        self._closing = False
        self._sockets: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, config.tensor_parallel):
            ours, theirs = socket.socketpair()
            self._sockets.append(ours)
            with theirs:
                self._processes.append(start_process(theirs))
            ours.sendall(frame(_encoder.encode(Start(config, rank, self.store))))
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes."""
        return [process.pid for process in self._processes]

    def met(self) -> None:
        """Remove the file by which the ranks have met."""
        self._directory.cleanup()

    def send(self, layout: Layout) -> None:
        """Let all ranks execute a layout."""
        body = frame(_encoder.encode(RunDecode(layout) if isinstance(layout, DecodeLayout) else RunStep(layout)))
        for sock in self._sockets:
            sock.sendall(body)

    def install(self, shapes: AdapterShapes, shared: SharedMemory, slot: int) -> None:
        """Let all ranks put their parts of an adapter into a slot."""
        body = frame(_encoder.encode(Install(shapes, slot)))
        for sock in self._sockets:
            sent = socket.send_fds(sock, [body], [shared.descriptor])
            sock.sendall(body[sent:])

    def close(self) -> None:
        """End the processes."""
        self._closing = True
        for sock in self._sockets:
            with contextlib.suppress(OSError):  # it is closed at the other end
                sock.shutdown(socket.SHUT_RDWR)
        while self._processes:
            process = self._processes.pop()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for sock in self._sockets:
            sock.close()
        self._directory.cleanup()

    def _watch(self) -> None:
        """Wait for the first rank that sends something, or that ends."""
        with selectors.DefaultSelector() as selector:
            for rank, sock in enumerate(self._sockets, 1):
                selector.register(sock, selectors.EVENT_READ, rank)
            (key, _), *_ = selector.select()
        splitter, why = Splitter(), None
        with contextlib.suppress(OSError):
            while not why and (data := self._sockets[key.data - 1].recv(_READ_BYTES)):
                why = next((_unusable_decoder.decode(body) for body in splitter.feed(data)), None)
        if not self._closing:
            self._directory.cleanup()
            self._on_lost(key.data, why)


class RankEnd:
    """A rank's end of the socket to rank 0."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        # Those whose messages are not complete.
        self._files: deque[int] = deque()

    def messages(self) -> Iterator[tuple[ToRank, SharedMemory | None]]:
        """Yield what rank 0 sends, until it has gone; an Install with the adapter's memory."""
        splitter = Splitter()
        while True:
            data, files, _, _ = socket.recv_fds(self._socket, _READ_BYTES, _READ_FILES)
            if not data:
                return
            self._files += files
            for body in splitter.feed(data):
                message = _decoder.decode(body)
                yield message, SharedMemory(self._files.popleft()) if isinstance(message, Install) else None

    def refuse(self, why: ModelUnusableError) -> None:
        """Tell rank 0 why this rank's part can't be loaded."""
        self._socket.sendall(frame(_encoder.encode(Unusable.of(why))))
