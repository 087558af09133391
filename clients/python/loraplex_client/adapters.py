"""The methods of the adapter store's clients, and the files that they upload and download."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypeAlias

from loraplex.adapters.v1 import adapters_pb2, adapters_pb2_grpc

from loraplex_client.calls import AsyncUploadRequests, Call, Script, UploadRequests, pages
from loraplex_client.connection import method
from loraplex_client.endpoint import ApiKey, Tls, credentials_of
from loraplex_client.errors import DataLossError, InvalidRequestError
from loraplex_client.resources import (
    Adapter,
    BaseModel,
    Exported,
    FitnessCertificate,
    Pushed,
    Revision,
    certificate_message,
    model_message,
    resource_of,
)
from loraplex_client.retries import read_addresses

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# Chat templates beside an adapter, as transformers saves them; they become a field of the configuration.
TEMPLATE_FILE = "chat_template.jinja"
TOOL_TEMPLATE_FILE = "tool_use.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_FIELD = "loraplex_chat"
_TOOL_TEMPLATE_PATHS = (TOOL_TEMPLATE_FILE, f"additional_chat_templates/{TOOL_TEMPLATE_FILE}")
# Prompts beside an adapter, a JSON object a line with `prompt` or `messages`, and an `answer` or none: its certificates
# are made with them. They become a field of the configuration too.
PROMPTS_FILE = "certificate_prompts.jsonl"
PROMPTS_FIELD = "loraplex_certificate_prompts"
# Tokens that training added to the tokenizer, with all that the base's has; of slow tokenizers the second file. The
# store keeps those that are new in a field of the configuration.
TOKENIZER_FILE = "tokenizer.json"
ADDED_TOKENS_FILE = "added_tokens.json"
TOKENS_FIELD = "loraplex_tokens"
_TOKEN_FLAGS = ("special", "normalized", "single_word", "lstrip", "rstrip")
# The place of the tokens in a tokenizer.json, before its vocabulary, and the maximum bytes up to their end.
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')
_ADDED_BYTES = 2 * 1024 * 1024
# Its max_new_tokens becomes a field of the configuration: the tokens of an answer whose request sets no maximum.
GENERATION_FILE = "generation_config.json"
MAX_TOKENS_FIELD = "loraplex_max_tokens"
# Files beside the two that become fields of the configuration.
FILES_BESIDE = (
    GENERATION_FILE,
    TEMPLATE_FILE,
    TOOL_TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    PROMPTS_FILE,
    TOKENIZER_FILE,
    ADDED_TOKENS_FILE,
)
# The beginning of a file that git checked out without git-lfs.
_LFS_POINTER = b"version https://git-lfs."
_PICKLE = "adapter_model.bin"
_MLX = "adapters.safetensors"
# Folders of sharded states by the names' patterns, and what to do with them.
_LEFT_BY_TRAINERS = {
    "pytorch_model_fsdp*": "FSDP's shards: train with fsdp_state_dict_type FULL_STATE_DICT, or load them, and save the "
    "adapter with model.save_pretrained(DIR)",
    "global_step*": "DeepSpeed's shards: save the adapter with accelerator.unwrap_model(model).save_pretrained(DIR, "
    "state_dict=accelerator.get_state_dict(model))",
}
# Sources that the store imports from; a Path has one slash of a URI's two.
_SOURCES = ("hf", "s3", "gs", "az", "oci", "file")
_HUB = "huggingface.co/"
_URI = re.compile(r"([a-z0-9]+):/{1,2}(.+)")
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
CHUNK_BYTES = 512 * 1024
PAGE_SIZE = 1000

# A callback that gets the bytes sent so far and the bytes in all.
Progress: TypeAlias = Callable[[int, int], None]
# A piece of a file of an adapter, with the file's name.
Piece: TypeAlias = tuple[str, bytes]


class StoreCalls:
    """Adapters and base models at the adapter store's `address`, as `tenant`. Short names are the tenant's own.

    Every method raises LoraplexError. `timeout_s` is the deadline of each call; none by default. `api_key` is a key or
    a token, or a function that returns the current one; `tls` has the certificate files. Without them the variables
    LORAPLEX_API_KEY or LORAPLEX_API_KEY_FILE, LORAPLEX_CA, LORAPLEX_CERT and LORAPLEX_KEY are read. With a credential
    the tenant is the credential's, and `tenant` may stay empty; without one an empty `tenant` is `default`.
    """

    _connect: Any

    def __init__(
        self,
        address: str | Sequence[str],
        tenant: str = "",
        *,
        timeout_s: float | None = None,
        api_key: ApiKey | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.address = ",".join(read_addresses(address))
        self._connection = self._connect(
            address,
            adapters_pb2_grpc.AdapterServiceStub,
            tenant=tenant,
            timeout_s=timeout_s,
            credentials=credentials_of(api_key, tls),
        )
        self.tenant: str = self._connection.tenant

    def for_caller(self, tenant: str = "", api_key: ApiKey = "") -> Self:
        """Return a client for calls of another tenant or key, with the channels of this one, which closes them."""
        other = copy(self)
        other._connection = self._connection.for_caller(tenant, api_key)
        other.tenant = other._connection.tenant
        return other

    @method
    def push(
        self,
        directory: str | Path,
        name: str,
        *,
        base_model: str = "",
        alias: str = "",
        ttl_s: float | None = None,
        progress: Progress | None = None,
    ) -> Script[Pushed]:
        """Upload the peft adapter in `directory` as a revision of `name`, and move `alias` (`live`) to it.

        With `ttl_s` the revision is deleted after so many seconds, unless an alias or a release has it.

        A `chat_template.jinja` in the directory becomes the adapter's own chat template; the prompts or chats in a
        `certificate_prompts.jsonl`, with their answers, become those that its certificates are made with.
        `base_model` may be empty if the store has only one. Alias `-` moves no alias. `progress` is called with the
        bytes sent and the bytes in all. Raises InvalidRequestError if `directory` has no adapter, or a line of the
        prompts is none.
        """
        header = _header(name, base_model, alias, ttl_s)
        config, weights = read_config(Path(directory)), Path(directory) / WEIGHTS_FILE
        response = yield Call("UploadRevision", UploadRequests(_upload_requests(header, config, weights, progress)))
        return _pushed(response)

    @method
    def push_pieces(
        self,
        pieces: Iterable[Piece] | AsyncIterable[Piece],
        name: str,
        *,
        base_model: str = "",
        alias: str = "",
        ttl_s: float | None = None,
    ) -> Script[Pushed]:
        """Upload a revision of `name` as `push` does, from pieces of its two files: pairs of file name and bytes.

        The pieces of a file follow each other; an asynchronous client also takes pieces that are awaited. What raises
        while they are made ends the upload, and nothing of it is kept.
        """
        header = _header(name, base_model, alias, ttl_s)
        if isinstance(pieces, AsyncIterable):
            requests: Any = AsyncUploadRequests(_async_piece_requests(header, pieces))
        else:
            requests = UploadRequests(_piece_requests(header, pieces))
        response = yield Call("UploadRevision", requests)
        return _pushed(response)

    @method
    def import_revision(
        self, source: str, name: str, *, base_model: str = "", alias: str = "", progress: Progress | None = None
    ) -> Script[Pushed]:
        """Let the store fetch an adapter as a revision of `name`, and move `alias` (`live`) to it, as `push` does.

        `source` is hf://ORG/REPO[@REVISION][/FOLDER], s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, az://CONTAINER/FOLDER,
        oci://REGISTRY/REPO:TAG or file:///FOLDER of the store's machine. The store has the credentials, and its
        operator says which sources the tenant may use. `progress` is called with the bytes that the store has and the
        bytes in all. An import that was interrupted goes on with the same call within ten minutes.
        """
        request = adapters_pb2.ImportRevisionRequest(adapter=name, base_model=base_model, alias=alias, source=source)
        events = _Events(progress)
        yield Call("ImportRevision", request, take=events.take)
        return _pushed(events.last("imported"))

    @method
    def export_revision(self, name: str, destination: str, *, progress: Progress | None = None) -> Script[Exported]:
        """Let the store push the revision that `name` means to a registry, as oci://REGISTRY/REPO:TAG."""
        events = _Events(progress)
        request = adapters_pb2.ExportRevisionRequest(name=name, destination=destination)
        yield Call("ExportRevision", request, take=events.take)
        return resource_of(Exported, events.last("exported"))

    @method
    def push_adapter(
        self,
        config: Mapping[str, Any],
        weights: bytes | memoryview,
        name: str,
        *,
        base_model: str = "",
        alias: str = "-",
        ttl_s: float | None = None,
    ) -> Script[Pushed]:
        """Upload a revision of `name` from memory: peft's configuration, and what `safetensors.save` returns.

        By default no alias moves to it: requests name it by its digest, as `NAME@` and `pushed.revision.digest`, while
        others that were pushed before are served beside it. For training runs, which give a `ttl_s`.
        """
        header, content = _header(name, base_model, alias, ttl_s), memoryview(weights)
        pieces = ((WEIGHTS_FILE, bytes(content[at : at + CHUNK_BYTES])) for at in range(0, len(content), CHUNK_BYTES))
        requests = _piece_requests(header, chain([(CONFIG_FILE, json.dumps(dict(config)).encode())], pieces))
        response = yield Call("UploadRevision", UploadRequests(requests))
        return _pushed(response)

    @method
    def list(self, tenant: str = "") -> Script[tuple[Adapter, ...]]:
        """Return the adapters that the caller may use: its own and the shared ones, or those of one `tenant`."""
        request = adapters_pb2.ListAdaptersRequest(parent=f"tenants/{tenant}" if tenant else "", page_size=PAGE_SIZE)
        messages = yield from pages("ListAdapters", request, lambda page: page.adapters)
        return tuple(resource_of(Adapter, message) for message in messages)

    @method
    def get(self, name: str) -> Script[tuple[Adapter, Revision]]:
        """Return an adapter, and the revision that `name` (with `@alias` or `@sha256:...`) currently means."""
        return (yield from _get(name))

    @method
    def delete(self, name: str, *, purge: bool = False) -> Script[None]:
        """Remove an adapter with all its revisions; with `purge` their files at once, even if answers run."""
        yield Call("DeleteAdapter", adapters_pb2.DeleteAdapterRequest(name=self.full_name(name), purge=purge))

    @method
    def revisions(self, name: str) -> Script[tuple[Revision, ...]]:
        """Return an adapter's revisions, newest first."""
        request = adapters_pb2.ListRevisionsRequest(parent=self.full_name(name), page_size=PAGE_SIZE)
        messages = yield from pages("ListRevisions", request, lambda page: page.revisions)
        return tuple(resource_of(Revision, message) for message in messages)

    @method
    def set_alias(self, name: str, alias: str, digest: str) -> Script[Adapter]:
        """Move `alias` to the revision of that digest, atomically; an empty digest removes it."""
        request = adapters_pb2.SetAliasRequest(adapter=self.full_name(name), alias=alias, digest=digest)
        response = yield Call("SetAlias", request)
        return resource_of(Adapter, response.adapter)

    @method
    def certify(self, revision: str, certificate: FitnessCertificate) -> Script[FitnessCertificate]:
        """Keep the certificate of a revision, by its full name; returns it with the store's verdict."""
        request = adapters_pb2.CertifyRevisionRequest(name=revision, certificate=certificate_message(certificate))
        response = yield Call("CertifyRevision", request)
        return resource_of(FitnessCertificate, response.certificate)

    @method
    def download(self, name: str, directory: str | Path) -> Script[Revision]:
        """Write the two files of the revision that `name` means into `directory`, which is made if needed."""
        if "/revisions/" not in name:
            _, revision = yield from _get(name)
            name = revision.name
        Path(directory).mkdir(parents=True, exist_ok=True)
        files = _Incoming(Path(directory))
        try:
            yield Call("DownloadRevision", adapters_pb2.DownloadRevisionRequest(name=name), take=files.take)
            return files.keep()
        finally:
            files.discard()

    @method
    def config(self, revision: str) -> Script[dict[str, Any]]:
        """Return the configuration of a revision, by its full name."""
        parts: list[bytes] = []
        request = adapters_pb2.DownloadRevisionRequest(name=revision, config_only=True)
        yield Call("DownloadRevision", request, take=lambda response: parts.append(response.chunk.data))
        fields = json.loads(b"".join(parts))
        return fields if isinstance(fields, dict) else {}

    @method
    def register_model(
        self, model: BaseModel, files: Mapping[str, bytes], *, replace: bool = False, stage: bool = False
    ) -> Script[BaseModel]:
        """Register a base model with its small files.

        For a name with another digest `stage` keeps it beside the live revision, for `promote_model`, and `replace`
        makes it live at once.
        """
        header = adapters_pb2.RegisterBaseModelRequest(model=model_message(model), replace=replace, stage=stage)
        # The number of files goes first, so that the store notices a stream that is cut short.
        for name, content in sorted(files.items()):
            sha256 = f"sha256:{hashlib.sha256(content).hexdigest()}"
            header.model.files.add(name=name, size=len(content), sha256=sha256)
        response = yield Call("RegisterBaseModel", UploadRequests(_register_requests(header, files)))
        return resource_of(BaseModel, response.model)

    @method
    def models(self, *, all_revisions: bool = False) -> Script[tuple[BaseModel, ...]]:
        """Return the registered base models: the live revision of each, or also the staged and the former ones."""
        request = adapters_pb2.ListBaseModelsRequest(page_size=PAGE_SIZE, all_revisions=all_revisions)
        messages = yield from pages("ListBaseModels", request, lambda page: page.models)
        return tuple(resource_of(BaseModel, message) for message in messages)

    @method
    def promote_model(self, name: str, digest: str) -> Script[BaseModel]:
        """Make a staged or former revision of a base model live: calls get it from now on.

        It does not look whether a worker serves it, as `loraplex models promote` does.
        """
        request = adapters_pb2.PromoteBaseModelRequest(name=name, digest=digest)
        response = yield Call("PromoteBaseModel", request)
        return resource_of(BaseModel, response.model)

    def full_name(self, name: str) -> str:
        """Return the full name of an adapter; a short name means the tenant's own, whom the store may know alone."""
        return name if name.startswith("tenants/") or not self.tenant else f"tenants/{self.tenant}/adapters/{name}"


