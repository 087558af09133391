"""The cost of generating the load, and warnings where it distorts the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clients.loadtest.distribution import spread
from clients.loadtest.generator import Share
from clients.loadtest.samples import Samples

# Share of a core above which requests queue in the generator: grpc.aio has one busy thread and a little more.
BUSY_SHARE = 0.85
# Lateness is reported above this many seconds and above these shares of the times that it distorts.
LATE_S = 0.005
SEND_LATE_OF_TTFT = 0.1
READ_LATE_OF_ITL = 0.25


def generator_cost(shares: Sequence[Share], samples: Samples) -> dict[str, Any]:
    """Compute processor time, send delays and read delays, in seconds.

    `send_delay` is the time from a request's due time until it was sent. `read_delay` is how late the event loop woke
    up, sampled 50 times a second.
    """
    messages, requests = float(samples.column("messages").sum()), len(samples)
    cpu_s = sum(share.cpu_s for share in shares)
    delays = np.concatenate([np.asarray(share.delays_s, dtype=np.float64) for share in shares])
    return {
        "processes": len(shares),
        "cpu_s": cpu_s,
        "busy_share": max((share.cpu_s / max(share.wall_s, 1e-9) for share in shares), default=0.0),
        "cpu_us_per_message": cpu_s / (messages + requests) * 1e6 if messages + requests else None,
        "send_delay": spread(samples.column("sent_s") - samples.column("intended_s")),
        "read_delay": spread(delays),
    }


def warnings(cost: Mapping[str, Any], times: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """Return warnings for figures that the generator distorts, each with advice."""
    found = []
    if cost["busy_share"] > BUSY_SHARE:
        found.append(
            f"the generator is the bottleneck: a process used {cost['busy_share']:.0%} of a core; "
            "give it more with --processes, or send less"
        )
    for name, what, spoilt_s in (
        ("send_delay", "sent requests", SEND_LATE_OF_TTFT * (times["ttft"]["p50"] or 0.0)),
        ("read_delay", "read what had come", READ_LATE_OF_ITL * (times["itl"]["p99"] or 0.0)),
    ):
        late_s = cost[name]["p99"]
        if late_s is not None and late_s > max(LATE_S, spoilt_s):
            found.append(
                f"the generator {what} up to {late_s * 1e3:.1f} ms late (p99), and the times above have that in them; "
                "give it more with --processes, or a machine of its own"
            )
    return found
