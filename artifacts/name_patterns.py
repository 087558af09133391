"""Values by patterns of module names: peft's rank_pattern and alpha_pattern.

A pattern is a regular expression that matches a whole name, or its end after a dot; the first match counts (peft
`utils/other.py:get_pattern_key`). Tenants write the expressions, and Python's engine backtracks, so an expression that
could take long is refused: adapters use names, classes, and one or two quantifiers or groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from artifacts.errors import ArtifactError, MismatchError

# Maximum number of patterns, of those among them that are more than a name, and of a pattern's characters.
_MAX_PATTERNS = 4096
_MAX_EXPRESSIONS = 256
_MAX_LENGTH = 256
_NAME = re.compile(r"\^?(?:[A-Za-z0-9_-]|\\?\.)+\$?")
_ALLOWED = re.compile(r"(?:[A-Za-z0-9_.^$()|*+?\[\]-]|\\[.dw_-])+")
# Quantified groups and lookarounds: backtracking may take exponential time, and names do not need them.
_REFUSED = re.compile(r"\)[*+?]|\(\?")


@dataclass(frozen=True, slots=True)
class NamePatterns:
    """Compiled patterns and their values, in the order of the file."""

    entries: tuple[tuple[re.Pattern[str], float], ...]

    def value_of(self, module: str, default: float) -> float:
        """Return the value of the first pattern that matches the module's name."""
        return next((value for pattern, value in self.entries if pattern.match(module)), default)

    @property
    def anchored(self) -> bool:
        """Tell whether a pattern matches at the begin of a name alone."""
        return any("^" in pattern.pattern for pattern, _ in self.entries)

    @property
    def values(self) -> tuple[float, ...]:
        """Return all values, in the order of the file."""
        return tuple(value for _, value in self.entries)


def parse_name_patterns(field: str, patterns: Mapping[str, Any]) -> NamePatterns:
    """Compile patterns whose values the caller has checked. Raises ArtifactError, MismatchError."""
    if len(patterns) > _MAX_PATTERNS:
        raise MismatchError(field, f"has {len(patterns)} patterns; at most {_MAX_PATTERNS} are served")
    if sum(not _NAME.fullmatch(pattern) for pattern in patterns) > _MAX_EXPRESSIONS:
        raise MismatchError(field, f"has more than {_MAX_EXPRESSIONS} regular expressions; name the modules instead")
    return NamePatterns(tuple((_compile(field, pattern), value) for pattern, value in patterns.items()))


def _compile(field: str, pattern: str) -> re.Pattern[str]:
    shown = pattern if len(pattern) <= 80 else pattern[:80] + "..."
    costly = len(re.findall(r"[*+?(]", pattern)) > 2
    if len(pattern) > _MAX_LENGTH or costly or not _ALLOWED.fullmatch(pattern) or _REFUSED.search(pattern):
        raise MismatchError(
            field, f"the pattern {shown!r} is too complex; use module names, with two of '*', '+', '?', '(a|b)' at most"
        )
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        raise ArtifactError(field, f"{shown!r} is not a regular expression: {error}") from error
