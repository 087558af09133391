"""Every Redis key on one page. All keys of a cell share a hash tag, so that scripts run on one shard.

key                          type    what
lp:{MODEL/CELL}:waiting      zset    ids of the jobs that wait, by deadline
lp:{MODEL/CELL}:again        zset    those of them that were dispatched again, by arrival
lp:{MODEL/CELL}:queue:TENANT zset    a tenant's others, in the order of claims: priority, deadline, arrival
lp:{MODEL/CELL}:job:ID       hash    a waiting job: body, attempt, what a claim must know of it
lp:{MODEL/CELL}:arrivals     string  counter that numbers arrivals
lp:{MODEL/CELL}:tenants      zset    tenants that have a queue, by their counters of service
lp:{MODEL/CELL}:idle         zset    the counters of tenants that have none, so far as above the lowest
lp:{MODEL/CELL}:floor        string  the counter of the last tenant that had a queue
lp:{MODEL/CELL}:bytes        hash    bytes that wait, in all and by tenant, and the work of each tenant's
lp:{MODEL/CELL}:charged:ID   string  a claimed job: what its tenant has been charged; expires
lp:{MODEL/CELL}:pace         hash    how much work a second is claimed while work waits
lp:{MODEL/CELL}:room:WORKER  string  free rows after a worker's last claim; expires
lp:{MODEL/CELL}:wake         list    one entry wakes one idle worker
lp:{MODEL/CELL}:wake:WORKER  list    the same for this one
lp:{MODEL/CELL}:dead         list    the last jobs that were ended because they killed engines, the newest first
lp:{MODEL/CELL}:pins         hash    the adapters that every worker keeps on its device, by digest
lp:{MODEL/CELL}:workers      hash    worker incarnations that may live, and which worker's they are
lp:{MODEL/CELL}:commands:INC list    what operators ask of an incarnation; expires
lp:{MODEL/CELL}:worker:INC   string  a live incarnation's state; its time to live is the liveness
lp:{MODEL/CELL}:routers      zset    routers, by when they are taken for dead
lp:{MODEL/CELL}:born         string  a name for this data, made when it began
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
        """Ids of waiting jobs; the score is the deadline in ms of Redis's clock, or infinity."""
        return self.prefix + "waiting"

    @property
    def wake(self) -> str:
        """The list that idle workers block on."""
        return self.prefix + "wake"

    def wake_of(self, worker_id: str) -> str:
        """The list that this worker blocks on besides."""
        return f"{self.wake}:{worker_id}"

    @property
    def dead(self) -> str:
        """The dead letters."""
        return self.prefix + "dead"

    @property
    def pins(self) -> str:
        """The adapters that every worker keeps."""
        return self.prefix + "pins"

    @property
    def workers(self) -> str:
        """Incarnations of workers that may live, with their workers."""
        return self.prefix + "workers"

    def job(self, job_id: str) -> str:
        """A waiting job."""
        return f"{self.prefix}job:{job_id}"

    def commands(self, incarnation: str) -> str:
        """What operators ask of an incarnation."""
        return f"{self.prefix}commands:{incarnation}"

    def worker(self, incarnation: str) -> str:
        """An incarnation's liveness."""
        return f"{self.prefix}worker:{incarnation}"
