"""Folders of object stores: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, az://CONTAINER/FOLDER."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from loraplex.adapter_store.records import SourceFile
from loraplex.runtime.rpc.errors import InvalidField
from loraplex.runtime.rpc.timed_http import OpenSockets
from loraplex.transfers.http import CONNECT_S, CheckedProxy
from loraplex.transfers.policy import Rule, SourceUri
from loraplex.transfers.sources import (
    MAX_FILES,
    PIECE_BYTES,
    Interrupted,
    Listing,
    Source,
    changed,
    not_found,
    refused,
)

# Time in seconds for which the library repeats a request by itself.
_RETRY_S = 10.0
_STATUS = re.compile(r"status code: (\d{3})")


def open_bucket(uri: SourceUri, rule: Rule, proxy: str) -> ObjectStore:
    """Open a bucket or container with the rule's credentials, through the proxy of a URL, if there is one."""
    secrets: dict[str, Any] = dict(rule.read_secrets())
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        # Of a whole answer, which may be a large file: the time of an import bounds it.
        "timeout": timedelta(hours=24),
        "allow_http": rule.endpoint.startswith("http://"),
    }
    options: dict[str, Any] = {
        "client_options": {**client, "proxy_url": proxy} if proxy else client,
        "retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=_RETRY_S)},
    }
    if not rule.identity and not secrets.keys() - {"account_name"}:
        options["skip_signature"] = True  # not with what the store's own variables have
    if uri.scheme == "s3":
        region = rule.region or "us-east-1"
        endpoint = rule.endpoint or f"https://s3.{region}.amazonaws.com"
        return S3Store(uri.authority, endpoint=endpoint, region=region, **secrets, **options)
    if uri.scheme == "gs":
        where: dict[str, Any] = {"base_url": rule.endpoint} if rule.endpoint else {}
        return GCSStore(uri.authority, **where, **secrets, **options)
    where = {"endpoint": rule.endpoint} if rule.endpoint else {}
    return AzureStore(uri.authority, **where, **secrets, **options)


class ObjectFolder(Source):
    """A source that is a folder of an object store. Files keep their version and ETag between list and read."""

    def __init__(self, uri: SourceUri, rule: Rule, sockets: OpenSockets) -> None:
        if not uri.path:
            raise InvalidField("source", f"{uri}: write {uri.scheme}://{uri.authority}/FOLDER")
        self._uri, self._folder = str(uri), f"{uri.path}/"
        # The library has no option for redirects, which it follows, and none to end a call.
        self._proxy = CheckedProxy(sockets, allow_private=rule.allow_private)
        try:
            self._bucket = open_bucket(uri, rule, self._proxy.url)
        except BaseException:
            self.close()
            raise

    def list(self) -> Listing:
        """Return the files below the folder."""
        files: list[SourceFile] = []
        with self._errors():
            for page in obstore.list(self._bucket, self._folder, chunk_size=1000):
                files += [
                    SourceFile(each["path"].removeprefix(self._folder), each["size"], each["e_tag"] or "")
                    for each in page
                ]
                if len(files) > MAX_FILES:
                    break
        if not files:
            raise not_found(self._uri, "it has no files")
        return Listing(self._uri, tuple(files))

    def pin(self, file: SourceFile) -> SourceFile:
        """Return the file with its version, if the bucket has versions."""
        with self._errors():
            meta = obstore.head(self._bucket, self._folder + file.path)
        etag = meta["e_tag"] or ""
        if (meta["size"], etag.strip('"')) != (file.size, file.etag.strip('"')):  # Azure lists them without quotes
            raise changed(file, "the bucket has another object of its name")
        return replace(file, etag=etag, version=meta["version"] or "")

    def read(self, file: SourceFile, start: int) -> Iterator[bytes]:
        """Yield the bytes of the object of that version and ETag."""
        options: Any = {"if_match": file.etag} if file.etag else {}
        if file.version:
            options["version"] = file.version
        if start:
            options["range"] = {"offset": start}
        try:
            with self._errors():
                answer = obstore.get(self._bucket, self._folder + file.path, options=options)
                if answer.meta["size"] != file.size:
                    raise changed(file, f"it has {answer.meta['size']} bytes, the list says {file.size}")
                for piece in answer.stream(min_chunk_size=PIECE_BYTES):
                    yield bytes(piece)
        except PreconditionError as error:
            raise changed(file, "the bucket has another object of its name") from error

    def close(self) -> None:
        """Close the proxy; the library closes its connections with the bucket."""
        self._proxy.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except PreconditionError:
            raise
        except (NotFoundError, FileNotFoundError) as error:
            raise not_found(self._uri) from error
        except BaseError as error:
            if self._proxy.refusal is not None:
                raise self._proxy.refusal from error
            if isinstance(error, PermissionDeniedError | UnauthenticatedError):
                raise refused(self._uri, 403 if isinstance(error, PermissionDeniedError) else 401) from error
            status = _STATUS.search(str(error))  # lists have no errors of their own
            if status is not None and status[1] == "404":
                raise not_found(self._uri) from error
            if status is not None and status[1] in {"401", "403"}:
                raise refused(self._uri, int(status[1])) from error
            raise Interrupted(str(error).partition("\n")[0][:200]) from error
