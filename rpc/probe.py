"""`python -m rpc.probe HOST:PORT`: a health check that exits 0 when the process there serves, else 1 with one line."""

from __future__ import annotations

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def main(argv: list[str]) -> int:
    """Ask grpc.health.v1 at the address once."""
    parser = argparse.ArgumentParser(prog="python -m rpc.probe", description="Exits 0 when the process there serves.")
    parser.add_argument("address", help="HOST:PORT")
    address = parser.parse_args(argv).address
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            print(f"error: {address} does not answer: {error.details()}", file=sys.stderr)
            return 1
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        print(f"error: {address} is not serving", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
