"""A way to a router that is cut without a word: the client's pings find out, and the stream goes on elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

from loraplex.inference.v1 import inference_pb2

import loraplex_client as lx
from loraplex.runtime.rpc.server import _SERVER_OPTIONS
from loraplex_client.endpoint import CHANNEL_OPTIONS
from tests.trials.chaos.links import Link, Way

HANG = "hang"
Event = inference_pb2.GenerateEvent


async def test_a_stream_whose_link_is_frozen_goes_on_at_the_other_router(server: Any, other_server: Any) -> None:
    delta = inference_pb2.Delta(token_ids=[97, 98], text="ab")
    server.service.script = [Event(resume_token="first", delta=delta), HANG]
    other_server.service.resume_script = [
        Event(delta=inference_pb2.Delta(offset=2, token_ids=[99], text="c")),
        Event(finished=inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_LENGTH)),
        Event(summary=inference_pb2.Summary(continuations=1)),
    ]
    link = await Link(server.address).start()
    try:
        async with lx.AsyncClient([link.address, other_server.address]) as client:
            stream = client.generate_stream("hello")
            assert (await anext(stream)).text == "ab"
            for way in Way:
                link.hold(way)
            async with asyncio.timeout(60):
                whole = await stream.result()
        assert whole.text == "abc"
        assert link.disturbed, "nothing was held up: no ping was sent"
        assert len(other_server.service.requests) == 1
    finally:
        await link.stop()


def test_a_dead_link_is_noticed_within_five_seconds_and_servers_bear_the_pings() -> None:
    options, server_options = dict(CHANNEL_OPTIONS), dict(_SERVER_OPTIONS)
    assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"]
    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] <= 5_000
    assert options["grpc.keepalive_time_ms"] >= server_options["grpc.http2.min_recv_ping_interval_without_data_ms"]
