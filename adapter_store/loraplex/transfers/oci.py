"""Artifacts of an OCI registry, packaged by the model specification: oci://REGISTRY/REPO:TAG or @sha256:DIGEST.

A manifest of the artifact type below has a layer for each file, whose path is an annotation
(https://github.com/modelpack/model-spec). The weights are a weight layer, the configuration is a layer of weight
configuration, both as they are (`raw`). Annotations of the manifest say for which base model the adapter is.
Registries: https://github.com/opencontainers/distribution-spec.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx2

from loraplex.adapter_store.records import Revision, SourceFile
from loraplex.contracts.artifacts.names import DIGEST_PREFIX, is_digest, sha256_bytes
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.runtime.json_object import parse_bounded
from loraplex.runtime.rpc.errors import InvalidField, Mismatch
from loraplex.runtime.rpc.timed_http import OpenSockets
from loraplex.transfers.http import SourceClient, check_status
from loraplex.transfers.policy import Rule, SourceUri
from loraplex.transfers.sources import Listing, Source, broken, not_found, refused

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT = "application/vnd.cncf.model.manifest.v1+json"
CONFIG = "application/vnd.cncf.model.config.v1+json"
WEIGHT = "application/vnd.cncf.model.weight.v1.raw"
WEIGHT_CONFIG = "application/vnd.cncf.model.weight.config.v1.raw"
FILE_PATH = "org.cncf.model.filepath"
# Of other tools, which name a layer's file so.
_TITLE = "org.opencontainers.image.title"
# Files to push by name: digest, size, and a function that opens their pieces.
Files = Mapping[str, tuple[str, int, Callable[[], Iterable[bytes]]]]
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_REPOSITORY = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*")
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class Registry(Source):
    """A repository of a registry, which is a source, and a place to export to."""

    def __init__(self, uri: SourceUri, rule: Rule, sockets: OpenSockets) -> None:
        self._uri = str(uri)
        self._name, self._reference = _split(uri)
        self._registry = uri.authority
        self._root = f"{(rule.endpoint or f'https://{uri.authority}').rstrip('/')}/v2/{self._name}"
        self._secrets, self._realm = rule.read_secrets(), rule.realm
        self._client = SourceClient(self._uri, sockets, allow_private=rule.allow_private)
        self._authorization: dict[str, str] = {}

    def list(self) -> Listing:
        """Read the manifest, and return the files of its layers."""
        response, body = self._ask("GET", f"{self._root}/manifests/{self._reference}", headers={"accept": MANIFEST})
        if response.status_code == 404:
            raise not_found(self._uri, "the registry has no such repository, tag or digest")
        check_status(self._uri, response)
        digest = sha256_bytes(body)
        if is_digest(self._reference) and digest != self._reference:
            raise broken(f"{self._uri}: the manifest that the registry sent has the digest {digest}")
        try:
            files = tuple(map(_file_of, _manifest(parse_bounded(body))["layers"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise broken(f"{self._uri} is not a model artifact: {error or type(error).__name__}") from error
        return Listing(self.pinned(digest), files)

    def read(self, file: SourceFile, start: int) -> Iterator[bytes]:
        """Yield the bytes of a layer."""
        url = f"{self._root}/blobs/{file.etag}"
        return self._client.pieces(url, file, start, self._authorization.items())

    def pinned(self, digest: str) -> str:
        """Return the URI of an artifact by its digest."""
        return f"oci://{self._registry}/{self._name}@{digest}"

    def push(self, files: Files, notes: Mapping[str, str]) -> str:
        """Upload files as an artifact with annotations; returns its digest. A layer that the registry has stays."""
        layers = []
        for name, (digest, size, pieces) in files.items():
            self._upload(digest, size, pieces)
            kind = WEIGHT if name == WEIGHTS_FILE else WEIGHT_CONFIG
            layers.append({"mediaType": kind, "digest": digest, "size": size, "annotations": {FILE_PATH: name}})
        config = _json(
            {
                "descriptor": {"name": self._name},
                "config": {"format": "safetensors"},
                "modelfs": {"type": "layers", "diffIds": [layer["digest"] for layer in layers]},
            }
        )
        self._upload(sha256_bytes(config), len(config), lambda: [config])
        manifest = _json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "artifactType": ARTIFACT,
                "config": {"mediaType": CONFIG, "digest": sha256_bytes(config), "size": len(config)},
                "layers": layers,
                "annotations": dict(notes),
            }
        )
        reference = self._reference if _TAG.fullmatch(self._reference) else sha256_bytes(manifest)
        url, headers = f"{self._root}/manifests/{reference}", {"content-type": MANIFEST}
        check_status(self._uri, self._ask("PUT", url, content=manifest, headers=headers)[0])
        return sha256_bytes(manifest)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _upload(self, digest: str, size: int, pieces: Callable[[], Iterable[bytes]]) -> None:
        if self._ask("HEAD", f"{self._root}/blobs/{digest}", write=True)[0].status_code == 200:
            return
        response, _ = self._ask("POST", f"{self._root}/blobs/uploads/", write=True)
        check_status(self._uri, response)
        location = urljoin(str(response.url), response.headers.get("location", ""))
        if urlsplit(location)[:2] != urlsplit(self._root)[:2]:
            raise broken(f"{self._uri}: the registry sends uploads to another host, {urlsplit(location).netloc}")
        headers = {**self._authorization, "content-type": "application/octet-stream", "content-length": str(size)}
        url = httpx2.URL(location).copy_add_param("digest", digest)
        response, _ = self._client.answer("PUT", str(url), headers=headers, content=iter(pieces()))
        check_status(self._uri, response)

    def _ask(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, write: bool = False, **options: Any
    ) -> tuple[httpx2.Response, bytes]:
        """Make a request, after a challenge once more with the credentials that it asks for."""
        sent = dict(headers or {})
        answer = self._client.answer(method, url, headers={**sent, **self._authorization}, **options)
        if answer[0].status_code != 401:
            return answer
        write = write or method not in {"GET", "HEAD"}
        self._authorization = {"authorization": self._authorize(answer[0].headers.get("www-authenticate", ""), write)}
        return self._client.answer(method, url, headers={**sent, **self._authorization}, **options)

    def _authorize(self, challenge: str, write: bool) -> str:
        """Return the authorization that a challenge asks for. Raises Mismatch."""
        kind, _, rest = challenge.partition(" ")
        user, password = self._secrets.get("username", ""), self._secrets.get("password", "")
        basic = f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}" if user or password else ""
        if kind.lower() == "basic" and basic:
            return basic
        fields = dict(_CHALLENGE.findall(rest))
        realms = ("https://", "http://") if self._root.startswith("http://") else ("https://",)
        if kind.lower() != "bearer" or not (realm := fields.get("realm", "")).startswith(realms):
            raise refused(self._uri, 401)
        if basic and urlsplit(realm)[:2] not in {urlsplit(self._root)[:2], urlsplit(self._realm)[:2]}:
            where = "{}://{}".format(*urlsplit(realm)[:2])
            message = f"the registry asks for its password at {where}; an operator allows it with realm in --sources"
            raise Mismatch("source", f"{self._uri}: {message}", reason="SOURCE_REFUSED")
        scope = f"repository:{self._name}:{'pull,push' if write else 'pull'}"
        query = {"scope": scope, **({"service": fields["service"]} if "service" in fields else {})}
        response, body = self._client.answer(
            "GET", realm, params=query, headers={"authorization": basic} if basic else {}
        )
        check_status(self._uri, response)
        try:
            answer = parse_bounded(body)
            return f"Bearer {answer.get('token') or answer['access_token']}"
        except (ValueError, KeyError, AttributeError) as error:
            raise refused(self._uri, 401) from error


def push_files(uri: SourceUri, rule: Rule, files: Files, notes: Mapping[str, str], sockets: OpenSockets) -> str:
    """Push files as an artifact to a tag; returns its URI by digest. Raises errors of a call, and Interrupted."""
    registry = Registry(uri, rule, sockets)
    try:
        return registry.pinned(registry.push(files, notes))
    finally:
        registry.close()


def annotations_of(revision: Revision, modules: Sequence[str]) -> dict[str, str]:
    """Return the annotations of a revision's manifest: its digest, its base model, its largest rank, its modules."""
    notes = {
        "revision": revision.name.digest,
        "base-model": revision.base_model,
        "base-digest": revision.base_digest,
        "rank": str(revision.rank),
        "modules": ",".join(modules),
    }
    return {f"loraplex.{name}": value for name, value in notes.items() if value}


