"""Generate with the stub that grpcio-tools makes of inference.proto, as a client in any language would.

python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. loraplex/inference/v1/inference.proto
python -m examples.raw_stub 127.0.0.1:50051 "Once upon a time"
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

TENANT = "acme"
# Timeout of a call in seconds: gRPC's own deadline, which the router and the worker see.
TIMEOUT_S = 60.0


def generate(address: str, prompt: str, max_tokens: int = 32) -> Iterator[str]:
    """Yield the answer's text as it comes. Raises grpc.RpcError."""
    spec = pb.GenerateSpec(prompt=prompt, stopping=pb.Stopping(max_tokens=max_tokens))
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        metadata = (("x-loraplex-tenant", TENANT),)
        for response in stub.Generate(pb.GenerateRequest(spec=spec), metadata=metadata, timeout=TIMEOUT_S):
            if response.event.HasField("delta"):
                yield response.event.delta.text


def explain(error: Any) -> str:
    """Return the status of a grpc.RpcError with its reason, and after how long to try again."""
    parts = [f"{error.code().name}: {error.details()}"]
    packed = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    for detail in status_pb2.Status.FromString(packed).details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            parts.append(f"reason {info.reason}")
        elif detail.Unpack(retry):
            parts.append(f"try again in {retry.retry_delay.ToMilliseconds() / 1e3:.1f} s")
    return ", ".join(parts)


def main() -> int:
    """Print an answer, or why there is none."""
    if len(sys.argv) != 3:
        print("usage: python -m examples.raw_stub HOST:PORT PROMPT", file=sys.stderr)
        return 2
    address, prompt = sys.argv[1:]
    try:
        for text in generate(address, prompt):
            print(text, end="", flush=True)
    except grpc.RpcError as error:
        print(explain(error), file=sys.stderr)
        return 1
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
