"""The guard: one credential, the roles and scopes of the table, and tenants that only some may name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from loraplex.runtime.rpc.errors import CallError
from loraplex.runtime.rpc.principal import TENANT_KEY, CredentialKind, Principal, Role, Unauthenticated
from loraplex.runtime.tenancy.guard import Guard, HeaderReader, naming
from loraplex.runtime.tenancy.permissions import PERMISSIONS, Port

GENERATE = "/loraplex.inference.v1.InferenceService/Generate"
UPLOAD = "/loraplex.adapters.v1.AdapterService/UploadRevision"
LIST_MODELS = "/loraplex.inference.v1.InferenceService/ListModels"
LIST_ADAPTERS = "/loraplex.adapters.v1.AdapterService/ListAdapters"
LIST_JOBS = "/loraplex.cluster.v1.ClusterService/ListJobs"


class Fixed:
    """Finds the same principal in every call."""

    def __init__(self, principal: Principal | None) -> None:
        self.principal = principal

    def read(self, metadata: Any, auth_context: Any) -> Principal | None:
        """Return it."""
        return self.principal


def principal(*roles: Role, tenant: str = "", scopes: Sequence[str] = ()) -> Principal:
    """Return a caller with a key."""
    return Principal("k1", frozenset(roles), CredentialKind.API_KEY, tenant, "k1", frozenset(scopes))


def admit(who: Principal | None, port: Port, method: str, named: str = "") -> str:
    """Return the tenant of an admitted call, or the reason of a refusal."""
    guard = Guard([port], [Fixed(who)])
    metadata = ((TENANT_KEY, named),) if named else ()
    try:
        found = naming(guard.holder(metadata, {}), metadata)
        guard._check(found, PERMISSIONS[method])
    except CallError as error:
        return error.reason
    return found.tenant


USER, ADMIN = principal(Role.TENANT_USER, tenant="acme"), principal(Role.TENANT_ADMIN, tenant="acme")
TOKENIZER = principal(Role.TENANT_USER, tenant="acme", scopes=["tokenize"])
GENERATOR = principal(Role.TENANT_USER, tenant="acme", scopes=["generate"])
OPERATOR, AUDITOR, ROUTER = principal(Role.OPERATOR), principal(Role.AUDITOR), principal(Role.ROUTER)


@pytest.mark.parametrize(
    ("who", "port", "method", "named", "expected"),
    [
        (USER, Port.PUBLIC, GENERATE, "", "acme"),
        (USER, Port.PUBLIC, GENERATE, "acme", "acme"),
        (USER, Port.PUBLIC, GENERATE, "globex", "OTHER_TENANT"),
        (USER, Port.OPERATORS, GENERATE, "", "ROLE_NOT_PERMITTED"),
        (USER, Port.PUBLIC, UPLOAD, "", "ROLE_NOT_PERMITTED"),
        (ADMIN, Port.PUBLIC, UPLOAD, "", "acme"),
        (OPERATOR, Port.PUBLIC, UPLOAD, "globex", "ROLE_NOT_PERMITTED"),
        (OPERATOR, Port.OPERATORS, UPLOAD, "globex", "globex"),
        (OPERATOR, Port.PUBLIC, GENERATE, "globex", "ROLE_NOT_PERMITTED"),
        (AUDITOR, Port.OPERATORS, LIST_JOBS, "", ""),
        (AUDITOR, Port.OPERATORS, LIST_ADAPTERS, "globex", "globex"),
        (AUDITOR, Port.OPERATORS, UPLOAD, "globex", "ROLE_NOT_PERMITTED"),
        (ROUTER, Port.OPERATORS, UPLOAD, "acme", "ROLE_NOT_PERMITTED"),
        (
            TOKENIZER,
            Port.PUBLIC,
            GENERATE,
            "",
            "SCOPE_NOT_GRANTED",
        ),
        (GENERATOR, Port.PUBLIC, GENERATE, "", "acme"),
        (GENERATOR, Port.PUBLIC, LIST_MODELS, "", "acme"),
        (GENERATOR, Port.PUBLIC, LIST_ADAPTERS, "", "SCOPE_NOT_GRANTED"),
        (principal(Role.OPERATOR, Role.TENANT_USER), Port.PUBLIC, GENERATE, "globex", "CREDENTIAL_INVALID"),
        (None, Port.PUBLIC, GENERATE, "acme", "CREDENTIAL_MISSING"),
    ],
)
def test_the_table_decides(who: Principal | None, port: Port, method: str, named: str, expected: str) -> None:
    assert admit(who, port, method, named) == expected


def test_two_credentials_are_refused() -> None:
    with pytest.raises(Unauthenticated, match="two credentials"):
        Guard([Port.PUBLIC], [Fixed(USER), Fixed(ADMIN)]).holder((), {})


class Revoked:
    """Finds a credential that was right once."""

    def read(self, metadata: Any, auth_context: Any) -> Principal | None:
        """Refuse it."""
        raise Unauthenticated("revoked", reason="CREDENTIAL_REVOKED", holder=USER)


@pytest.mark.parametrize(
    ("readers", "named", "who", "reason"),
    [
        ([Fixed(AUDITOR)], "", AUDITOR, "ROLE_NOT_PERMITTED"),
        ([Fixed(USER)], "globex", USER, "OTHER_TENANT"),
        ([Fixed(USER), Fixed(ADMIN)], "", USER, "CREDENTIALS_DIFFER"),
        ([Revoked()], "", USER, "CREDENTIAL_REVOKED"),
        ([], "", None, "CREDENTIAL_MISSING"),
    ],
)
def test_a_refusal_is_told_with_the_caller(
    readers: Sequence[Any], named: str, who: Principal | None, reason: str
) -> None:
    told: list[tuple[str, Principal | None, str]] = []
    guard = Guard([Port.PUBLIC], readers, lambda *refusal: told.append((*refusal[:2], refusal[2].reason)))

    class Context:
        """The context of a call that may name a tenant."""

        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            """Return the tenant."""
            return ((TENANT_KEY, named),) if named else ()

        def auth_context(self) -> dict[str, Any]:
            """Return nothing."""
            return {}

        def peer(self) -> str:
            """Return an address."""
            return "ipv4:127.0.0.1:1"

    context: Any = Context()
    with pytest.raises(CallError):
        guard._admit(context, GENERATE, PERMISSIONS[GENERATE])
    assert told == [(GENERATE, who, reason)]


def test_lists_show_tenants_their_own_and_operators_everything() -> None:
    assert USER.sees_tenant("acme")
    assert not USER.sees_tenant("globex")
    assert OPERATOR.sees_tenant("globex")
    assert AUDITOR.sees_tenant("globex")
    assert not ROUTER.sees_tenant("globex")


@pytest.mark.parametrize("metadata", [((TENANT_KEY, "A/B"),), ((TENANT_KEY, "acme"), (TENANT_KEY, "globex"))])
def test_a_header_that_names_no_tenant_is_refused(metadata: Any) -> None:
    with pytest.raises(Unauthenticated):
        HeaderReader().read(metadata, {})


def test_without_credentials_the_header_may_do_everything() -> None:
    found = HeaderReader().read(((TENANT_KEY, "acme"),), {})
    assert (found.tenant, found.roles) == ("acme", frozenset(Role))
