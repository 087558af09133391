"""HAProxy with deploy/edge/haproxy.cfg, as chart and compose.yaml run it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from loraplex.cli.development_ca import DevelopmentCa
from tests.credentials_files import CA, write_tls_files
from tests.debian_program import debian_program

EDGE = Path(__file__).parents[1] / "deploy/edge"


def write_edge_files(directory: Path, ca: DevelopmentCa = CA) -> Path:
    """Write the proxy's certificate, and its key beside it, as the chart mounts them; return the certificate's path."""
    cert, key, _ = write_tls_files(directory, "loraplex://router/edge", ca)
    key.replace(directory / "edge.pem.key")
    return cert.replace(directory / "edge.pem")


@asynccontextmanager
async def edge_proxy(
    config: Path = EDGE / "haproxy.cfg", /, **variables: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the proxy with these variables, until it is stopped at once. It may not listen yet."""
    program = debian_program("haproxy")
    environ = os.environ | {"EDGE_SLOTS": "1", "EDGE_LOOK_S": "0.1", "HAPROXY": program} | variables
    command = ("sh", str(EDGE / "run.sh")) if "EDGE_CERT" in variables else (program, "-f")
    proxy = await asyncio.create_subprocess_exec(*command, str(config), env=environ, process_group=0)
    try:
        yield proxy
    finally:
        if proxy.returncode is None:
            os.killpg(proxy.pid, signal.SIGTERM)  # run.sh alone would let calls end first
        await proxy.wait()


async def listening(port: int) -> None:
    """Wait until something listens on a port of this machine."""
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return