def _get(name: str) -> Script[tuple[Adapter, Revision]]:
    response = yield Call("GetAdapter", adapters_pb2.GetAdapterRequest(name=name))
    return resource_of(Adapter, response.adapter), resource_of(Revision, response.revision)


def why_no_adapter(directory: Path) -> str:
    """Return why a directory cannot be uploaded as an adapter, and what to do, after its name; empty: it can."""
    if not directory.exists():
        return _why_no_directory(str(directory))
    if not (directory / CONFIG_FILE).is_file():
        return _why_no_config(directory)
    if not (directory / WEIGHTS_FILE).is_file():
        return _why_no_weights(directory)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (directory / name).open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return f"has a pointer of git-lfs as {name}, and not the file: run `git lfs pull` there"
    return ""


def _why_no_directory(path: str) -> str:
    if uri := _URI.match(path):
        scheme, place = uri.groups()
        if scheme.startswith("http") and place.startswith(_HUB):
            scheme, place = "hf", place.removeprefix(_HUB).replace("/tree/", "@")
        if scheme in _SOURCES:
            return f"is no directory; the store fetches it: `loraplex adapters import {scheme}://{place} --name NAME`"
        return f"is no directory; download it, or let the store fetch it from one of {', '.join(_SOURCES)}"
    if _REPOSITORY.fullmatch(path):
        return f"does not exist here; from a hub: `loraplex adapters import hf://{path} --name {path.split('/')[1]}`"
    return "does not exist"