def _split(uri: SourceUri) -> tuple[str, str]:
    """Return the repository and the tag or digest of a URI. Raises InvalidField."""
    name, at, reference = uri.path.partition("@")
    if not at:
        name, _, reference = uri.path.partition(":")
    known = is_digest(reference) if at else _TAG.fullmatch(reference)
    if not _REPOSITORY.fullmatch(name) or not known:
        raise InvalidField("source", f"{uri}: write oci://REGISTRY/REPO:TAG or oci://REGISTRY/REPO@sha256:DIGEST")
    return name, reference


def _manifest(manifest: Any) -> Any:
    kinds = {manifest.get("artifactType"), manifest["config"].get("mediaType")}
    if not kinds & {ARTIFACT, CONFIG}:
        raise ValueError(f"its artifactType is {manifest.get('artifactType')!r}, not {ARTIFACT}")
    if len(manifest["layers"]) > 1000:
        raise ValueError("it has more than 1000 layers")
    return manifest


def _file_of(layer: Any) -> SourceFile:
    digest, size, notes = layer["digest"], layer["size"], layer.get("annotations") or {}
    path = notes.get(FILE_PATH) or notes.get(_TITLE) or ""
    if not is_digest(digest) or type(size) is not int or size < 0 or not isinstance(path, str):
        raise ValueError("a layer has no digest or size")
    if path.rpartition("/")[2] in {CONFIG_FILE, WEIGHTS_FILE} and not str(layer.get("mediaType")).endswith(".raw"):
        raise ValueError(
            f"layer {path} is {layer.get('mediaType')}; package the files as they are (raw), not as archives"
        )
    return SourceFile(path or digest, size, etag=digest, sha256=digest.removeprefix(DIGEST_PREFIX))


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
