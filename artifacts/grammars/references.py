"""References in a JSON schema: each leads to a part of the same schema that has been checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from artifacts.grammars.errors import GrammarError

_START = "schema:"


class References:
    """The parts of a schema by their addresses, and its references; filled while a walk is inside of the parts."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._bases = [_START]
        # The path at which each address begins: of the schema, and of parts with an id or an anchor.
        self._begins: dict[str, str] = {_START: root}
        self._paths: set[str] = set()
        self._found: list[tuple[str, str, str]] = []

    @contextmanager
    def inside(self, part: Mapping[str, Any], path: str) -> Iterator[None]:
        """Note a part of the schema, and what it is called, while its own parts are walked."""
        self._paths.add(path)
        base = self._bases[-1]
        if isinstance(part.get("$id"), str):
            base = urldefrag(urljoin(base, part["$id"])).url or base
            self._begins.setdefault(base, path)
        if isinstance(part.get("$anchor"), str):
            self._begins.setdefault(f"{base}#{part['$anchor']}", path)
        self._bases.append(base)
        yield
        self._bases.pop()

    def add(self, reference: str, at: str) -> None:
        """Note a reference of the part that the walk is in."""
        self._found.append((reference, self._bases[-1], at))

    def check(self) -> None:
        """Raise GrammarError for a reference that leads out of the schema, or to what is not a part of it."""
        for reference, base, at in self._found:
            if self._target(reference, base) not in self._paths:
                raise GrammarError(at, f"{reference!r} is no part of this schema")

    def _target(self, reference: str, base: str) -> str | None:
        fragment = urldefrag(reference).fragment
        address = base if reference.startswith("#") or not reference else urldefrag(urljoin(base, reference)).url
        if fragment and not fragment.startswith("/"):
            return self._begins.get(f"{address}#{fragment}")
        path = self._begins.get(address)
        if path is None:
            return None
        for step in unquote(fragment).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            # A step into a list of schemas is an index.
            indexed = re.fullmatch("[0-9]+", name) and f"{path}[{name}]" in self._paths
            path = f"{path}[{name}]" if indexed else f"{path}.{name}"
        return path
