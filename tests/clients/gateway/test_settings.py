"""The gateway's settings: an address beyond this machine exposes neither tenants nor keys by accident."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.gateway.settings import GatewaySettings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"host": "0.0.0.0"}, "--insecure-tenants"),
        ({"host": "0.0.0.0", "ca": "ca.pem"}, "--insecure-http"),
        ({"host": "0.0.0.0", "ca": "ca.pem", "insecure_tenants": True}, "--insecure-http"),
        ({"tls_cert": "a.pem"}, "--tls-key"),
        ({"operator_router": "router:50061"}, "--operator-router router:50061: needs --ca"),
        ({"operator_store": "store:50062"}, "--operator-store store:50062: needs --ca"),
        ({"requests_limit": 0}, "--requests-limit 0: at least 1"),
        ({"host_names": "a.test,b.test:80"}, "--host-names b.test:80: a name alone"),
        ({"host_names": "https://a.test"}, "--host-names https://a.test: a name alone"),
        ({"port": 70_000}, "--port 70000: not a port"),
    ],
)
def test_what_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatewaySettings(**values)


def test_what_is_taken() -> None:
    GatewaySettings(host="0.0.0.0", insecure_tenants=True, host_names="a.test, localhost,fd00::1")
    GatewaySettings(host="0.0.0.0", ca="ca.pem", insecure_http=True)
    GatewaySettings(host="0.0.0.0", ca="ca.pem", tls_cert="a.pem", tls_key="a.key")
