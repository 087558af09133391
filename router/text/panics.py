"""Panics of the tokenizers library as errors: no `except Exception` catches them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rpc.errors import Internal


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise Internal, reason TOKENIZER_FAILED, where the library panics."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        line = str(error).partition("\n")[0][:200]
        raise Internal(f"the model's tokenizer failed: {line}", reason="TOKENIZER_FAILED") from None