def _why_no_config(directory: Path) -> str:
    if snapshots := [*directory.glob(f"snapshots/*/{CONFIG_FILE}")]:
        newest = max(snapshots, key=lambda path: path.stat().st_mtime).parent
        kind = "the root of a hub's cache"
        return f"is not an adapter, but {kind}: give one of the {len(snapshots)} below it, such as {newest}"
    if files := [*directory.glob("*.gguf")]:
        return f"has a GGUF file: `loraplex adapters push {files[0]} --model-dir BASE` converts and uploads it"
    below = sorted((path.parent for path in directory.glob(f"*/{CONFIG_FILE}")), key=_checkpoint_number)
    if below:
        kind = "the parent of checkpoints" if _checkpoint_number(below[-1])[0] >= 0 else "the parent of adapters"
        return f"is not an adapter, but {kind}: give one of the {len(below)} below it, such as {below[-1]}"
    if (directory / "config.json").is_file():
        return "is not an adapter, but a whole model: `loraplex models push` registers one"
    if not directory.is_dir():
        return f"is a file: give the directory that has {CONFIG_FILE} and {WEIGHTS_FILE}"
    return f"is not an adapter: it has no {CONFIG_FILE}"


def _checkpoint_number(directory: Path) -> tuple[int, str]:
    """Return the step of a trainer's checkpoint, -1 for another directory, and the name."""
    step = directory.name.removeprefix("checkpoint-")
    return (int(step) if step.isdecimal() else -1), directory.name


