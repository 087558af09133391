"""The attacks: each makes tries from a seed, and returns how many of them were accepted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.trials.forged.call_attacks import downloads, frames, hellos, resume_tokens
from tests.trials.forged.redis_attacks import altered_jobs, commands, jobs_of_workers, replayed_jobs, unsealed_jobs
from tests.trials.forged.stage import Stage

ATTACKS: dict[str, Callable[[Stage, int], Awaitable[int]]] = {
    "hellos at the relay": hellos,
    "frames and claims of another worker": frames,
    "jobs without a seal": unsealed_jobs,
    "jobs that a worker has sealed": jobs_of_workers,
    "altered jobs": altered_jobs,
    "replayed jobs": replayed_jobs,
    "commands to the worker": commands,
    "resume tokens": resume_tokens,
    "downloads of a worker": downloads,
}
# Processes whose audit log has the refusals; those of all other attacks are the worker's.
REFUSED_BY = {
    "hellos at the relay": "router",
    "frames and claims of another worker": "router",
    "resume tokens": "router",
    "downloads of a worker": "store",
}
