from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from artifacts.digests import is_digest, sha256_bytes, sha256_file, sha256_json, weighted_digest


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


A, B = sha256_bytes(b"a"), sha256_bytes(b"b")


def test_a_weighted_sets_digest_depends_on_its_pairs_and_not_on_their_order() -> None:
    assert weighted_digest([(A, 0.5), (B, -1.0)]) == weighted_digest([(B, -1.0), (A, 0.5)])
    sets = [[(A, 0.5), (B, -1.0)], [(A, -1.0), (B, 0.5)], [(A, 0.5), (B, 1.0)], [(A, 0.5)], [(A, 1.0)], []]
    digests = {weighted_digest(parts) for parts in sets} | {A, B}
    assert len(digests) == len(sets) + 2


def test_a_weight_counts_as_the_wire_carries_it() -> None:
    assert weighted_digest([(A, 0.1)]) == weighted_digest([(A, 0.10000000149011612)])
    assert weighted_digest([(A, 1)]) == weighted_digest([(A, 1.0)])
    assert weighted_digest([(A, 0.1)]) == "sha256:ca620b3d7e94245dc96babe08c9ce81a25c79643714230f90f817a50b82b5d78", (
        "fixed for all time: raise the format number instead"
    )
    for weight in (float("nan"), float("inf"), 1e39):
        with pytest.raises(ValueError, match="not JSON compliant"):
            weighted_digest([(A, weight)])


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
