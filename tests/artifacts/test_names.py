from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import ArtifactError
from artifacts.names import (
    AdapterName,
    Reference,
    RevisionName,
    check_alias,
    check_base_name,
    check_tenant,
    parse_adapter_name,
    parse_reference,
    parse_revision_name,
)

DIGEST = "sha256:" + "ab" * 32
OWN_THEN_SHARED = (AdapterName("acme", "support"), AdapterName("shared", "support"))
parts = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)


@settings(max_examples=25)
@given(tenant=parts, adapter=parts)
def test_names_read_back_what_they_print(tenant: str, adapter: str) -> None:
    name = AdapterName(tenant, adapter)
    assert parse_adapter_name(str(name), "somebody") == name
    revision = RevisionName(tenant, adapter, DIGEST)
    assert parse_revision_name(str(revision)) == revision
    assert revision.adapter_name == name


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
        ("Support", "adapter"),
        ("-support", "adapter"),
        ("..", "adapter"),
        ("a" * 64, "adapter"),
        ("support@", "adapter"),
        ("support@Canary", "adapter"),
        ("support@sha256:12", "adapter"),
        ("support@a@b", "adapter"),
        ("tenants/acme/adapters/", "adapter"),
        ("tenants//adapters/x", "tenant"),
        ("tenants/acme/adapters/x/revisions/y", "adapter"),
        ("acme/support", "adapter"),
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
    assert (check_tenant("acme"), check_alias("v1.2"), check_base_name("Qwen2.5-0.5B")) == (
        "acme",
        "v1.2",
        "Qwen2.5-0.5B",
    )
    for check, bad in ((check_tenant, "a/b"), (check_alias, "-"), (check_base_name, "a/b"), (check_base_name, "")):
        with pytest.raises(ArtifactError):
            check(bad)
