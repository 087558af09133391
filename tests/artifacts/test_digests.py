from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from artifacts.digests import is_digest, sha256_bytes, sha256_file, sha256_json


def test_a_files_digest_is_its_bytes_digest(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    (tmp_path / "file").write_bytes(data)
    assert sha256_file(tmp_path / "file") == sha256_bytes(data) == "sha256:" + hashlib.sha256(data).hexdigest()


def test_json_digests_do_not_depend_on_the_order_of_keys() -> None:
    assert sha256_json({"a": 1, "b": {"c": 2, "d": "é"}}) == sha256_json({"b": {"d": "é", "c": 2}, "a": 1})
    assert sha256_json({"a": [1, 2]}) != sha256_json({"a": [2, 1]})


def test_json_digests_refuse_what_is_not_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        sha256_json({"a": float("nan")})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sha256:" + "0" * 64, True),
        ("sha256:" + "0" * 63, False),
        ("sha256:" + "A" * 64, False),
        ("0" * 64, False),
        ("sha256:" + "0" * 64 + "\n", False),
    ],
)
def test_what_a_digest_looks_like(text: str, expected: bool) -> None:
    assert is_digest(text) is expected
