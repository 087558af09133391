"""Folders of the store's machine: file:///FOLDER, and snapshots of a hub's cache, whose files are links."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loraplex.adapter_store.records import SourceFile
from loraplex.transfers.policy import Rule, SourceUri
from loraplex.transfers.sources import MAX_FILES, PIECE_BYTES, Listing, Source, broken, changed, not_found

# A folder on the way to a file is opened without the right to list it, where the system can.
_ON_THE_WAY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW
# Maximum depth of a source's folders: each has a descriptor open while those below it are listed.
_DEPTH = 32


class Folder(Source):
    """A source that is a folder. A link is followed only from a snapshot of a hub's cache to the cache's own blobs.

    Whoever writes into the folder may exchange its parts meanwhile: each part of a path is opened within the one before
    it and never through a link, so that a file is where its path says, below the rule's prefix.
    """

    def __init__(self, uri: SourceUri, rule: Rule) -> None:
        self._uri = str(uri)
        self._root, self._prefix = Path("/", uri.path), Path("/", rule.prefix.path)
        # models--ORG--REPO/snapshots/COMMIT/FILE is a link to models--ORG--REPO/blobs/DIGEST.
        self._blobs: Path | None = None
        for folder in (self._root, *self._root.parents):
            if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
                self._blobs = folder.parent.parent / "blobs"

    def list(self) -> Listing:
        """Return the files below the folder."""
        files: list[SourceFile] = []
        with self._opened(self._root) as root:
            for parent, folders, names, descriptor in os.fwalk(dir_fd=root):
                folders.sort()
                for name in sorted([*folders, *names]):
                    path = self._root / parent / name
                    status = self._status(path, os.lstat(name, dir_fd=descriptor))
                    if not stat.S_ISDIR(status.st_mode):
                        relative = path.relative_to(self._root).as_posix()
                        files.append(SourceFile(relative, status.st_size, _etag(status)))
                if parent.count(os.sep) > _DEPTH:
                    raise broken(f"{self._uri} has folders more than {_DEPTH} deep; give the adapter's own folder")
                if len(files) > MAX_FILES:
                    break
        return Listing(self._uri, tuple(files))

    def read(self, file: SourceFile, start: int) -> Iterator[bytes]:
        """Yield the file's bytes."""
        with self._opened(self._root / file.path) as descriptor, open(descriptor, "rb", closefd=False) as opened:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise broken(f"{self._uri}: {file.path} is not a file")
            if (status.st_size, _etag(status)) != (file.size, file.etag):
                raise changed(file, "the folder has another file of its name")
            opened.seek(start)
            while piece := opened.read(PIECE_BYTES):
                yield piece

    @contextmanager
    def _opened(self, path: Path, *, linked: bool = False) -> Iterator[int]:
        """Open a file or folder, or the blob that a link of a snapshot names.

        Raises NotFound, and InvalidField for a link that may not be followed.
        """
        descriptor = os.open("/", _ON_THE_WAY)
        try:
            for part in path.parent.parts[1:]:
                above, descriptor = descriptor, os.open(part, _ON_THE_WAY, dir_fd=descriptor)
                os.close(above)
            if stat.S_ISLNK(os.lstat(path.name, dir_fd=descriptor).st_mode):
                target = Path(os.path.normpath(path.parent / os.readlink(path.name, dir_fd=descriptor)))
                if linked or target.parent != self._blobs or not target.is_relative_to(self._prefix):
                    raise self._is_link(path)
                with self._opened(target, linked=True) as blob:
                    yield blob
            else:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
                above, descriptor = descriptor, os.open(path.name, flags, dir_fd=descriptor)
                os.close(above)
                yield descriptor
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                raise self._is_link(path) from error
            raise not_found(self._uri, f"{path}: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def _status(self, path: Path, status: os.stat_result) -> os.stat_result:
        """Return the status of the file that a path means, whose own status is given. Raises as `_opened` does."""
        if not stat.S_ISLNK(status.st_mode):
            return status
        with self._opened(path) as target:
            return os.fstat(target)

    def _is_link(self, path: Path) -> Exception:
        return broken(f"{self._uri}: {path.name} is or is below a link, and links are not followed; copy what it names")


def _etag(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns}-{status.st_ino}"
