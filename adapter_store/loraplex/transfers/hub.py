"""Repositories of a hub in Hugging Face's API: hf://ORG/REPO[@REVISION][/FOLDER]."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils._headers import build_hf_headers

from loraplex.adapter_store.records import SourceFile
from loraplex.runtime.json_object import parse_bounded
from loraplex.runtime.rpc.errors import InvalidField
from loraplex.runtime.rpc.timed_http import OpenSockets
from loraplex.transfers.http import SourceClient, check_status
from loraplex.transfers.policy import Rule, SourceUri
from loraplex.transfers.sources import MAX_FILES, Listing, Source, broken, not_found

_INFO: Any = ModelInfo


class HubRepository(Source):
    """A source that is a repository. A branch or a tag is resolved to its commit once, by `list`."""

    def __init__(self, uri: SourceUri, rule: Rule, sockets: OpenSockets) -> None:
        repository, _, folder = uri.path.partition("/")
        repository, _, self._revision = repository.partition("@")
        if not repository:
            raise InvalidField("source", f"{uri}: write hf://ORG/REPO, or hf://ORG/REPO@REVISION/FOLDER")
        self._uri = str(uri)
        self._name = f"{uri.authority}/{repository}"
        self._folder = f"{folder}/" if folder else ""
        self._endpoint = (rule.endpoint or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        token = rule.read_secrets().get("token") or False
        self._headers = list(build_hf_headers(token=token, library_name="loraplex").items())
        self._commit = ""
        self._client = SourceClient(self._uri, sockets, allow_private=rule.allow_private)

    def list(self) -> Listing:
        """Resolve the revision, and return the files of the folder with their sizes."""
        revision = self._revision or constants.DEFAULT_REVISION
        url = f"{self._endpoint}/api/models/{self._name}/revision/{revision}"
        response, body = self._client.answer("GET", url, params={"blobs": "True"}, headers=self._headers)
        if response.status_code == 404:
            raise not_found(self._uri, f"the hub has no {self._name} with a revision {revision}, or hides it")
        check_status(self._uri, response)
        try:
            model: ModelInfo = _INFO(**{"id": self._name, **parse_bounded(body)})
            siblings = model.siblings or []
            files = [
                SourceFile(
                    each.rfilename.removeprefix(self._folder),
                    int(each.lfs.size if each.lfs else each.size or 0),
                    etag=each.blob_id or "",
                    sha256=each.lfs.sha256 if each.lfs else "",
                )
                for each in siblings[: MAX_FILES + 1]
                if each.rfilename.startswith(self._folder)
            ]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise broken(f"{self._uri}: the hub's description of it cannot be read: {type(error).__name__}") from error
        if not isinstance(model.sha, str) or not model.sha.isalnum():
            raise broken(f"{self._uri}: the hub does not say which commit it is")
        self._commit = model.sha
        pin = f"hf://{self._name}@{self._commit}{'/' + self._folder[:-1] if self._folder else ''}"
        return Listing(pin, tuple(files))

    def read(self, file: SourceFile, start: int) -> Iterator[bytes]:
        """Yield the file's bytes at the commit."""
        url = hf_hub_url(self._name, self._folder + file.path, revision=self._commit, endpoint=self._endpoint)
        return self._client.pieces(url, file, start, self._headers)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
