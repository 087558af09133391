"""Folders of object stores as sources: SeaweedFS for s3://, Azurite for az://, a stub of the XML API for gs://."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import obstore
import pytest

from loraplex.adapter_store.storage import DataDirectory
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.runtime.rpc.errors import Aborted, Mismatch, NotFound, PermissionDenied
from loraplex.runtime.rpc.timed_http import OpenSockets
from loraplex.transfers import http
from loraplex.transfers.fetch import Fetched, Progress, fetch
from loraplex.transfers.objects import ObjectFolder
from loraplex.transfers.policy import Rule, Sources, parse_uri
from tests.adapter_store.sources.places import (
    AZURE_ACCOUNT,
    AZURE_KEY,
    Place,
    XmlBucket,
    azurite,
    bucket_of,
    served,
)

BIG = bytes(range(256)) * 12_000
FILES = {CONFIG_FILE: b"{}", WEIGHTS_FILE: BIG}


@dataclass
class Bucket:
    """A bucket of an object store, `acme`: how an object is put into it, and its rule in the operator's file."""

    scheme: str
    put: Callable[[str, bytes], object]
    rule: str


def _s3(request: pytest.FixtureRequest, directory: Path) -> Iterator[Bucket]:
    url = request.getfixturevalue("seaweed_url")
    yield Bucket("s3", partial(obstore.put, bucket_of(url)), f'endpoint = "{url}"\nallow_private = true\n')


def _az(_: pytest.FixtureRequest, directory: Path) -> Iterator[Bucket]:
    with azurite(directory) as (url, container):
        keys = f'[credentials.a]\naccount_name_file = "{directory}/name"\naccount_key_file = "{directory}/key"\n'
        (directory / "name").write_text(AZURE_ACCOUNT)
        (directory / "key").write_text(AZURE_KEY)
        rule = f'endpoint = "{url}"\nallow_private = true\ncredentials = "a"\n'
        yield Bucket("az", partial(obstore.put, container), rule + keys)


def _gs(_: pytest.FixtureRequest, directory: Path) -> Iterator[Bucket]:
    bucket = XmlBucket()
    with served(bucket.answer) as url:
        yield Bucket("gs", bucket.put, f'endpoint = "{url}"\nallow_private = true\n')


@pytest.fixture(params=[_s3, _az, _gs], scope="module")
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """An object store that runs."""
    yield from request.param(request, tmp_path_factory.mktemp("bucket"))


@pytest.fixture
def allow(bucket: Bucket, tmp_path: Path) -> Rule:
    """The rule that the operator's file gives to the bucket."""
    path = tmp_path / "sources.toml"
    path.write_text(f'[[source]]\nprefix = "{bucket.scheme}://acme/lora"\n{bucket.rule}')
    return Sources(path).rule(parse_uri(f"{bucket.scheme}://acme/lora/support"), "acme")


def test_a_folder_is_fetched_with_its_versions(bucket: Bucket, allow: Rule, tmp_path: Path) -> None:
    for name, content in FILES.items():
        bucket.put(f"lora/support/{name}", content)
    data = DataDirectory(tmp_path / "data")
    into = Fetched(data.new_upload)
    uri = parse_uri(f"{bucket.scheme}://acme/lora/support")
    origin = fetch(uri, allow, into, len(BIG), Progress())
    assert {name: (into.upload.path / name).stat().st_size for name in FILES} == {n: len(c) for n, c in FILES.items()}
    into.upload.finish()
    assert (into.upload.path / WEIGHTS_FILE).read_bytes() == BIG
    assert origin.pin == origin.uri == str(uri)
    assert all(file.etag for file in origin.files)
    if bucket.scheme == "gs":
        assert all(file.version.isdigit() for file in origin.files)
    into.upload.discard()
    data.close()


def test_the_rest_of_an_object_is_read_and_another_object_is_noticed(bucket: Bucket, allow: Rule) -> None:
    folder = ObjectFolder(parse_uri(f"{bucket.scheme}://acme/lora/changing"), allow, OpenSockets())
    bucket.put(f"lora/changing/{WEIGHTS_FILE}", BIG)
    (file,) = folder.list().files
    pinned = folder.pin(file)
    assert b"".join(folder.read(pinned, 1_000_000)) == BIG[1_000_000:]
    bucket.put(f"lora/changing/{WEIGHTS_FILE}", BIG[::-1])
    with pytest.raises(Aborted, match="another object"):
        list(folder.read(pinned, 1_000_000))
    with pytest.raises(Aborted, match="another object"):
        folder.pin(file)


