"""The run of the JSON-Schema test suite, over a small suite in the same form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.json_schema_suite import DRAFT, Tally, check_suite, page


def test_cases_are_enforced_refused_left_out_or_wrong(tmp_path: Path) -> None:
    (tmp_path / DRAFT).mkdir(parents=True)
    names = {"properties": {"b": {"type": "integer"}, "a": {"enum": [1.0, "x"]}}, "required": ["a"]}
    groups: dict[str, list[tuple[Any, list[tuple[Any, bool]]]]] = {
        "properties": [
            (names, [({"a": 1, "b": 2.0}, True), ({"b": 2}, False), ({"a": "x", "c": [1]}, True), ({"a": 2}, False)]),
            ({"unevaluatedProperties": False}, [({}, True), ({"a": 1}, False)]),
        ],
        # Wrong expectations on purpose: a forbidden value taken for valid, and the reverse.
        "format": [({"type": "string", "format": "date"}, [("2026-02-30", True), ("2026-02-28", False)])],
    }
    for name, schemas in groups.items():
        cases = [
            {
                "description": "some",
                "schema": schema,
                "tests": [{"description": "a case", "data": data, "valid": valid} for data, valid in tests],
            }
            for schema, tests in schemas
        ]
        (tmp_path / DRAFT / f"{name}.json").write_text(json.dumps(cases))
    tallies = check_suite(tmp_path)
    counts = {name: (t.enforced, t.refused, len(t.left_out), len(t.wrong)) for name, t in tallies.items()}
    assert counts == {"properties": (4, 2, 0, 0), "format": (0, 0, 1, 1)}
    written = page(tallies | {"const": Tally(enforced=3), "not": Tally(refused=2)})
    assert "Of 13 cases **7 are enforced, 4 refused, 1 left out, 1 wrong**." in written
