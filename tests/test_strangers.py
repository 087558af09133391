"""Every port and every outgoing call, with what bounds it: a new one needs its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = "adapter_store artifacts broker clients deploy files router rpc telemetry tenancy worker"
# Patterns of code that opens a port, and of code that makes calls over HTTP.
_PORT = (
    r"\.(add_insecure_port|add_secure_port|create_server|start_server|listen)\("
    r"|(HTTPServer|TCPServer|WSGIServer)\(|WSGIServer\)|\(uvicorn\.Server\)"
)
_CALL = r"^\s*(from|import) (urllib\.request|http\.client|httpx2|httpcore2|obstore|aiohttp|requests|huggingface_hub)\b"
PORTS = {
    "rpc/server.py": "deploy/edge/haproxy.cfg; options of gRPC, OneMessage",
    "telemetry/metrics.py": "BoundedServer: a time for the whole, the oldest of the address with most gives way",
    "clients/gateway/http_server.py": "deploy/edge/haproxy.cfg; a time for bodies and rests",
    "adapter_store/sources/http.py": "CheckedProxy: on loopback, for one library, cut by the transfer's end",
}
CALLS = {
    "rpc/timed_http.py": "timed_call: a time for the whole",
    "adapter_store/sources/http.py": "OpenSockets, cut by the transfer's end",
    "adapter_store/sources/oci.py": "OpenSockets, cut by the transfer's end",
    "adapter_store/sources/objects.py": "OpenSockets, cut by the transfer's end",
    "adapter_store/sources/hub.py": "OpenSockets, cut by the transfer's end; the library makes no calls",
    "adapter_store/webhooks.py": "timed_call; a thread of each webhook",
    "tenancy/json_web_tokens.py": "timed_call",
    "router/quotas/usage_sender.py": "timed_call",
    "adapter_store/bucket.py": "the operator's own bucket",
    "adapter_store/replica.py": "the operator's own bucket",
    "rpc/probe.py": "a probe of Kubernetes, which ends it",
    "clients/loadtest/http_sender.py": "a load test's own target",
}


@pytest.mark.parametrize(("pattern", "bounded"), [(_PORT, PORTS), (_CALL, CALLS)], ids=["ports", "calls"])
def test_every_port_and_outgoing_call_has_a_bound(pattern: str, bounded: dict[str, str]) -> None:
    names = [name.relative_to(ROOT).as_posix() for room in ROOMS.split() for name in (ROOT / room).rglob("*.py")]
    found = {name for name in names if re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)}
    assert found == set(bounded)
