"""Attacks by what is written into Redis: jobs and commands."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from loraplex.contracts.broker.commands import DRAIN, Command, Verb, encode_command
from loraplex.contracts.broker.messages import AdapterRef, AdapterRequest, SealKind, encode_record
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.seals import Seals
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.tenancy.signatures import Signer, Verifier
from tests.credentials_files import job_keys
from tests.trials.forged.cluster import KEYS, OTHER, TENANT
from tests.trials.forged.stage import PROMPT, THIEF, TIMEOUT_S, Stage, incarnation_of

# The header of an array: a script packs a job's facts one after the other, without it.
_FACTS = b"\xdc\x00\x14"


async def unsealed_jobs(stage: Stage, tries: int) -> int:
    """Put jobs of another tenant on the private adapter into the queue, as a cluster without credentials has them."""
    queue = JobQueue(stage.cluster.redis, KEYS)
    return await _to_worker(stage, tries, lambda n: queue.enqueue(stage.job(f"plain-{n}")))


async def jobs_of_workers(stage: Stage, tries: int) -> int:
    """Put in jobs that a worker has sealed, which knows the job key."""
    tls = stage.cluster.tls(THIEF)
    seals = Seals(job_keys(stage.cluster.directory), Verifier(tls, Role.WORKER), Signer(tls, Role.WORKER))
    queue = JobQueue(stage.cluster.redis, KEYS, seals=seals)
    return await _to_worker(stage, tries, lambda n: queue.enqueue(stage.job(f"worker-{n}")))


async def altered_jobs(stage: Stage, tries: int) -> int:
    """Put in a router's job of before with another field: of its seal, or of the facts beside it."""
    return await _to_worker(stage, tries, lambda _: _put(stage, _altered(stage.sealed, stage.chance)))


async def replayed_jobs(stage: Stage, tries: int) -> int:
    """Put in a router's job of before as it was."""
    return await _to_worker(stage, tries, lambda _: _put(stage, stage.sealed))


async def commands(stage: Stage, tries: int) -> int:
    """Send the worker commands to drain, and to load the private adapter, without a seal or with a worker's."""
    tls, key = stage.cluster.tls(THIEF), KEYS.commands(await incarnation_of(stage))
    seals = Seals(job_keys(stage.cluster.directory), Verifier(tls, Role.WORKER), Signer(tls, Role.WORKER))
    request = AdapterRequest(AdapterRef(stage.revision.name, stage.revision.digest, 8, 100), OTHER)

    async def send(number: int) -> None:
        command = (DRAIN, Command(Verb.WARM, request), Command(Verb.PIN, request))[number % 3]
        entry = encode_command(command)
        if number % 2:
            entry = b"sealed " + encode_record(seals.seal(SealKind.COMMAND, key, entry))
        await stage.cluster.redis.rpush(key, entry)

    accepted = await _to_worker(stage, tries, send)
    async with stage.cluster.client(TENANT) as client:  # the worker has not drained
        await client.generate(token_ids=PROMPT, max_tokens=2)
    return accepted


async def _to_worker(stage: Stage, tries: int, put: Callable[[int], Awaitable[None]]) -> int:
    """Put entries into Redis, two after each job of a client; return how many ran or were not refused.

    A worker that cannot read three entries in a row pauses.
    """
    accepted = 0
    async with stage.cluster.client(TENANT) as client:
        for first in range(0, tries, 2):
            await client.generate(token_ids=PROMPT, max_tokens=2)
            computed, refused = await stage.cluster.worker_counts()
            numbers = range(first, min(first + 2, tries))
            for number in numbers:
                await put(number)
            await stage.cluster.until_refused(refused + len(numbers))
            after, counted = await stage.cluster.worker_counts()
            accepted += int(after != computed) + abs(len(numbers) - (counted - refused))
    return accepted


async def _put(stage: Stage, stored: Mapping[bytes, bytes]) -> None:
    """Put a job into the queue as one that has begun, once the worker has taken the last one of its id."""
    redis, key = stage.cluster.redis, KEYS.job(stage.job_id)
    content: dict[Any, Any] = dict(stored)
    async with asyncio.timeout(TIMEOUT_S):
        while await redis.exists(key):  # noqa: ASYNC110  # a worker's claim removes it
            await asyncio.sleep(0.001)
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hset(key, mapping=content)
        pipe.zadd(KEYS.waiting, {stage.job_id: "inf"})
        pipe.zadd(KEYS.prefix + "again", {stage.job_id: 0})
        pipe.lpush(KEYS.wake, 1)
        await pipe.execute()


# Facts of a job, by index, and other values with which the queue would still give it away.
_OTHER_FACTS: dict[int, Any] = {0: OTHER, 2: "sha256:other", 5: 7, 6: 2.5, 7: 2, 8: 1, 9: 1}


def _altered(stored: Mapping[bytes, bytes], chance: random.Random) -> dict[bytes, bytes]:
    """Return a job's hash with one fact, or one bit of its body, changed."""
    changed = dict(stored)
    if chance.random() < 0.3:
        facts = msgspec.msgpack.decode(_FACTS + stored[b"facts"])
        index = chance.choice(list(_OTHER_FACTS))
        facts[index] = _OTHER_FACTS[index]
        changed[b"facts"] = msgspec.msgpack.encode(facts)[len(_FACTS) :]
        return changed
    body = bytearray(stored[b"body"])
    body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
    changed[b"body"] = bytes(body)
    return changed
