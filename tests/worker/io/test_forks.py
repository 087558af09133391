"""An engine process is forked while the worker's gRPC calls are under way: gRPC does nothing then."""

from __future__ import annotations

import os
import subprocess
import sys

FORKS = """
import asyncio, loraplex.worker, grpc, uvloop

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def call():
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            while True:
                try:
                    await channel.unary_unary("/none")(b"")
                except grpc.aio.AioRpcError:
                    pass

    calls = [asyncio.create_task(call()) for _ in range(4)]
    for _ in range(20):
        child = await asyncio.create_subprocess_exec("/bin/sh", "-c", "true")
        assert await child.wait() == 0
    for task in calls:
        task.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await server.stop(None)

uvloop.run(main())
"""


def test_grpc_runs_no_handlers_in_a_forked_child() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run([sys.executable, "-c", FORKS], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fork" not in done.stderr  # it says so wherever it skips its handlers
