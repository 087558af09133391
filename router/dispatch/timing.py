"""The times of dispatch, in one place, so that a test can give its own."""

from __future__ import annotations

from dataclasses import dataclass

from broker.connection import CALL_S
from broker.seal_kinds import JOB_S


@dataclass(frozen=True, slots=True)
class DispatchTiming:
    """Timeouts, intervals and grace periods of a dispatcher and its outbox, in seconds."""

    # Time that a worker whose link broke has to connect again before its jobs go on elsewhere. A broken link is the
    # first sign of a death, within milliseconds.
    link_grace_s: float = 0.2
    # Time that a worker may be missing in Redis before its jobs go on elsewhere: two of its beats.
    liveness_grace_s: float = 1.0
    # Time without a message over its link after which such a worker counts as lost; it sends one every half second.
    silent_s: float = 2.0
    # Time that a job may be neither queued nor bound before it is dispatched again, since its claim may still be on its
    # way: the first such time, which doubles with each further one in a row.
    claim_grace_s: float = 1.0
    # Time that no live worker may be able to take a waiting job before the job ends: a worker may be restarting.
    unservable_grace_s: float = 5.0
    # Interval between looks into the queue for jobs that are in nobody's hands.
    look_s: float = 0.25
    # Time that an attempt waits in the queue before it is sealed anew.
    seal_s: float = JOB_S / 2
    # Interval between attempts of an operation on a queue that does not answer.
    retry_s: float = 0.2
    # Timeout for removing an ended job from Redis, and for adding a dead letter: an outage may be for good.
    finish_s: float = 60.0
    # Timeout for pending queue operations when the router stops.
    drain_s: float = 5.0
    # Time after which no enqueue that its call has given up can still reach Redis: the timeout of a whole call.
    late_enqueue_s: float = CALL_S