def _why_no_weights(directory: Path) -> str:
    if (directory / _MLX).is_file():
        return f"has its weights in {_MLX}, as MLX does: `loraplex adapters push {directory}` converts and uploads it"
    if (directory / _PICKLE).is_file():
        return (
            f"has its weights in {_PICKLE}, a pickle, which may run code when it is read; save them as "
            f"{WEIGHTS_FILE}: model.save_pretrained(DIR), or safetensors.torch.save_file(torch.load('{_PICKLE}', "
            f"weights_only=True), '{WEIGHTS_FILE}')"
        )
    if shards := [*directory.glob("adapter_model-*-of-*.safetensors")]:
        return (
            f"has its weights in {len(shards)} files; join them as {WEIGHTS_FILE}: load each with "
            "safetensors.torch.load_file, and save all tensors with save_file"
        )
    for pattern, what in _LEFT_BY_TRAINERS.items():
        if found := [*directory.glob(pattern)]:
            return f"has no {WEIGHTS_FILE}, but {found[0].name}, {what}"
    return f"is not an adapter: it has no {WEIGHTS_FILE}"


def read_config(directory: Path, *, tokens: bool = True) -> bytes:
    """Return an adapter's configuration as it is uploaded, with what the files in `directory` say.

    These are templates, prompts, added tokens and the maximum of new tokens.

    What the configuration has already stays. Without `tokens` it is that of an adapter whose added tokens the base has.
    Raises InvalidRequestError if there is no adapter, or a file beside it is broken.
    """
    if why := why_no_adapter(directory):
        raise InvalidRequestError(f"{directory} {why}", field="directory")
    config = (directory / CONFIG_FILE).read_bytes()
    try:
        fields = json.loads(config)
    except (ValueError, RecursionError):
        return config
    if not isinstance(fields, dict):
        return config
    more: dict[str, Any] = {}
    chat = fields.get(CHAT_FIELD, {})
    if isinstance(chat, dict) and "template" not in chat and (templates := _templates(directory)):
        more[CHAT_FIELD] = {**chat, **templates}
    if tokens and TOKENS_FIELD not in fields and (added := _added_tokens(directory)):
        more[TOKENS_FIELD] = added
    if MAX_TOKENS_FIELD not in fields and (most := _json_object(directory / GENERATION_FILE).get("max_new_tokens")):
        more[MAX_TOKENS_FIELD] = most
    if PROMPTS_FIELD not in fields and (directory / PROMPTS_FILE).is_file():
        more[PROMPTS_FIELD] = read_prompts(directory / PROMPTS_FILE)
    return json.dumps({**fields, **more}).encode() if more else config


