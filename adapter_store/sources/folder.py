"""Folders of the store's machine: file:///FOLDER, and snapshots of a hub's cache, whose files are links."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from adapter_store.sources import MAX_FILES, PIECE_BYTES, Listing, SourceFile, broken, changed, not_found
from adapter_store.sources.policy import Rule, SourceUri


class Folder:
    """A source that is a folder. A link is followed only from a snapshot of a hub's cache to the cache's own blobs."""

    def __init__(self, uri: SourceUri, rule: Rule) -> None:
        self._uri = str(uri)
        self._root = Path("/") / uri.path
        # models--ORG--REPO/snapshots/COMMIT/FILE is a link to models--ORG--REPO/blobs/DIGEST.
        self._blobs: Path | None = None
        for folder in (self._root, *self._root.parents):
            if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
                self._blobs = folder.parent.parent / "blobs"

    def list(self) -> Listing:
        """Return the files below the folder."""
        if self._root.resolve() != self._root:
            raise broken(f"{self._uri}: a link is in the way; give the folder itself")
        if not self._root.is_dir():
            raise not_found(self._uri, "the store's machine has no such folder")
        files: list[SourceFile] = []
        for parent, folders, names in os.walk(self._root):
            folders.sort()
            linked = [name for name in folders if Path(parent, name).is_symlink()]
            for name in sorted([*names, *linked]):
                path = Path(parent, name)
                status = self._target(path).stat()
                relative = path.relative_to(self._root).as_posix()
                files.append(SourceFile(relative, status.st_size, etag=f"{status.st_mtime_ns}-{status.st_ino}"))
            if len(files) > MAX_FILES:
                break
        return Listing(self._uri, tuple(files))

    def pin(self, file: SourceFile) -> SourceFile:
        """Return the file: its time and inode say whether it has changed."""
        return file

    def read(self, file: SourceFile, start: int) -> Iterator[bytes]:
        """Yield the file's bytes."""
        try:
            descriptor = os.open(self._target(self._root / file.path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise not_found(self._uri, f"{file.path}: {error.strerror}") from error
        with open(descriptor, "rb") as opened:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise broken(f"{self._uri}: {file.path} is not a file")
            if (status.st_size, f"{status.st_mtime_ns}-{status.st_ino}") != (file.size, file.etag):
                raise changed(file, "the folder has another file of its name")
            opened.seek(start)
            while piece := opened.read(PIECE_BYTES):
                yield piece

    def close(self) -> None:
        """Do nothing: no connection is open."""

    def _target(self, path: Path) -> Path:
        """Return the file that a path means. Raises InvalidField for a link that may not be followed."""
        if not path.is_symlink():
            return path
        target = Path(os.path.normpath(path.parent / path.readlink()))
        if self._blobs is None or target.parent != self._blobs or target.is_symlink() or not target.is_file():
            raise broken(f"{self._uri}: {path.name} is a symbolic link, and links are not followed; copy what it names")
        return target
