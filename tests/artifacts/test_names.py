from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.names import (
    AdapterName,
    Reference,
    RevisionName,
    check_alias,
    check_base_name,
    check_tenant,
    is_digest,
    parse_adapter_name,
    parse_reference,
    parse_revision_name,
    sha256_bytes,
    sha256_file,
    sha256_json,
    weighted_digest,
)

DIGEST = "sha256:" + "ab" * 32
OWN_THEN_SHARED = (AdapterName("acme", "support"), AdapterName("shared", "support"))
parts = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)
# Names as hubs have them; `tenants/` begins full names.
hub_names = st.from_regex(r"([A-Za-z0-9][A-Za-z0-9._-]{0,20}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,90}", fullmatch=True).filter(
    lambda name: not name.startswith("tenants/")
)


@settings(max_examples=25)
@given(tenant=parts, adapter=hub_names)
def test_names_read_back_what_they_print(tenant: str, adapter: str) -> None:
    name = AdapterName(tenant, adapter)
    assert parse_adapter_name(str(name), "somebody") == name
    revision = RevisionName(tenant, adapter, DIGEST)
    assert parse_revision_name(str(revision)) == revision
    assert revision.adapter_name == name
    assert parse_adapter_name(adapter, tenant) == name
    assert check_base_name(adapter) == adapter


@given(text=st.text(max_size=80))
def test_any_text_is_a_reference_or_one_clear_error(text: str) -> None:
    try:
        reference = parse_reference(text, "acme")
    except ArtifactError as error:
        assert "\n" not in str(error)  # noqa: PT017  # one of two good outcomes
    else:
        assert reference.candidates


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("support", Reference(OWN_THEN_SHARED, "live", None)),
        ("support@canary", Reference(OWN_THEN_SHARED, "canary", None)),
        ("Org/X.1@v2", Reference((AdapterName("acme", "Org/X.1"), AdapterName("shared", "Org/X.1")), "v2", None)),
        ("tenants/acme/adapters/Org/x", Reference((AdapterName("acme", "Org/x"),), "live", None)),
        (f"support@{DIGEST}", Reference(OWN_THEN_SHARED, "live", DIGEST)),
        ("tenants/acme/adapters/support", Reference((AdapterName("acme", "support"),), "live", None)),
        ("tenants/globex/adapters/x@v2", Reference((AdapterName("globex", "x"),), "v2", None)),
        (f"tenants/shared/adapters/x@{DIGEST}", Reference((AdapterName("shared", "x"),), "live", DIGEST)),
    ],
)  # fmt: skip
def test_what_references_mean(text: str, expected: Reference) -> None:
    assert parse_reference(text, "acme") == expected


def test_the_shared_tenants_short_names_are_looked_for_once() -> None:
    assert parse_reference("support", "shared").candidates == (AdapterName("shared", "support"),)


@pytest.mark.parametrize(
    ("text", "subject"),
    [
        ("", "adapter"),
        ("Org/Support/x", "adapter"),
        ("/support", "adapter"),
        ("org/", "adapter"),
        ("tenants/x", "adapter"),
        ("-support", "adapter"),
        ("..", "adapter"),
        ("a" * 129, "adapter"),
        ("support@", "adapter"),
        ("support@Canary", "adapter"),
        ("support@sha256:12", "adapter"),
        ("support@a@b", "adapter"),
        ("tenants/acme/adapters/", "adapter"),
        ("tenants//adapters/x", "tenant"),
        ("tenants/acme/adapters/x/revisions/y", "adapter"),
        ("support\n", "adapter"),
    ],
)
def test_bad_references_name_what_is_wrong(text: str, subject: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        parse_reference(text, "acme")
    assert caught.value.subject == subject


def test_revision_names_need_a_digest() -> None:
    for text in ("support", "tenants/a/adapters/b", f"tenants/a/adapters/b/revisions/{DIGEST[:-1]}"):
        with pytest.raises(ArtifactError, match="revision"):
            parse_revision_name(text)


def test_tenants_aliases_and_base_models_have_rules_too() -> None:
    assert (check_tenant("acme"), check_alias("v1.2"), check_base_name("Qwen/Qwen3-0.6B")) == (
        "acme",
        "v1.2",
        "Qwen/Qwen3-0.6B",
    )
    for check, bad in ((check_tenant, "a/b"), (check_alias, "-"), (check_base_name, "a/b/c"), (check_base_name, "")):
        with pytest.raises(ArtifactError):
            check(bad)


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
