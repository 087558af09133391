"""The text that the shipped model learns: the Python documentation that every Python installation carries.

Two sources, both under the PSF licence: ``pydoc_data.topics`` (the language reference behind ``help()``) and the
docstrings of the standard library. Nothing is downloaded, so anybody can train the model again.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import TypeAlias

SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "pydoc_data"})
COMPILED_MODULES = ("builtins", "itertools", "math", "time", "sys", "array", "zlib", "unicodedata", "select")
HELD_OUT_SHARE = 0.02

Documented: TypeAlias = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Document:
    """A piece of documentation: the dotted name that it explains, and its text."""

    name: str
    text: str


def load_documents(seed: int) -> tuple[list[Document], list[Document]]:
    """Return every distinct document, shuffled by `seed`, as (training, held out)."""
    by_text: dict[str, Document] = {}
    for document in (*_topics(), *_library_docstrings(), *_compiled_docstrings()):
        if len(document.text) >= 20:
            by_text.setdefault(document.text, document)
    documents = list(by_text.values())
    random.Random(seed).shuffle(documents)
    held_out = int(len(documents) * HELD_OUT_SHARE)
    return documents[held_out:], documents[:held_out]


def as_question(name: str) -> str:
    """Return the user's question about `name`; base model and adapters are trained with the same wording."""
    return f"What is {name}?"


def _topics() -> Iterator[Document]:
    """Yield the language reference, cut at its headings so that every section is a document."""
    for key, body in topics.items():
        sections = re.split(r"^(\S.*)\n[*=\-]{4,}\n", body, flags=re.MULTILINE)
        for title, text in zip(["", *sections[1::2]], sections[::2], strict=True):
            yield Document(_plain(title) or key, _flow(_plain(text)))


def _library_docstrings() -> Iterator[Document]:
    """Yield the docstrings of the standard library's Python files, read without importing them."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts) or relative.parts[0].startswith("config-"):
            continue
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield from _docstrings_in(tree, module)


def _docstrings_in(node: Documented, name: str) -> Iterator[Document]:
    text = ast.get_docstring(node)
    if text:
        yield Document(name, _flow(text))
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings_in(child, f"{name}.{child.name}")


def _compiled_docstrings() -> Iterator[Document]:
    """Yield the docstrings of objects written in C, mainly the built-in types, which no source file shows."""
    for module_name in COMPILED_MODULES:
        module = importlib.import_module(module_name)
        for name, member in sorted(vars(module).items()):
            if name.startswith("_"):
                continue
            yield from _documented(f"{module_name}.{name}", member)
            if inspect.isclass(member):
                for attribute, value in sorted(vars(member).items()):
                    yield from _documented(f"{name}.{attribute}", value)


def _documented(name: str, value: object) -> Iterator[Document]:
    text = getattr(value, "__doc__", None)
    if isinstance(text, str) and not isinstance(value, str | int | float | tuple):
        yield Document(name, _flow(inspect.cleandoc(text)))


def _plain(text: str) -> str:
    """Drop the quotes and stars around words outside code, so that prompts need no mark-up to match the text."""
    text = text.replace("\u2019", "'").replace("\u201c", '"').replace("\u201d", '"')
    return "\n".join(line if line.startswith("   ") else _unquoted(line) for line in text.split("\n")).strip()


def _unquoted(line: str) -> str:
    line = re.sub(r'"([A-Za-z_][\w.]*(?:\(\))?)"', r"\1", line)
    return re.sub(r"\*([A-Za-z_][\w ]*)\*", r"\1", line)


def _flow(text: str) -> str:
    """Join the lines of each hard-wrapped paragraph; leave code, tables and lists as they are."""
    blocks = re.split(r"\n\s*\n", text.expandtabs().strip("\n"))
    return "\n\n".join(_join(block) for block in blocks).strip()


def _join(block: str) -> str:
    lines = block.split("\n")
    wrapped = all(len(line) >= 50 for line in lines[:-1])
    same_indent = len({len(line) - len(line.lstrip()) for line in lines}) == 1
    looks_like_code = any(re.match(r"\s*(>>>|\.\.\.|[|+]|\S+ ?=)", line) for line in lines)
    if not wrapped or not same_indent or looks_like_code:
        return block
    return re.sub(r"(?<=[.:])  +", " ", " ".join(line.strip() for line in lines))
