"""All Redis keys. The keys of a cell share a hash tag, so that functions run on one shard.

key                          type    content
lp:{MODEL/CELL}:waiting      zset    ids of the waiting jobs, by deadline
lp:{MODEL/CELL}:again        zset    jobs that have begun among them, redispatched or resumed, by arrival
lp:{MODEL/CELL}:queue:TENANT zset    the other jobs of a tenant, in the order of claims: priority, deadline, arrival;
                                     or priority, turn, arrival (broker/lua/jobs.lua)
lp:{MODEL/CELL}:queue:TENANT/keys
                             hash    jobs and bytes that wait of the tenant's API keys, and their turns
lp:{MODEL/CELL}:uses         zset    tenants with a queue, by their use of the whole queue at their last enqueue; it may
                                     have become less
lp:{MODEL/CELL}:job:ID       hash    a waiting job: body, attempt, and the facts that a claim needs; a displaced one
                                     has a mark instead, and expires
lp:{MODEL/CELL}:arrivals     string  counter that numbers arrivals
lp:{MODEL/CELL}:arrived_work string  sum of the work of all arrivals
lp:{MODEL/CELL}:claimed_work string  sum of the work of all claims
lp:{MODEL/CELL}:demand       zset    adapters by the work that has lately come for them, of all adapters in `*`
lp:{MODEL/CELL}:homes        hash    adapters with several homes, and how many
lp:{MODEL/CELL}:news         list    ids of the last arrivals
lp:{MODEL/CELL}:tenants      zset    tenants with a queue, by their counters of service
lp:{MODEL/CELL}:idle         zset    counters of the other tenants, where they are above the lowest
lp:{MODEL/CELL}:floor        string  counter of the last tenant that had a queue
lp:{MODEL/CELL}:totals       hash    bytes that wait and work by tenant, each of newcomers and of jobs that have begun,
                                     and their weights; of the cell the bytes and work of both in all, the counter
                                     that the next idle tenant begins with, and the work claimed in a ms while work
                                     waits
lp:{MODEL/CELL}:charged      hash    what the tenants of claimed jobs have been charged, by job
lp:{MODEL/CELL}:rooms        hash    free rows after the last claim of each worker, and until when that is believed
lp:{MODEL/CELL}:wake         list    wake-ups: an entry wakes one idle worker
lp:{MODEL/CELL}:wake:WORKER  list    wake-ups of this worker
lp:{MODEL/CELL}:passed_on    string  wake-ups that workers have passed on; expires
lp:{MODEL/CELL}:dead         list    dead letters: the last jobs that were ended because they killed engines
lp:{MODEL/CELL}:deaths       hash    count and time of the last dead letters, by tenant and adapter
lp:{MODEL/CELL}:quarantine   zset    tenants, and tenants with an adapter, whose jobs are refused, by its end
lp:{MODEL/CELL}:suspects     hash    jobs that engines may have died of, and jobs of their tenants and adapters that
                                     workers have; expires
lp:{MODEL/CELL}:pins         hash    adapters that every worker keeps on its device, by digest and tenant
lp:{MODEL/CELL}:workers      hash    worker incarnations that may live, the workers that they belong to, and their rows
lp:{MODEL/CELL}:cards        hash    what routers need of the workers' states and changes seldom, by incarnation
lp:{MODEL/CELL}:commands:INC list    operators' commands to an incarnation; expires
lp:{MODEL/CELL}:worker:INC   string  state of a live incarnation; expires without beats
lp:{MODEL/CELL}:roll:LIBRARY string  what all routers are told of the live workers, for a moment; expires
lp:{MODEL/CELL}:routers      zset    routers, by the time from which they are taken for dead
lp:{MODEL/CELL}:born         string  random name of this data, made when it began
lp:{resume}:keys             list    keys of the resume tokens of all routers, the newest first; secret
lp:{cells}:drained           hash    names of drained cells, and the times in ms since which they are (broker/cells.py)
lp:{ledger}:state            string  time at which the ledger opens after a loss of data, and who fills it
lp:{ledger}:account:NAME     string  charges of a tenant or API key in the running windows, and what is held; expires
lp:{ledger}:of:ID            string  a reservation, open or ended; expires once it has ended
lp:{ledger}:held:ROUTER      set     ids of a router's open reservations
lp:{ledger}:routers          hash    number of each router's last call, and when others may end its reservations
lp:{ledger}:ended:ROUTER      string  that of a router whose reservations have all ended; expires
lp:{ledger}:usage            stream  charges whose usage events no router has written yet, where events are written
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from redis.asyncio import Redis

from loraplex.contracts.broker.functions import LIBRARY

log = logging.getLogger(__name__)

T = TypeVar("T")

RESUME_KEYS = "lp:{resume}:keys"
DRAINED_CELLS = "lp:{cells}:drained"

# Prefix of the ledger's keys.
LEDGER = "lp:{ledger}:"

# Beginning of the names of API keys' accounts; a tenant's account has the tenant's name, which has no slash.
_KEY_ACCOUNT = "keys/"


def key_account(key_id: str) -> str:
    """Return the name of an API key's account."""
    return _KEY_ACCOUNT + key_id


