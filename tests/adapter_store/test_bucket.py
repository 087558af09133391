"""A store's bucket that does not answer: calls end with an error, and others do not wait for it again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from loraplex.adapter_store import bucket
from loraplex.adapter_store.bucket import BucketDirectory, open_bucket
from loraplex.adapter_store.embedded import open_database
from loraplex.runtime.rpc.errors import Unavailable


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """A bucket that takes connections and says nothing; these are listed."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            while server.fileno() >= 0:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        monkeypatch.setattr(bucket, "_SILENT_S", 0.2)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            monkeypatch.setenv(name, "x")
        yield taken
        server.shutdown(socket.SHUT_RDWR)
    for connection in taken:
        connection.close()


@pytest.mark.timeout(60)
def test_a_bucket_that_hangs_fails_calls_and_is_left_alone_for_a_while(
    silent: list[socket.socket], tmp_path: Path
) -> None:
    failures: list[None] = []
    data = BucketDirectory(tmp_path, open_bucket("s3://acme/store", 3600), lambda: failures.append(None))
    with closing(open_database("", data.catalog_path)) as database:
        data.database, upload = database, data.new_upload()
        upload.append("file", b"bytes")
        files = upload.finish()
        for _ in range(2):
            with pytest.raises(Unavailable) as caught, data.staged(upload, files):
                pass
            assert caught.value.reason == "BUCKET_DOWN"
            assert "\n" not in str(caught.value)
    assert silent
    assert len(failures) == 1, "the second call asks for nothing"
