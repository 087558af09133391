"""Places that send half an answer, or a list that would keep the store's interpreter, to imports and exports."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loraplex.adapter_store.storage import DataDirectory, Upload
from loraplex.runtime.rpc.errors import InvalidField
from loraplex.transfers.fetch import Cancelled, Fetched, Progress, fetch
from loraplex.transfers.oci import push_files
from loraplex.transfers.policy import Rule, parse_uri
from loraplex.transfers.sources import Interrupted
from tests.adapter_store.sources.places import served

URIS = {"hf": "hf://acme/support", "oci": "oci://registry/acme:1", "s3": "s3://bucket/acme"}


@pytest.fixture
def half() -> Iterator[tuple[str, threading.Event]]:
    """A server that begins each answer; its URL, and an event that is set when it has."""
    listening, begun, accepted = socket.create_server(("127.0.0.1", 0)), threading.Event(), list[socket.socket]()

    def answer() -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            accepted.append(client)
            client.recv(1 << 16)
            client.sendall(b"HTTP/1.1 200 OK\r\nx: ")
            begun.set()

    thread = threading.Thread(target=answer)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}", begun
    listening.shutdown(socket.SHUT_RDWR)
    thread.join()
    for each in (listening, *accepted):
        each.close()


def _ends(work: Callable[[], object], progress: Progress, begun: threading.Event) -> BaseException:
    """Cancel the work when an answer has begun; return the error that it ends with."""
    errors = list[BaseException]()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    working = threading.Thread(target=run, daemon=True)
    working.start()
    assert begun.wait(60)
    progress.cancel()
    working.join(25)  # less than the silence that is allowed
    assert errors, "the thread waits for the source's next byte"
    return errors[0]


@pytest.mark.parametrize("scheme", URIS)
def test_an_import_ends_when_it_is_cancelled(scheme: str, half: tuple[str, threading.Event], data: Path) -> None:
    uri, progress, directory = parse_uri(URIS[scheme]), Progress(), DataDirectory(data)
    into = Fetched(directory.new_upload)
    rule = Rule(uri, endpoint=half[0], allow_private=True)
    error = _ends(lambda: fetch(uri, rule, into, 1 << 20, progress), progress, half[1])
    directory.close()
    assert isinstance(error, Cancelled)


@pytest.mark.parametrize("scheme", ["hf", "oci"])
def test_a_list_of_too_many_values_is_refused_unread(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter would read this one in 0.7 s, in which no other thread of the store runs."""
    monkeypatch.setattr("loraplex.runtime.json_object.json.loads", None)
    uri, body = parse_uri(URIS[scheme]), b'{"a": [' + b"[]," * 1_390_000 + b"[]]}"
    with served(lambda handler: handler.send(200, body)) as url, pytest.raises(InvalidField) as refusal:
        fetch(uri, Rule(uri, endpoint=url, allow_private=True), Fetched(lambda: Upload(Path())), 1 << 20, Progress())
    assert refusal.value.reason == "SOURCE_BROKEN"


def test_an_export_ends_when_it_is_cancelled(half: tuple[str, threading.Event]) -> None:
    uri, progress = parse_uri(URIS["oci"]), Progress()
    rule = Rule(uri, endpoint=half[0], allow_private=True)
    files = {"adapter_config.json": ("sha256:" + "0" * 64, 2, lambda: [b"{}"])}
    error = _ends(lambda: push_files(uri, rule, files, {}, progress.sockets), progress, half[1])
    assert isinstance(error, Interrupted)
