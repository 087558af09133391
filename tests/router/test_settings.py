"""RouterSettings of the router that are more than a number or a text."""

from __future__ import annotations

import pytest

from loraplex.router.settings import RouterSettings


def test_each_of_several_processes_has_ports_and_files_of_its_own() -> None:
    with pytest.raises(ValueError, match="--processes 0: at least 1"):
        RouterSettings(store="s", redis_url="r", processes=0)
    with pytest.raises(ValueError, match="--audit -: each process has a log of its own"):
        RouterSettings(store="s", redis_url="r", processes=2, audit="-")
    first = RouterSettings(
        store="s", redis_url="r", processes=3, relay_port=50053, metrics_port=9400, usage_file="/u/a.jsonl"
    )
    third = first.of_process(3)
    assert (third.port, third.relay_port, third.metrics_port) == (first.port, 50055, 9402)
    assert (third.operator_port, third.usage_file, third.audit) == (None, "/u/3-a.jsonl", "")
    chosen = RouterSettings(store="s", redis_url="r", processes=3, relay_port=0, metrics_port=-1)
    assert chosen.of_process(3) == chosen
    assert first.of_process(1) == first


@pytest.mark.parametrize("advertised", ["0.0.0.0", "router:50053", "10.0.0.1:50053", "::1"])
def test_an_address_that_no_worker_could_call_is_refused(advertised: str) -> None:
    with pytest.raises(ValueError, match="--relay-advertise"):
        RouterSettings(store="s", redis_url="r", relay_advertise=advertised)
    RouterSettings(store="s", redis_url="r", relay_advertise="[::1]")


def test_a_relay_beyond_this_machine_needs_credentials_or_the_flag() -> None:
    for host in ("10.0.0.5", "router.example", "0.0.0.0"):
        with pytest.raises(ValueError, match=f"--relay-host {host}: whoever reaches it .* could answer as a worker"):
            RouterSettings(store="s", redis_url="r", relay_host=host, relay_advertise="router")
        RouterSettings(store="s", redis_url="r", relay_host=host, relay_advertise="router", insecure_tenants=True)


def test_a_resume_key_that_is_too_short_is_refused_and_not_shown() -> None:
    short = "fifteen letters"
    for key, accepted in ((short, ""), ("", f"sixteen letters!,{short}")):
        with pytest.raises(ValueError, match=r"-keys?: a key of 15 characters; at least 16") as refused:
            RouterSettings(store="s", redis_url="r", resume_key=key, accepted_resume_keys=accepted)
        assert "letters" not in str(refused.value)


def test_only_an_engine_protocol_that_is_known_and_installed_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--engine-protocol trtllm: only sglang, vllm are known"):
        RouterSettings(store="s", redis_url="r", engine_protocol="sglang,trtllm")
    with pytest.raises(ValueError, match="--engine-tenant 'A B': not a tenant's name"):
        RouterSettings(store="s", redis_url="r", engine_tenant="A B")
    monkeypatch.setattr("loraplex.runtime.rpc.settings.find_spec", lambda module: None)
    with pytest.raises(ValueError, match="--engine-protocol sglang,vllm: needs the package smg-grpc-proto"):
        RouterSettings(store="s", redis_url="r", engine_protocol="sglang,vllm")


def test_the_use_of_generation_configs_is_auto_or_none() -> None:
    assert RouterSettings(store="s", redis_url="r").generation_config == "auto"
    with pytest.raises(ValueError, match="--generation-config vllm: give auto or none"):
        RouterSettings(store="s", redis_url="r", generation_config="vllm")


def test_the_collector_of_usage_events_is_a_url() -> None:
    url = "https://billing.example.com/events"
    assert RouterSettings(store="s", redis_url="r", usage_url=url).usage_url == url
    with pytest.raises(ValueError, match="--usage-url ftp://billing"):
        RouterSettings(store="s", redis_url="r", usage_url="ftp://billing.example.com")


def test_cells_are_checked_before_anything_is_asked() -> None:
    with pytest.raises(ValueError, match="--cells main: two cells have this name"):
        RouterSettings(store="s", redis_url="r", cells="main main")
    named = RouterSettings(store="s", redis_url="r", cells="main second=redis://h").cell_addresses
    assert [(cell.name, cell.url) for cell in named] == [("main", ""), ("second", "redis://h")]
