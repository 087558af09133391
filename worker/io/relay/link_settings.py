"""The settings of a worker's links to its routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rpc.server import relay_options

if TYPE_CHECKING:
    from worker.io.relay.link_credentials import LinkCredentials

# Options of the channel to a router, with the back-off of connection attempts in milliseconds: a router that was gone
# for a moment is found again soon. `min_reconnect_backoff_ms` is the timeout of one attempt.
CHANNEL_OPTIONS = [
    *relay_options(),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 500),
]


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """The worker as its routers know it, and the links' times in seconds.

    `send_interval_s`: minimum time between two messages without the first ids or the end of an answer, until the router
    gives another (relay.v1.Pace). `gone_s`: time without a stream after which a router's jobs are dropped. `spare_s`:
    time without a stream after which other jobs may take their rows; longer than a router waits for a worker to come
    back before it dispatches its jobs again. `retry_s`: pause before a broken stream is opened again; without jobs of
    the router it doubles up to `retry_limit_s`. `beat_s`: interval of signs of life to routers that have jobs here.
    `claim_notice_s`: time after a claim in which the job's first frame is awaited, which tells of the claim as well.
    """

    worker_id: str
    incarnation: str
    send_interval_s: float = 0.010
    gone_s: float = 5.0
    spare_s: float = 0.5
    retry_s: float = 0.05
    retry_limit_s: float = 1.0
    beat_s: float = 0.5
    claim_notice_s: float = 0.002
    # None: links without TLS.
    credentials: LinkCredentials | None = None
