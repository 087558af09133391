from __future__ import annotations

import pytest

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.hash_model import HashModel, is_hash_spec, parse_hash_model


def test_defaults_and_values() -> None:
    assert parse_hash_model("hash:") == parse_hash_model("hash:?") == HashModel()
    spec = "hash:?vocab=600&step_ms=2.5&seed=9&end_after=3&context=128&die_on=0&hang_on=7&draft=0.5"
    expected = HashModel(vocab=600, step_ms=2.5, seed=9, end_after=3, context=128, die_on=0, hang_on=7, draft=0.5)
    assert parse_hash_model(spec) == expected


def test_specs_are_told_from_directories() -> None:
    assert is_hash_spec("hash:?seed=1")
    assert not is_hash_spec("./hash")


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("hash:?vocab=511", "vocab"),
        ("hash:?vocab=many", "vocab"),
        ("hash:?vocab=", "vocab"),
        ("hash:?vocab=99999999999", "vocab"),
        ("hash:?step_ms=-1", "step_ms"),
        ("hash:?step_ms=nan", "step_ms"),
        ("hash:?draft=1.5", "draft must be a number from 0 to 1"),
        ("hash:?context=1", "context"),
        ("hash:?die_on=", "die_on"),
        ("hash:?hang_on=-1", "hang_on"),
        ("hash:?sead=1", "'sead'"),
        ("hash:?seed=1&seed=2", "'seed' is given twice"),
        ("hash:?&", "''"),
        ("/models/llama", "hash:"),
    ],
)
def test_bad_specs_name_the_key(spec: str, named: str) -> None:
    with pytest.raises(ArtifactError, match=named):
        parse_hash_model(spec)


def test_the_manifest_says_when_answers_end_by_themselves() -> None:
    assert read_base_model("hash:?vocab=600").end_token_ids == ()
    base = read_base_model("hash:?vocab=600&end_after=3", name="oracle")
    assert (base.name, base.architecture, base.vocab_size, base.end_token_ids) == ("oracle", "hash", 600, (599,))


def test_the_digest_is_over_what_decides_the_tokens() -> None:
    digest = read_base_model("hash:?seed=1").digest
    assert digest == read_base_model("hash:?step_ms=5&seed=1&die_on=9&hang_on=9&draft=1").digest
    others = [read_base_model(f"hash:?{key}").digest for key in ("seed=2", "vocab=600", "end_after=1", "context=64")]
    assert len({digest, *others}) == 5