def template_file(directory: Path) -> str:
    """Return the name of the file beside an adapter that has its chat template; empty: none has."""
    if not _templates(directory):
        return ""
    beside = (name for name in (TEMPLATE_FILE, *_TOOL_TEMPLATE_PATHS) if (directory / name).is_file())
    return next(beside, TOKENIZER_CONFIG_FILE)


def _templates(directory: Path) -> dict[str, str]:
    """Return an adapter's chat template, and the one for chats with tools, as transformers finds them."""
    sources = _json_object(directory / TOKENIZER_CONFIG_FILE).get("chat_template")
    if (directory / TEMPLATE_FILE).is_file():
        sources = (directory / TEMPLATE_FILE).read_text(encoding="utf-8")
    named: dict[Any, Any] = {"default": sources}
    if isinstance(sources, list):  # several templates, by name
        named = {one.get("name"): one.get("template") for one in sources if isinstance(one, dict)}
    if path := next((path for path in map(directory.joinpath, _TOOL_TEMPLATE_PATHS) if path.is_file()), None):
        named["tool_use"] = path.read_text(encoding="utf-8")
    found = {field: named.get(name) for name, field in (("default", "template"), ("tool_use", "tool_template"))}
    return {field: text for field, text in found.items() if isinstance(text, str) and text}


