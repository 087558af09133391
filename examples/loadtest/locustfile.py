"""A user of locust that calls Generate over gRPC, with the stub that grpcio-tools makes of inference.proto.

pip install locust grpcio-tools
mkdir stubs
python -m grpc_tools.protoc -I protos --python_out=stubs --grpc_python_out=stubs loraplex/inference/v1/inference.proto
PYTHONPATH=stubs locust -f examples/loadtest/locustfile.py --headless --only-summary --host 127.0.0.1:50051 \
    --users 8 --spawn-rate 8 --requests 96 --answer-tokens 64
"""

# mypy: disable-error-code="misc, untyped-decorator"
# The types of locust, which is not installed where types are checked, are not known.

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import gevent
import grpc.experimental.gevent
from locust import User, events, task
from locust.exception import StopUser
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

grpc.experimental.gevent.init_gevent()

# Timeout of a call in seconds.
_TIMEOUT_S = 120.0
# Ids that prompts are drawn from: plain tokens of any vocabulary.
_IDS = range(300, 1000)
# Rows of locust's table. The content size of an answer is its number of tokens.
ANSWER, FIRST_TOKEN = "answer", "first token"
_first_tokens_ms: list[float] = []


class Caller(User):
    """A user who waits for each answer before the next request."""

    sent = 0
    ended = 0

    def on_start(self) -> None:
        """Connect to the router."""
        self.stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(self.environment.host))

    @task
    def generate(self) -> None:
        """Send a request and read its answer; the whole test ends with the last of --requests."""
        options = self.environment.parsed_options
        if options.requests and Caller.sent >= options.requests:
            raise StopUser
        Caller.sent += 1
        self._call(options)
        Caller.ended += 1
        if Caller.ended == options.requests:
            gevent.spawn(self.environment.runner.quit)  # which ends this user as well

    def _call(self, options: Any) -> None:
        ids = pb.TokenIds(ids=random.choices(_IDS, k=options.prompt_tokens))
        stopping = pb.Stopping(max_tokens=options.answer_tokens, ignore_eos=True)
        spec = pb.GenerateSpec(token_ids=ids, adapter=options.adapter, stopping=stopping)
        metadata = (("x-loraplex-tenant", options.tenant),)
        began, tokens, failure = time.perf_counter(), 0, None
        try:
            for answer in self.stub.Generate(pb.GenerateRequest(spec=spec), metadata=metadata, timeout=_TIMEOUT_S):
                count = len(answer.event.delta.token_ids)
                if count and not tokens:
                    self._report(FIRST_TOKEN, began)
                tokens += count
        except grpc.RpcError as error:
            failure = error
        self._report(ANSWER, began, tokens, failure)

    def _report(self, name: str, began: float, tokens: int = 0, failure: grpc.RpcError | None = None) -> None:
        self.environment.events.request.fire(
            request_type="grpc",
            name=name,
            response_time=(time.perf_counter() - began) * 1e3,
            response_length=tokens,
            exception=failure,
            context={},
        )


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    """Add the options of the requests to locust's own."""
    parser.add_argument("--requests", type=int, default=0, help="End after so many requests of all users")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="Length of each prompt")
    parser.add_argument("--answer-tokens", type=int, default=64, help="Length of each answer")
    parser.add_argument("--adapter", default="", help="Adapter to request")
    parser.add_argument("--tenant", default="default", help="Tenant, of a router that checks no credentials")


@events.request.add_listener
def note(name: str, response_time: float, **_others: Any) -> None:
    """Keep the times of first tokens: locust's table rounds times from 100 ms on to 10 ms."""
    if name == FIRST_TOKEN:
        _first_tokens_ms.append(response_time)


@events.quitting.add_listener
def summarize(environment: Any, **_others: Any) -> None:
    """Print what locust's table has not: tokens by time, and the exact median time to the first token."""
    answers = environment.stats.get(ANSWER, "grpc")
    if _first_tokens_ms:
        rate, tokens, median_ms = answers.total_rps, answers.avg_content_length, statistics.median(_first_tokens_ms)
        print(f"{rate:.3f} answers/s, {rate * tokens:.2f} tokens/s, first token after {median_ms:.2f} ms (median)")
