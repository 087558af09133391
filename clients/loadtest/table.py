"""Reading of a TOML table with every key accounted for, so that a typing error is an error and not a default."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn


class PlanError(ValueError):
    """Something in a load-test file, a trace, a flag or a report that can't be used: one line that names it."""


class Table:
    """A table of the file `source`, at `path` in it. Every method raises PlanError; `directory` anchors file names."""

    def __init__(self, values: Mapping[str, Any], source: str, directory: Path, path: str = "") -> None:
        self._left = dict(values)
        self._source = source
        self._path = path
        self._known: list[str] = []
        self.directory = directory

    def __contains__(self, key: str) -> bool:
        self._known.append(key)
        return key in self._left

    def fail(self, key: str, message: str) -> NoReturn:
        """Refuse the value of `key`."""
        raise PlanError(f"{self._source}: {self._path}{key}: {message}")

    def text(self, key: str, default: str | None = None, *, choices: Sequence[str] = ()) -> str:
        """A string, one of `choices` if there are any."""
        value = self._take(key, default)
        if not isinstance(value, str):
            self.fail(key, f"{value!r} is not a string")
        if choices and value not in choices:
            self.fail(key, f"{value!r} is none of {', '.join(choices)}")
        return value

    def number(
        self, key: str, default: float | None = None, *, above: float | None = None, least: float | None = None
    ) -> float:
        """A finite number, greater than `above`, and `least` at least."""
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.fail(key, f"{value!r} is not a number")
        if above is not None and value <= above:
            self.fail(key, f"{value:g} must be greater than {above:g}")
        if least is not None and value < least:
            self.fail(key, f"{value:g} must be at least {least:g}")
        return float(value)

    def whole(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """A whole number, `least` at least."""
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"{value!r} is not a whole number")
        if value < least:
            self.fail(key, f"{value} must be at least {least}")
        return value

    def share(self, key: str) -> float:
        """A number from 0 to 1."""
        value = self.number(key, least=0.0)
        if value > 1:
            self.fail(key, f"{value:g} must be at most 1")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings that is not empty."""
        value = self._take(key, None)
        if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
            self.fail(key, "give a list of strings")
        return tuple(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers above 0 that is not empty."""
        value = self._take(key, None)
        if not isinstance(value, list) or not value:
            self.fail(key, "give a list of numbers")
        for one in value:
            if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one) or one <= 0:
                self.fail(key, f"{one!r} must be a number greater than 0")
        return tuple(float(one) for one in value)

    def table(self, key: str) -> Table:
        """A table inside this one."""
        value = self._take(key, None)
        if not isinstance(value, Mapping):
            self.fail(key, f"{value!r} is not a table")
        return Table(value, self._source, self.directory, f"{self._path}{key}.")

    def tables(self, key: str) -> list[Table]:
        """A list of tables; none if the key is absent."""
        value = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
            self.fail(key, "give a list of tables")
        at = self._path + key
        return [Table(one, self._source, self.directory, f"{at}[{n}].") for n, one in enumerate(value, 1)]

    def whole_or_table(self, key: str) -> int | Table:
        """Either a whole number of at least 1 or a table."""
        return self.table(key) if isinstance(self._left.get(key), Mapping) else self.whole(key, least=1)

    def lines(self, key: str) -> list[tuple[str, str]]:
        """The lines of the file that `key` names, without empty ones and comments, each with `file:line`."""
        path = self.directory / self.text(key)
        try:
            content = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            self.fail(key, f"{path}: {getattr(error, 'strerror', None) or 'not text in UTF-8'}")
        rows = [
            (f"{path}:{number}", line.strip())
            for number, line in enumerate(content, 1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
        if not rows:
            self.fail(key, f"{path} is empty")
        return rows

    def finish(self) -> None:
        """Refuse what nobody has asked for."""
        for key in self._left:
            close = difflib.get_close_matches(key, self._known, n=1)
            known = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(self._known))}"
            self.fail(key, f"unknown key; {known}")

    def _take(self, key: str, default: Any) -> Any:
        self._known.append(key)
        value = self._left.pop(key, default)
        if value is None:
            self.fail(key, "is missing")
        return value
