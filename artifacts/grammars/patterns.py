"""Patterns of JSON schemas, which are regular expressions of ECMA-262, in the syntax of llguidance's (Rust's)."""

from __future__ import annotations

import re

# Rust's whitespace has the character U+0085, and lacks the zero-width one.
_SPACE = r"[[\s&&[^\x85]]\x{FEFF}]"
_NO_SPACE = r"[^[\s&&[^\x85]]\x{FEFF}]"
_NO_LINE_END = r"[^\n\r\x{2028}\x{2029}]"
# Signs that are letters of a class in ECMA-262, and begin a class or an operation on classes in Rust.
_SIGNS_IN_CLASS = "[&~"
_STEP = re.compile(r"\\(?:u\{[0-9A-Fa-f]+\}|.)|.", re.DOTALL)


def rust_pattern(pattern: str) -> str:
    """Return a pattern that means in Rust what this one means in ECMA-262."""
    translated = []
    in_class = False
    before = ""
    for step in _STEP.findall(pattern):
        now = _step(step, before, in_class=in_class)
        if not in_class and step == "[":
            in_class = True
        elif in_class and step == "]":
            in_class = False
        translated.append(now)
        before = step
    return "".join(translated)


def _step(step: str, before: str, *, in_class: bool) -> str:
    if step == r"\s":
        return _SPACE
    if step == r"\S":
        return _NO_SPACE
    if in_class:
        return f"\\{step}" if step in _SIGNS_IN_CLASS or (step == before == "-") else step
    return _NO_LINE_END if step == "." else step
