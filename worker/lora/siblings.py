"""Linear layers that models call one after the other with the same input."""

from __future__ import annotations

from collections.abc import Iterable

_SHARING = (
    frozenset({"q_proj", "k_proj", "v_proj"}),
    frozenset({"gate_proj", "up_proj"}),
    frozenset({"w1", "w3"}),
    frozenset({"query", "key", "value"}),
)


def sibling_groups(names: Iterable[str]) -> list[list[str]]:
    """The names of layers, those together that are likely to share an input; who relies on it must look whether."""
    groups: dict[tuple[str, frozenset[str]], list[str]] = {}
    for name in names:
        parent, _, child = name.rpartition(".")
        sharing = next((names for names in _SHARING if child in names), frozenset({child}))
        groups.setdefault((parent, sharing), []).append(name)
    return list(groups.values())