def _added_tokens(directory: Path) -> list[dict[str, Any]]:
    """Return the added tokens of an adapter's tokenizer, those of the base's too; flags that are false are left out.

    Raises InvalidRequestError.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        added = _json_object(directory / ADDED_TOKENS_FILE)
        return [{"id": number, "content": text, "normalized": True} for text, number in added.items()]
    with path.open("rb") as file:
        beginning = file.read(_ADDED_BYTES).decode("utf-8", "replace")
    found = _ADDED_TOKENS.search(beginning)
    if found is None:
        return []
    try:
        tokens, _ = json.JSONDecoder().raw_decode(beginning, found.end())
        return [
            {"id": token["id"], "content": token["content"], **{flag: True for flag in _TOKEN_FLAGS if token.get(flag)}}
            for token in tokens
        ]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise InvalidRequestError(
            f"{path}: added_tokens cannot be read: {type(error).__name__}", field="directory"
        ) from error


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_prompts(path: Path) -> list[str | dict[str, Any]]:
    """Return the prompts of a file: a text, or an object with `prompt` or `messages`, and `answer` where it has one.

    Raises InvalidRequestError that names a line that is none.
    """
    return [_prompt(path, number, line) for number, line in enumerate(path.read_bytes().splitlines(), start=1)]


def _prompt(path: Path, number: int, line: bytes) -> str | dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or (fields.get("prompt") is None) == (fields.get("messages") is None):
        shown = '{"prompt": "Dear customer,"} or {"messages": [...], "answer": "yes"}'
        raise InvalidRequestError(f"{path}: line {number} is not a JSON object such as {shown}", field="directory")
    # Other keys are a data set's own.
    prompt = {name: fields[name] for name in ("prompt", "messages", "answer") if fields.get(name) is not None}
    return prompt["prompt"] if prompt.keys() == {"prompt"} else prompt


def _header(name: str, base_model: str, alias: str, ttl_s: float | None) -> adapters_pb2.UploadHeader:
    header = adapters_pb2.UploadHeader(adapter=name, base_model=base_model, alias=alias)
    if ttl_s is not None:
        header.ttl.FromNanoseconds(round(ttl_s * 1e9))
    return header


def _upload_requests(
    header: adapters_pb2.UploadHeader, config: bytes, weights: Path, progress: Progress | None
) -> Iterator[adapters_pb2.UploadRevisionRequest]:
    sent, total = 0, len(config) + weights.stat().st_size
    yield adapters_pb2.UploadRevisionRequest(header=header)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with io.BytesIO(config) if name == CONFIG_FILE else weights.open("rb") as file:
            while data := file.read(CHUNK_BYTES):
                chunk = adapters_pb2.FileChunk(name=name, data=data)
                yield adapters_pb2.UploadRevisionRequest(chunk=chunk)
                sent += len(data)
                if progress is not None:
                    progress(sent, total)


def _piece_requests(
    header: adapters_pb2.UploadHeader, pieces: Iterable[Piece]
) -> Iterator[adapters_pb2.UploadRevisionRequest]:
    yield adapters_pb2.UploadRevisionRequest(header=header)
    for piece in pieces:
        yield from _chunk_requests(*piece)


async def _async_piece_requests(
    header: adapters_pb2.UploadHeader, pieces: AsyncIterable[Piece]
) -> AsyncIterator[adapters_pb2.UploadRevisionRequest]:
    yield adapters_pb2.UploadRevisionRequest(header=header)
    async for piece in pieces:
        for request in _chunk_requests(*piece):
            yield request


def _chunk_requests(name: str, data: bytes) -> Iterator[adapters_pb2.UploadRevisionRequest]:
    for start in range(0, max(len(data), 1), CHUNK_BYTES):  # An empty file needs a chunk too.
        chunk = adapters_pb2.FileChunk(name=name, data=data[start : start + CHUNK_BYTES])
        yield adapters_pb2.UploadRevisionRequest(chunk=chunk)


def _pushed(response: adapters_pb2.UploadRevisionResponse | adapters_pb2.ImportedRevision) -> Pushed:
    adapter, revision = resource_of(Adapter, response.adapter), resource_of(Revision, response.revision)
    return Pushed(adapter, revision, response.created, tuple(response.warnings))


class _Events:
    """The messages of an import or an export: the progress is told, and the last one kept."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._message: Any = None

    def take(self, message: Any) -> None:
        """Tell the progress."""
        self._message = message
        if message.WhichOneof("event") == "progress" and self._progress is not None:
            self._progress(message.progress.done_bytes, message.progress.total_bytes)

    def last(self, event: str) -> Any:
        """Return the event that ends a transfer. Raises DataLossError where the stream ended before it."""
        if self._message is None or self._message.WhichOneof("event") != event:
            raise DataLossError("the store ended the call without its result", kind="revision", name="")
        return getattr(self._message, event)