def is_key_account(account: str) -> bool:
    """Tell whether an account is an API key's."""
    return account.startswith(_KEY_ACCOUNT)


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of a cell of a model."""

    model: str
    cell: str

    @property
    def prefix(self) -> str:
        """Return the common prefix of the cell's keys, colon included."""
        return f"lp:{{{self.model}/{self.cell}}}:"

    @property
    def waiting(self) -> str:
        """Key of the waiting jobs' ids; the score is the deadline in ms of Redis's clock, or infinity."""
        return self.prefix + "waiting"

    @property
    def wake(self) -> str:
        """Key of the list that idle workers block on."""
        return self.prefix + "wake"

    def wake_of(self, worker_id: str) -> str:
        """Key of a second list, on which this worker alone blocks."""
        return f"{self.wake}:{worker_id}"

    @property
    def dead(self) -> str:
        """Key of the dead letters."""
        return self.prefix + "dead"

    @property
    def pins(self) -> str:
        """Key of the adapters that every worker keeps."""
        return self.prefix + "pins"

    @property
    def workers(self) -> str:
        """Key of the incarnations of workers that may live, with their workers and rows."""
        return self.prefix + "workers"

    @property
    def cards(self) -> str:
        """Key of what routers need of the workers' states and changes seldom, by incarnation."""
        return self.prefix + "cards"

    def job(self, job_id: str) -> str:
        """Key of a waiting job."""
        return f"{self.prefix}job:{job_id}"

    def commands(self, incarnation: str) -> str:
        """Key of the commands to an incarnation."""
        return f"{self.prefix}commands:{incarnation}"

    def worker(self, incarnation: str) -> str:
        """Key of an incarnation's state, which exists while it lives."""
        return f"{self.prefix}worker:{incarnation}"


async def rotate_resume_keys(redis: Redis, new: str) -> int:
    """Put a new key of resume tokens in front, which signs from now on; returns how many are valid."""
    rotate = LIBRARY.function(redis, "rotate_resume_keys")
    return int(await rotate(RESUME_KEYS, [new]))


async def withdraw_resume_keys(redis: Redis) -> int:
    """Remove all stored keys of resume tokens but the one that signs; returns how many."""
    withdraw = LIBRARY.function(redis, "withdraw_resume_keys")
    return int(await withdraw(RESUME_KEYS, []))


async def merge_resume_keys(redis: Redis, new: str, used: Sequence[str]) -> list[str]:
    """Return the stored keys of resume tokens, the newest first: secrets, which nothing here may log.

    If there are none, the `used` ones of this router are stored, or else the `new` one. Where the stored keys have none
    of the used ones, Redis lost its data: the used ones are stored behind them.
    """
    merge = LIBRARY.function(redis, "resume_keys")
    stored = await merge(RESUME_KEYS, [new, *used])
    return [key.decode(errors="replace") for key in stored]
