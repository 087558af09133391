"""Every port and every outgoing call, with what bounds it: a new one needs its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = "adapter_store/loraplex clients/loraplex loraplex router/loraplex worker/loraplex"
# Patterns of code that opens a port, and of code that makes calls over HTTP.
_PORT = (
    r"\.(add_insecure_port|add_secure_port|create_server|start_server|listen)\("
    r"|(HTTPServer|TCPServer|WSGIServer)\(|WSGIServer\)|\(uvicorn\.Server\)"
)
_CALL = r"^\s*(from|import) (urllib\.request|http\.client|httpx2|httpcore2|obstore|aiohttp|requests|huggingface_hub)\b"
PORTS = {
    "runtime/rpc/server.py": "deploy/edge/haproxy.cfg; options of gRPC, OneMessage",
    "runtime/telemetry/metrics.py": "BoundedServer: a time for the whole, the address with most loses its oldest",
    "gateway/http_server.py": "deploy/edge/haproxy.cfg; a time for bodies and rests",
    "transfers/http.py": "CheckedProxy: on loopback, for one library, cut by the transfer's end",
}
CALLS = {
    "runtime/rpc/timed_http.py": "timed_call: a time for the whole",
    "transfers/http.py": "OpenSockets, cut by the transfer's end",
    "transfers/oci.py": "OpenSockets, cut by the transfer's end",
    "transfers/objects.py": "OpenSockets, cut by the transfer's end",
    "transfers/hub.py": "OpenSockets, cut by the transfer's end; the library makes no calls",
    "releases/webhooks.py": "timed_call; a thread of each webhook",
    "issuers/signing_keys.py": "timed_call",
    "gateway/provider.py": "timed_call",
    "usage_events/sender.py": "timed_call",
    "adapter_store/bucket.py": "the operator's own bucket",
    "runtime/rpc/probe.py": "a probe of Kubernetes, which ends it",
    "loadtest/http_sender.py": "a load test's own target",
}


@pytest.mark.parametrize(("pattern", "bounded"), [(_PORT, PORTS), (_CALL, CALLS)], ids=["ports", "calls"])
def test_every_port_and_outgoing_call_has_a_bound(pattern: str, bounded: dict[str, str]) -> None:
    files = {
        file.relative_to(ROOT / room).as_posix(): file for room in ROOMS.split() for file in (ROOT / room).rglob("*.py")
    }
    found = {name for name, file in files.items() if re.search(pattern, file.read_text(), re.MULTILINE)}
    assert found == set(bounded)