def _register_requests(
    header: adapters_pb2.RegisterBaseModelRequest, files: Mapping[str, bytes]
) -> Iterator[adapters_pb2.RegisterBaseModelRequest]:
    yield header
    for name, content in sorted(files.items()):
        for start in range(0, max(len(content), 1), CHUNK_BYTES):  # An empty file needs a chunk too.
            chunk = adapters_pb2.FileChunk(name=name, data=content[start : start + CHUNK_BYTES])
            yield adapters_pb2.RegisterBaseModelRequest(chunk=chunk)


class _Incoming:
    """Files being downloaded, under temporary names until all of them are complete."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts: dict[str, Path] = {}
        self._revision: Revision | None = None

    def take(self, response: adapters_pb2.DownloadRevisionResponse) -> None:
        """Keep a message's description, or append its chunk to its file."""
        if response.WhichOneof("part") == "revision":
            self._revision = resource_of(Revision, response.revision)
            return
        name = response.chunk.name
        if name not in (CONFIG_FILE, WEIGHTS_FILE):  # A path could lead out of the directory.
            raise DataLossError(f"the store sent a file of an unexpected name: {name!r}", kind="file", name=name)
        mode = "ab" if name in self._parts else "wb"
        part = self._parts.setdefault(name, self._directory / f"{name}.part")
        with part.open(mode) as file:
            file.write(response.chunk.data)

    def keep(self) -> Revision:
        """Rename the files to their final names."""
        if self._revision is None or len(self._parts) != 2:
            raise DataLossError("the store sent less than a revision: its description and two files")
        for name, part in self._parts.items():
            part.replace(self._directory / name)
        return self._revision

    def discard(self) -> None:
        """Remove the files that were not kept."""
        for part in self._parts.values():
            part.unlink(missing_ok=True)
