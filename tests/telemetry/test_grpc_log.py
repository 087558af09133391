"""gRPC's C library writes no lines of its own among those of a process."""

from __future__ import annotations

import os
import subprocess
import sys

# A server tells its client to go away for an internal error, which gRPC logs.
CALL = """
import socket, threading
import loraplex.__main__
import grpc

listening = socket.create_server(("127.0.0.1", 0))
address = f"127.0.0.1:{listening.getsockname()[1]}"

def serve():
    connection, _ = listening.accept()
    listening.close()
    connection.recv(100)
    connection.sendall(b"\\0\\0\\0\\4\\0\\0\\0\\0\\0" + b"\\0\\0\\x08\\7\\0\\0\\0\\0\\0" + b"\\0\\0\\0\\0\\0\\0\\0\\2")
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(100):
        pass

threading.Thread(target=serve, daemon=True).start()
with grpc.insecure_channel(address) as channel:
    try:
        channel.unary_unary("/a/b")(b"", timeout=5)
    except grpc.RpcError:
        print("failed")
"""


def test_what_breaks_a_connection_is_told_by_its_status_alone() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run([sys.executable, "-c", CALL], env=environ, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("failed\n", "")
