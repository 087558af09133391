"""Triton's interpreter, for programs that run kernels in it."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any


def interpret_quickly() -> None:
    """Leave out what Triton's interpreter does again and again, or for nothing; results stay the same bits."""
    from triton.runtime import interpreter

    _replace_language_once(interpreter)
    # Sums and products of integers are computed once more in 64 bits, and the outcome is dropped: only `debug` asserts.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    look_up, found = interpreter._get_np_dtype, dict[str, Any]()

    def dtype_of(kind: Any) -> Any:
        scalar = kind.scalar
        if scalar.name not in found:
            found[scalar.name] = look_up(scalar)  # which makes a table of all types
        return found[scalar.name]

    interpreter._get_np_dtype = dtype_of


def _replace_language_once(interpreter: Any) -> None:
    """Let the interpreter replace Triton's functions by its own once, and for good.

    It would do so at every call of a kernel and of each function of it, for a third of the time.
    """
    patch, done, seen = interpreter._patch_lang, set(), set()

    def once(function: Any) -> Any:
        if function not in seen:
            seen.add(function)
            # Those of the language's modules that the function sees.
            modules = (value.__name__ for value in function.__globals__.values() if isinstance(value, ModuleType))
            names = frozenset(name for name in modules if name.startswith("triton.language"))
            if names not in done:
                patch(function)
                done.add(names)
        return interpreter._LangPatchScope()  # which restores nothing

    interpreter._patch_lang = once
