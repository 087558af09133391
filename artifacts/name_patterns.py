"""Values by patterns of module names: peft's rank_pattern and alpha_pattern.

A pattern is a regular expression that matches a whole name, or its end after a dot; the first match counts (peft
`utils/other.py:get_pattern_key`). Tenants write the expressions, and Python's engine backtracks: the store evaluates
them once, in a child process that may be killed, and keeps names in their place. All others look names up.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
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
    """Patterns and their values, in the order of the file. `field` is the one that they stand in."""

    field: str
    entries: tuple[tuple[str, float], ...]
    # Place and value of each pattern, by the name that it is, without escapes; one of a whole name begins with ^.
    # None: a pattern is more than a name.
    _names: dict[str, tuple[int, float]] | None = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names: dict[str, tuple[int, float]] = {}
        for place, (pattern, value) in enumerate(self.entries):
            names.setdefault(pattern.replace("\\", "").removesuffix("$"), (place, value))
        plain = all(_NAME.fullmatch(pattern) for pattern, _ in self.entries)
        object.__setattr__(self, "_names", names if plain else None)

    @property
    def has_expressions(self) -> bool:
        """Tell whether a pattern is more than a name: `resolved` makes names of it."""
        return self._names is None

    def value_of(self, module: str, default: float) -> float:
        """Return the value of the first pattern that names the module. Raises MismatchError beside expressions."""
        if self._names is None:
            raise MismatchError(self.field, "has regular expressions; push the adapter again")
        tails = [module]
        while dot := tails[-1].find(".") + 1:
            tails.append(tails[-1][dot:])
        found = [self._names[name] for name in (f"^{module}", *tails) if name in self._names]
        return min(found)[1] if found else default

    def resolved(self, modules: Collection[str], default: float) -> NamePatterns:
        """Return patterns that are names and mean the same for these modules. Raises ArtifactError.

        This evaluates what a tenant wrote, which may take minutes: call it where the process may be killed.
        """
        compiled = [(_compile(self.field, pattern), value) for pattern, value in self.entries]
        values = {
            module: next((value for pattern, value in compiled if pattern.match(module)), default) for module in modules
        }
        # Of a name and the end of another the longer one comes first.
        ordered = sorted(values.items(), key=lambda item: (-len(item[0]), item[0]))
        names = NamePatterns(self.field, tuple(item for item in ordered if item[1] != default))
        if any(names.value_of(module, default) != value for module, value in values.items()):
            return NamePatterns(self.field, tuple(ordered))
        return names

    @property
    def anchored(self) -> bool:
        """Tell whether a pattern matches at the begin of a name alone."""
        return any("^" in pattern for pattern, _ in self.entries)

    @property
    def values(self) -> tuple[float, ...]:
        """Return all values, in the order of the file."""
        return tuple(value for _, value in self.entries)


def parse_name_patterns(field: str, patterns: Mapping[str, Any]) -> NamePatterns:
    """Read patterns whose values the caller has checked. Raises MismatchError."""
    if len(patterns) > _MAX_PATTERNS:
        raise MismatchError(field, f"has {len(patterns)} patterns; at most {_MAX_PATTERNS} are served")
    if sum(not _NAME.fullmatch(pattern) for pattern in patterns) > _MAX_EXPRESSIONS:
        raise MismatchError(field, f"has more than {_MAX_EXPRESSIONS} regular expressions; name the modules instead")
    for pattern in patterns:
        costly = len(re.findall(r"[*+?(]", pattern)) > 2
        if len(pattern) > _MAX_LENGTH or costly or not _ALLOWED.fullmatch(pattern) or _REFUSED.search(pattern):
            raise MismatchError(
                field,
                f"the pattern {_shown(pattern)!r} is too complex; "
                "use module names, with two of '*', '+', '?', '(a|b)' at most",
            )
    return NamePatterns(field, tuple(patterns.items()))


def _compile(field: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError) as error:
        raise ArtifactError(field, f"{_shown(pattern)!r} is not a regular expression: {error}") from error


def _shown(pattern: str) -> str:
    return pattern if len(pattern) <= 80 else pattern[:80] + "..."
