"""The week of a tenant's administrator: keys, an adapter there and back, usage; what is not its own stays shut."""

from __future__ import annotations

import json
from pathlib import Path

from loraplex.gateway.app import serving
from loraplex.gateway.endpoint import GatewayMetrics
from tests.clients.gateway.test_sign_in import OWN, Http, gateway_settings, sign_in
from tests.weeks.conftest import Workplace, until


def adapter(directory: Path, weights: str) -> None:
    """Write an adapter that the hash model takes; other weights give other answers."""
    directory.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapter_model.safetensors").write_bytes(weights.encode())


def test_keys_are_made_listed_and_revoked(workplace: Workplace) -> None:
    admin = workplace.administrator("acme")
    admin.run("loraplex keys create --label ci --scope generate --ttl 90d --out ci.key")
    ci, ask = workplace.person("acme", admin.directory / "ci.key"), 'loraplex generate "Hello" --max-tokens 4'
    until(lambda: ci.tries(ask), "routers know the key")
    ci.refused("loraplex keys list", "role tenant-user may not call this")
    ci.refused("loraplex adapters list", "scope")
    listed = {key["label"]: key for key in admin.json("loraplex keys list")}
    assert {key["tenant"] for key in listed.values()} == {"acme"}
    assert listed["ci"]["scopes"] == ["generate"]
    admin.run(f"loraplex keys revoke {listed['ci']['key_id']}")
    until(lambda: not ci.tries(ask), "routers refuse the key")
    ci.refused('loraplex generate "Hello"', "the API key is revoked")

    admin.refused("loraplex keys create --role operator", "only operators make keys of role operator")
    admin.refused("loraplex keys create --tenant globex", "the credential is of tenant acme")
    admin.refused("loraplex keys list --tenant globex", "the credential is of tenant acme")
    (others,) = [key for key in workplace.operator.json("loraplex keys list --tenant globex") if key["label"] == "app"]
    admin.refused(f"loraplex keys revoke {others['key_id']}", "key not found")
    admin.refused(f"loraplex keys rotate {listed['admin']['key_id']}", "tenant-admin may not call this")


def test_an_adapter_goes_live_and_back_and_to_others(workplace: Workplace) -> None:
    admin, other = workplace.administrator("acme"), workplace.administrator("globex")
    ask = 'loraplex generate "Dear customer," --adapter support --max-tokens 8'
    for number in (1, 2):
        adapter(admin.directory / f"support-{number}", f"weights {number}")
    admin.run("loraplex adapters push ./support-1 --name support")
    first = admin.run(ask)
    assert first != admin.run('loraplex generate "Dear customer," --max-tokens 8'), "the adapter has its say"
    admin.run("loraplex adapters push ./support-2 --name support")
    until(lambda: admin.run(ask) != first, "the second revision is live")
    admin.run("loraplex adapters rollback support")
    until(lambda: admin.run(ask) == first, "the first revision is live again")
    assert len(admin.json("loraplex adapters show support")["revisions"]) == 2

    theirs = ask.replace("support", "tenants/acme/adapters/support")
    other.refused(theirs, "not found")
    other.refused("loraplex adapters show tenants/acme/adapters/support", "not found")
    admin.run("loraplex adapters grant support --to globex --ttl 30d")
    until(lambda: other.tries(theirs) == first, "the grant holds")
    assert "globex" in admin.run("loraplex adapters grants support")
    admin.run("loraplex adapters ungrant support --to globex")
    until(lambda: other.tries(theirs) != first, "the grant has ended")
    other.refused("loraplex adapters delete tenants/acme/adapters/support", "not found")
    assert "adapters" in admin.run("loraplex adapters push ./support-2 --name another", 1), "the plan has room for one"


def test_usage_is_seen_and_plans_are_the_operators(workplace: Workplace) -> None:
    admin = workplace.administrator("acme")
    admin.run('loraplex generate "Hello" --max-tokens 4')

    def used() -> int:
        (own,) = [one for one in admin.json("loraplex usage") if not one["key"]]
        assert (own["tenant"], own["counts"]["tokens_per_day"]["limit"]) == ("acme", 2_000_000)
        return int(own["counts"]["tokens_per_day"]["used"])

    until(used, "the store knows what was used")
    assert {plan["name"] for plan in admin.json("loraplex plans list")} == {"tenants/acme"}
    for line in (
        "loraplex plans set tenants/acme tokens_per_day=9000000",
        "loraplex plans delete tenants/acme",
        "loraplex tenants purge globex --yes --router ''",
    ):
        admin.refused(line, "tenant-admin may not call this")
    # Operators' own ports take no tenant.
    inside = workplace.person("acme", workplace.secured / "keys" / "acme-admin.key", operates=True)
    inside.refused("loraplex keys list", "tenant-admin may not call this")
    inside.refused("loraplex workers", "tenant-admin may not call this")


async def test_she_signs_in_on_the_page_without_a_key(workplace: Workplace, unused_tcp_port: int) -> None:
    lead = {"router": workplace.router, "store": workplace.store, "ca": str(workplace.secured / "ca.pem")}
    settings = gateway_settings(workplace.issuers, unused_tcp_port, **lead)
    async with (
        serving(settings, GatewayMetrics()) as (address, _),
        Http(base_url=f"http://{address}", headers=OWN) as browser,
    ):
        answer = await sign_in(browser, "guest", workplace.provider)
        assert answer.status_code == 403, "her groups have no rule"
        assert (await browser.get("/v1/usage")).status_code == 401
        answer = await sign_in(browser, "lee", workplace.provider)
        assert answer.status_code == 303, answer.text
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        chat = await browser.post("/v1/chat/completions", json=body, timeout=60)
        assert chat.json()["usage"]["completion_tokens"] == 4, chat.text
        used = (await browser.get("/v1/usage")).json()
        assert "acme" in json.dumps(used)
        assert "globex" not in json.dumps(used)
        assert (await browser.get("/cluster/state")).json().get("workers") in (None, []), "operators see that"
