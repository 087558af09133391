"""Triton's interpreter, for programs that run kernels in it."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def replace_language_once() -> None:
    """Let the interpreter replace Triton's functions by its own once, and for good.

    It would do so at every call of a kernel and of each function of it, for a third of the time.
    """
    from triton.runtime import interpreter

    replace, done = interpreter._patch_lang, set()

    def once(function: Any) -> Any:
        # Those of the language's modules that the function sees.
        seen = frozenset(value.__name__ for value in function.__globals__.values() if isinstance(value, ModuleType))
        seen = frozenset(name for name in seen if name.startswith("triton.language"))
        if seen not in done:
            replace(function)
            done.add(seen)
        return interpreter._LangPatchScope()  # which restores nothing

    interpreter._patch_lang = once
