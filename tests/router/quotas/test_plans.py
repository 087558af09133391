"""The plans of a router: whose limits a call has."""

from __future__ import annotations

from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.broker.messages import AdapterRef, WeightedRef
from loraplex.contracts.broker.terms import NO_KEY, KeyTerms
from loraplex.contracts.plans import Plan
from loraplex.router.quotas.plans import Plans
from loraplex.runtime.rpc.principal import CredentialKind, Principal, set_caller
from tests.plans_file import plans_in

FILE = """
[default]
requests_per_minute = 60
[tenants.acme]
tokens_per_day = 2_000_000
weight = 2.5
queue_share = 0.25
[tenants.globex]
[keys.k1]
tokens_per_day = 1_000
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "plans.toml"
    path.write_text(FILE)
    return path


def test_a_tenant_has_its_own_plan_or_the_default(path: Path) -> None:
    plans = plans_in(path)
    assert plans.of("acme") == Plan(tokens_per_day=2_000_000, weight=2.5, queue_share=0.25)
    assert plans.limits_of("acme") == {"tokens_per_day": 2_000_000}
    assert plans.limits_of("other") == {"requests_per_minute": 60}
    assert plans.limits_of("globex") == {}
    assert (plans.queue_share_of("acme"), plans.queue_share_of("other")) == (0.25, 0.5)
    assert plans.has_limits
    assert [plans.weight_of(tenant) for tenant in ("acme", "globex")] == [2.5, 1.0]
    assert not Plans().has_limits
    assert Plans().limits_of("acme") == {}


def test_a_call_must_fit_its_keys_plan_and_its_tenants(path: Path) -> None:
    plans = plans_in(path)
    assert [owner.name for owner in plans.owners("acme", "k1")] == ["keys/k1", "tenants/acme"]
    assert [owner.name for owner in plans.owners("acme", "k2")] == ["tenants/acme"]
    assert plans.limits_of("keys/k1") == {"tokens_per_day": 1_000}
    assert plans.limits_of("keys/k2") == {}
    assert [plans.key_terms(key) for key in ("k1", "k2", "")] == [NO_KEY] * 3
    assert set(plans.accounts) == {"acme", "globex", "keys/k1"}


def test_the_default_model_is_the_keys_the_tenants_or_everybodys(path: Path) -> None:
    path.write_text(
        '[default]\ndefault_model = "large"\n[tenants.acme]\ndefault_model = "small"\n[tenants.globex]\nweight = 2\n'
        '[keys.k1]\ndefault_model = "Qwen/Qwen3-0.6B"\n[keys.k2]\nweight = 2\n'
    )
    plans = plans_in(path)
    defaults = dict[tuple[str, str], str]()
    for tenant, key in (("acme", "k1"), ("acme", "k2"), ("acme", ""), ("globex", ""), ("other", ""), ("", "")):
        context = copy_context()  # a caller that stays set would be that of every later test of the process
        context.run(set_caller, Principal("x", frozenset(), CredentialKind.API_KEY, tenant=tenant, key_id=key))
        defaults[tenant, key] = context.run(plans.default_model)
    assert list(defaults.values()) == ["Qwen/Qwen3-0.6B", "small", "small", "large", "large", "large"]
    assert plans.limits_of("acme") == {}


def _ref(*adapters: str) -> AdapterRef:
    """A reference to an adapter, or to a weighted set."""
    digest = "sha256:" + "0" * 64
    refs = [AdapterRef(f"tenants/{name}/revisions/{digest}", digest, 1, 1) for name in adapters]
    parts = tuple(WeightedRef(ref, 1) for ref in refs)
    return refs[0] if len(refs) == 1 else replace(refs[0], revision=digest, parts=parts)


def test_a_call_may_use_what_its_keys_plan_and_its_tenants_allow(path: Path) -> None:
    path.write_text(
        '[tenants.acme]\nallowed_models = ["Qwen/*", "tiny"]\n'
        'allowed_adapters = ["sales-*", "tenants/shared/adapters/x"]\n'
        '[keys.k1]\nallowed_models = ["tiny"]\n[keys.k2]\nallowed_adapters = ["-"]\n'
    )
    plans = plans_in(path)

    def refused(model: str, adapter: AdapterRef | None = None, key: str = "", tenant: str = "acme") -> str:
        context = copy_context()
        context.run(set_caller, Principal("x", frozenset(), CredentialKind.API_KEY, tenant=tenant, key_id=key))
        refusal = context.run(plans.refusal, model, adapter)
        return refusal.message if refusal else ""

    allowed: list[Any] = [
        ("Qwen/a",),
        ("tiny",),
        ("tiny", _ref("acme/adapters/sales-eu")),
        ("tiny", _ref("shared/adapters/x")),
    ]
    assert [refused(*one) for one in [*allowed, ("tiny", _ref("shared/adapters/sales-us"))]] == [""] * 5
    of_acme = "allowed_models of the plan of acme: Qwen/*, tiny"
    assert refused("large") == refused("large", key="k2") == f"large is not among {of_acme}"
    assert refused("Qwen/a", key="k1") == "Qwen/a is not among allowed_models of the plan of API key k1: tiny"
    sales = "allowed_adapters of the plan of acme: sales-*, tenants/shared/adapters/x"
    # The second: another tenant's, which it has granted; the third: the second part of a weighted set.
    for adapter in ("acme/adapters/support", "globex/adapters/sales-eu", "acme/adapters/x"):
        assert refused("tiny", _ref(adapter)) == f"tenants/{adapter} is not among {sales}"
        assert refused("tiny", _ref("acme/adapters/sales-eu", adapter)) == f"tenants/{adapter} is not among {sales}"
    assert refused("tiny", _ref("acme/adapters/sales-eu"), key="k2").endswith("plan of API key k2: -")
    assert refused("large", tenant="other") == refused("large", tenant="") == ""


def test_a_key_may_have_a_share_of_its_tenants_queue_and_a_weight(path: Path) -> None:
    path.write_text("[keys.k1]\nqueue_share = 0.5\n[keys.k2]\nweight = 3\n[keys.k3]\nweight = 2.5\nqueue_share = 0.1\n")
    plans = plans_in(path)
    terms = [KeyTerms("k1", 0.0, 0.5), KeyTerms("k2", 3.0, 1.0), KeyTerms("k3", 2.5, 0.1)]
    assert [plans.key_terms(key) for key in ("k1", "k2", "k3")] == terms
    assert not plans.has_limits
