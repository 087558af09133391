"""Every Redis key on one page. All keys of a cell share a hash tag, so that scripts run on one shard.

key                          type    what
lp:{MODEL/CELL}:waiting      zset    ids of the jobs that wait, in the order of claims
lp:{MODEL/CELL}:arrivals     string  counter that numbers arrivals
lp:{MODEL/CELL}:job:ID       hash    a waiting job: body, attempt, what a claim must know of it
lp:{MODEL/CELL}:wake         list    one entry wakes one idle worker
lp:{MODEL/CELL}:workers      set     worker incarnations that may live
lp:{MODEL/CELL}:worker:INC   string  a live incarnation's state; its time to live is the liveness
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one cell of one model."""

    model: str
    cell: str

    @property
    def prefix(self) -> str:
        """What every key of the cell begins with, colon included."""
        return f"lp:{{{self.model}/{self.cell}}}:"

    @property
    def waiting(self) -> str:
        """Ids of waiting jobs, lowest score first."""
        return self.prefix + "waiting"

    @property
    def arrivals(self) -> str:
        """The arrivals' counter."""
        return self.prefix + "arrivals"

    @property
    def wake(self) -> str:
        """The list that idle workers block on."""
        return self.prefix + "wake"

    @property
    def workers(self) -> str:
        """Incarnations of workers that may live."""
        return self.prefix + "workers"

    def job(self, job_id: str) -> str:
        """A waiting job."""
        return f"{self.prefix}job:{job_id}"

    def worker(self, incarnation: str) -> str:
        """An incarnation's liveness."""
        return f"{self.prefix}worker:{incarnation}"
