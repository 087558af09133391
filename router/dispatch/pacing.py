"""The pace of the workers' messages: how often each may send to this router, by how many are linked to it.

A message costs a router the same with one token as with many. Every worker with a job of this router sends to it after
each of its steps, so that the messages would grow with workers and with the speed of their engines. The router gives
all workers one interval instead: the first ids and the end of an answer are sent at once, other ids wait for its end.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PaceLimits:
    """The bounds of the interval.

    `messages_per_s`: paced messages a second from all workers together, which decide the interval between the bounds;
    at 60 us each they take a router a quarter of a core. `shortest_ms` and `longest_ms`: minimum and maximum of the
    interval in ms, and so of the time that an id waits. Nobody sees 10 ms; 50 ms are 20 messages a second, of which a
    reader sees a flow.
    """

    messages_per_s: int = 4000
    shortest_ms: int = 10
    longest_ms: int = 50

    def interval_ms(self, links: int) -> int:
        """Return the interval for this many linked workers, in steps of `shortest_ms`: few changes are to be told."""
        steps = -(-links * 1000 // (self.messages_per_s * self.shortest_ms))
        return min(self.longest_ms, max(1, steps) * self.shortest_ms)