def test_an_empty_folder_is_not_found(bucket: Bucket, allow: Rule) -> None:
    with pytest.raises(NotFound, match="no files"):
        ObjectFolder(parse_uri(f"{bucket.scheme}://acme/lora/nothing"), allow, OpenSockets()).list()


def test_refused_credentials_are_said_without_their_values(tmp_path: Path) -> None:
    with served(lambda handler: handler.send(403)) as url:
        path = tmp_path / "sources.toml"
        path.write_text(
            f'[[source]]\nprefix = "s3://acme"\nendpoint = "{url}"\nallow_private = true\ncredentials = "a"\n'
            f'[credentials.a]\naccess_key_id_file = "{tmp_path}/id"\nsecret_access_key_file = "{tmp_path}/secret"\n'
        )
        (tmp_path / "id").write_text("AKIA123")
        (tmp_path / "secret").write_text("s3cr3t")
        rule = Sources(path).rule(parse_uri("s3://acme/x"), "acme")
        with pytest.raises(Mismatch, match="refuses the store's credentials") as refused:
            ObjectFolder(parse_uri("s3://acme/x"), rule, OpenSockets()).list()
    assert "s3cr3t" not in str(refused.value)
    assert "AKIA123" not in str(refused.value)


@pytest.fixture
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 127.0.0.1 be a public address, and the others of this machine those of a private network."""
    monkeypatch.setattr(http, "_is_public", lambda address: address == "127.0.0.1")


@pytest.mark.usefixtures("two_networks")
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_redirect_to_a_private_address_is_refused(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a list, and of an object behind a list that was answered."""
    asked, bucket, redirects = threading.Event(), XmlBucket(), True
    bucket.put(f"lora/x/{WEIGHTS_FILE}", BIG)

    def redirect(handler: Place) -> None:
        if redirects:
            handler.send(307, location=f"{private}{handler.path[handler.path.index('/acme') :]}")
        else:
            bucket.answer(handler)

    def answer(handler: Place) -> None:
        asked.set()
        bucket.answer(handler)

    monkeypatch.setenv("OWN_ACCOUNT", AZURE_ACCOUNT)
    uri, secrets = parse_uri(f"{scheme}://acme/lora/x"), {"account_name": ("env", "OWN_ACCOUNT")}
    with served(redirect) as url, served(answer, "127.0.0.2") as private:
        rule = Rule(uri, endpoint=url, secrets=secrets if scheme == "az" else {})
        with closing(ObjectFolder(uri, rule, OpenSockets())) as folder:
            with pytest.raises(PermissionDenied, match=r"127\.0\.0\.2, of a private network") as refused:
                folder.list()
            assert refused.value.reason == "SOURCE_ADDRESS_REFUSED"
        if scheme == "gs":  # the stub answers in Google's way
            with closing(ObjectFolder(uri, rule, OpenSockets())) as folder:
                redirects = False
                (file,) = folder.list().files
                assert b"".join(folder.read(folder.pin(file), 0)) == BIG
                redirects = True
                with pytest.raises(PermissionDenied):
                    list(folder.read(file, 0))
    assert not asked.is_set()


@pytest.mark.usefixtures("two_networks")
def test_a_tunnel_leads_to_public_addresses_alone() -> None:
    """For an endpoint with TLS the library asks the proxy for a tunnel."""
    with (
        closing(http.CheckedProxy(OpenSockets(), allow_private=False)) as proxy,
        served(lambda handler: handler.send(200, b"public")) as url,
    ):
        place, port = proxy.url.removeprefix("http://").split(":"), url.rpartition(":")[2]
        for host, answer in (("127.0.0.1", b"HTTP/1.1 200"), ("127.0.0.2", b"HTTP/1.1 403"), ("no such", b"")):
            with socket.create_connection((place[0], int(place[1])), 10) as tunnel:
                tunnel.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert tunnel.recv(1024).startswith(answer)
                if answer.endswith(b"200"):
                    tunnel.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    with tunnel.makefile("rb") as answers:
                        assert answers.read().endswith(b"public")
        assert proxy.refusal is not None
