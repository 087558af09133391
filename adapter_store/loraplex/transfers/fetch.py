"""Fetches an adapter from a source into an upload: chooses its files, reads them, and goes on where a source broke off.

What comes is anybody's: nothing is believed before the checks of every upload, and everything is bounded before it is
kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.adapter_store.receive import BESIDE_BYTES
from loraplex.adapter_store.records import Provenance, SourceFile
from loraplex.adapter_store.storage import Upload
from loraplex.adapter_store.validate import CONFIG_BYTES
from loraplex.contracts.artifacts.names import DIGEST_PREFIX
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.runtime.rpc.timed_http import OpenSockets
from loraplex.transfers.policy import Rule, SourceUri
from loraplex.transfers.sources import MAX_FILES, Interrupted, Listing, Source, broken, down
from loraplex_client.adapter_directory import FILES_BESIDE, TOOL_TEMPLATE_FILE

T = TypeVar("T")
_PICKLE = "adapter_model.bin"
# Maximum number of reads in a row that bring no byte, and the pause in seconds after the first of them.
_TRIES, _PAUSE_S = 5, 0.2


class Cancelled(Exception):
    """The import was cancelled, or its time is over."""


@dataclass(slots=True)
class Progress:
    """The progress of an import or export. One thread does the work, the loop reads the numbers, and may cancel it."""

    received: int = 0
    total: int = 0
    resumed: int = 0
    pin: str = ""
    warnings: list[str] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    sockets: OpenSockets = field(default_factory=OpenSockets)

    def cancel(self) -> None:
        """Cancel the transfer, also while it waits for a silent or slow source."""
        self.cancelled.set()
        self.sockets.cut()

    def to_pb(self) -> pb.TransferProgress:
        """Return the message of the numbers."""
        return pb.TransferProgress(done_bytes=self.received, total_bytes=self.total, resumed_bytes=self.resumed)

    def check(self) -> None:
        """Raise Cancelled if the import is to end."""
        if self.cancelled.is_set():
            raise Cancelled


class Fetched:
    """An upload that a source fills: with the same files it goes on where it ended, with others it begins anew."""

    def __init__(self, new_upload: Callable[[], Upload]) -> None:
        self._new_upload = new_upload
        self.upload = new_upload()
        self._files: dict[str, SourceFile] = {}

    def begin(self, files: dict[str, SourceFile]) -> None:
        """Say which files come."""
        if files != self._files and self.upload.sizes:
            self.upload.discard()
            self.upload = self._new_upload()
        self._files = files


def fetch(uri: SourceUri, rule: Rule, into: Fetched, max_weights: int, progress: Progress) -> Provenance:
    """Fetch the adapter's files; returns what is known of their origin. Blocks.

    Raises errors of a call, and Cancelled; after Cancelled and Unavailable the same call goes on with `into`.
    """
    source = _open(uri, rule, progress.sockets)
    try:
        listing = _repeated(source.list, progress)
        files = {
            name: _repeated(lambda file=file: source.pin(file), progress)  # type: ignore[misc]
            for name, file in _chosen(str(uri), listing, progress.warnings).items()
        }
        _check_sizes(str(uri), files, max_weights)
        into.begin(files)
        progress.pin, progress.total = listing.pin, sum(file.size for file in files.values())
        progress.received = progress.resumed = sum(into.upload.sizes.values())
        for name, file in files.items():
            _read(source, name, file, into.upload, progress)
        return Provenance(str(uri), listing.pin, tuple(files.values()))
    finally:
        source.close()
        progress.sockets.close()


def _open(uri: SourceUri, rule: Rule, sockets: OpenSockets) -> Source:
    # Imported late: a store that imports nothing starts without the libraries.
    match uri.scheme:
        case "hf":
            from loraplex.transfers.hub import HubRepository

            return HubRepository(uri, rule, sockets)
        case "oci":
            from loraplex.transfers.oci import Registry

            return Registry(uri, rule, sockets)
        case "file":
            from loraplex.transfers.folder import Folder

            return Folder(uri, rule)
    from loraplex.transfers.objects import ObjectFolder

    return ObjectFolder(uri, rule, sockets)


def _chosen(uri: str, listing: Listing, warnings: list[str]) -> dict[str, SourceFile]:
    """Return the adapter's files by name: those of the only folder that has a configuration, or of the uppermost one.

    Raises InvalidField that says which of several folders to give, and for a pickle alone.
    """
    if len(listing.files) > MAX_FILES:
        raise broken(f"{uri} has more than {MAX_FILES} files; give the adapter's own folder")
    at: dict[str, SourceFile] = {}
    for file in listing.files:
        if file.path in at:
            raise broken(f"{uri} lists {file.path} twice")
        at[file.path] = file
    folders = sorted(
        (path.removesuffix(CONFIG_FILE) for path in at if path.rpartition("/")[2] == CONFIG_FILE),
        key=lambda folder: (folder.count("/"), folder),
    )
    if not folders:
        raise broken(f"{uri} is not an adapter: it has no {CONFIG_FILE}")
    folder = folders[0]
    if folder and len(folders) > 1 and folders[1].count("/") == folder.count("/"):
        raise broken(f"{uri} has several adapters: give one of its folders, {folder[:-1]} or {folders[1][:-1]}")
    if folder + WEIGHTS_FILE not in at:
        if folder + _PICKLE in at:
            raise broken(
                f"{uri} has its weights in {_PICKLE}, a pickle, which may run code when it is read; "
                f"save them as {WEIGHTS_FILE} with model.save_pretrained(DIR)"
            )
        raise broken(f"{uri} is not an adapter: {folder or 'it'} has no {WEIGHTS_FILE}")
    if len(folders) > 1 or folder:
        others = f", not {folders[1][:-1]}" if len(folders) > 1 else ""
        warnings.append(f"the adapter of {folder[:-1] or 'the uppermost folder'} was taken{others}")
    if folder + _PICKLE in at:
        warnings.append(f"{_PICKLE} was left out: {WEIGHTS_FILE} was taken")
    chosen = {name: at[folder + name] for name in (CONFIG_FILE, *FILES_BESIDE, WEIGHTS_FILE) if folder + name in at}
    if (tools := f"{folder}additional_chat_templates/{TOOL_TEMPLATE_FILE}") in at:
        chosen.setdefault(TOOL_TEMPLATE_FILE, at[tools])
    return chosen


def _check_sizes(uri: str, files: Mapping[str, SourceFile], max_weights: int) -> None:
    for name, file in files.items():
        limit = (BESIDE_BYTES | {CONFIG_FILE: CONFIG_BYTES, WEIGHTS_FILE: max_weights})[name]
        if file.size > limit:
            raise broken(f"{uri}: {name} has {file.size} bytes; at most {limit} are accepted")


def _read(source: Source, name: str, file: SourceFile, upload: Upload, progress: Progress) -> None:
    """Read a file to its end, beginning where the upload has it. Raises Unavailable after too many broken reads."""
    failures = 0
    while (start := upload.sizes.get(name, 0)) < file.size or name not in upload.sizes:
        progress.check()
        try:
            upload.append(name, b"")  # An empty file is a file too.
            for piece in source.read(file, start):
                progress.check()
                if upload.sizes[name] + len(piece) > file.size:
                    raise broken(f"{file.path} is longer than the {file.size} bytes that its source lists")
                upload.append(name, piece)
                progress.received += len(piece)
            if upload.sizes[name] < file.size:
                raise Interrupted(f"it ended after {upload.sizes[name]} of {file.size} bytes")
        except Interrupted as error:
            failures = 1 if upload.sizes.get(name, 0) > start else failures + 1
            _pause(failures, f"{file.path}: {error}", progress)
    if file.sha256 and upload.digest(name) != DIGEST_PREFIX + file.sha256:
        raise broken(f"{file.path} does not have the bytes of the digest that its source lists")


def _repeated(ask: Callable[[], T], progress: Progress) -> T:
    failures = 0
    while True:
        progress.check()
        try:
            return ask()
        except Interrupted as error:
            failures += 1
            _pause(failures, str(error), progress)


def _pause(failures: int, message: str, progress: Progress) -> None:
    if failures >= _TRIES:
        raise down(f"the source does not answer or breaks off: {message}; the same import goes on later")
    if progress.cancelled.wait(_PAUSE_S * 2**failures):
        raise Cancelled
