"""Places outside the cluster that adapters are imported from and exported to: what they have, and who may use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loraplex.adapter_store.records import SourceFile
from loraplex.runtime.rpc.errors import Aborted, InvalidField, Mismatch, NotFound, Unavailable

# Size in bytes of the pieces that are read from a source.
PIECE_BYTES = 1 << 20
# Maximum number of files that a source may list.
MAX_FILES = 10_000


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a source at one moment; `pin` is the URI of this exact version, if the source has one."""

    pin: str
    files: tuple[SourceFile, ...]


class Source:
    """A place that has an adapter. Its calls block; they raise errors of a call, and Interrupted."""

    def list(self) -> Listing:
        """Return the files, with the versions that they have now."""
        raise NotImplementedError

    def pin(self, file: SourceFile) -> SourceFile:
        """Return a listed file with all that identifies its bytes; of most sources the list has said that."""
        return file

    def read(self, file: SourceFile, start: int) -> Iterator[bytes]:
        """Yield the pieces of a pinned file from byte `start` on. Raises Aborted if it has changed since."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections, if there are any."""


class Interrupted(Exception):
    """A source that broke off or did not answer: the same read may go on later. The message says what happened."""


def not_found(uri: str, what: str = "") -> NotFound:
    """Return the error of a source, or a revision or file of it, that is not there."""
    return NotFound("source", uri, hint=what)


def refused(uri: str, status: int) -> Mismatch:
    """Return the error of a source that does not let the store in."""
    message = f"{uri} refuses the store's credentials ({status}); an operator sets them in the file of --sources"
    return Mismatch("source", message, reason="SOURCE_REFUSED")


def broken(message: str) -> InvalidField:
    """Return the error of a source that says one thing and sends another, or sends what no source should."""
    return InvalidField("source", message, reason="SOURCE_BROKEN")


def down(message: str) -> Unavailable:
    """Return the error of a source that does not answer, or breaks off again and again."""
    return Unavailable(message, retry_after_s=30.0, reason="SOURCE_DOWN")


def changed(file: SourceFile, how: str) -> Aborted:
    """Return the error of a file that differs from its listing."""
    return Aborted(f"{file.path} has changed during the import: {how}; import again", reason="SOURCE_CHANGED")
