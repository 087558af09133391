"""Sealed jobs, commands and pins on a real Valkey: what a reader sees, and what a writer gets a worker to take."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import DecodeError
from redis.asyncio import Redis

from loraplex.cli.development_ca import DevelopmentCa, write_private
from loraplex.contracts.broker.commands import DRAIN, Command, Verb, encode_command
from loraplex.contracts.broker.job_keys import JobKeys, check_job_key, new_job_key
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import (
    SEALED,
    AdapterRef,
    AdapterRequest,
    Capacity,
    Job,
    Sealed,
    SealKind,
    WeightedRef,
    decode_job,
    decode_record,
    encode_record,
)
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.seals import COMMAND_S, Seals
from loraplex.contracts.broker.terms import SEALED_JOB_S, Placement
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.tenancy.signatures import GRANT_S, RevisionGrantVerifier, Signer, Verifier, left_s
from tests.broker.clocked_queue import make_job
from tests.credentials_files import CA, RefusedSeals, job_keys, router_seals, tls_files, worker_seals

KEYS = Keys("tiny", "main")
# A job key as text: that of a draw would give a test another name in each process.
A_KEY = base64.urlsafe_b64encode(bytes(32)).decode()
BASE = "sha256:0"
ROOMY = Capacity(rows=64, rows_limit=64, tokens=100_000, max_tokens=4096, max_rank=64)
REVISION = "tenants/acme/adapters/canary/revisions/sha256:c"
ADAPTER = AdapterRef(REVISION, "sha256:c", 8, 1000)


class Cell:
    """A router's and a worker's queue with seals, on one clock."""

    def __init__(self, redis: Redis, directory: Path) -> None:
        self.redis, self.directory = redis, directory
        self.now = time.time()
        self.router = JobQueue(redis, KEYS, seals=router_seals(directory, lambda: self.now))
        self.worker, self.refused = self.new_worker()

    def new_worker(self, keys: Keys = KEYS) -> tuple[JobQueue, RefusedSeals]:
        seals, refused = worker_seals(self.directory, lambda: self.now)
        return JobQueue(self.redis, keys, worker_id="w", seals=seals), refused

    async def claim(self) -> list[Job]:
        return (await self.worker.claim(BASE, ROOMY)).jobs

    async def body(self, job_id: str = "j") -> bytes:
        body = await self.redis.hget(KEYS.job(job_id), "body")
        assert isinstance(body, bytes)
        return body


@pytest.fixture
async def cell(redis: Redis, tmp_path: Path) -> Cell:
    await redis.flushall()
    return Cell(redis, tmp_path)


def job(job_id: str = "j", **changes: Any) -> Job:
    return replace(make_job(job_id, "acme"), **{"adapter": ADAPTER, **changes})


async def test_a_job_comes_as_it_was_sent_with_a_grant_and_nobody_else_reads_it(cell: Cell) -> None:
    secret = job(prompt_ids=tuple(range(70_000, 70_040)), request_id="canary-request", grammar="canary-grammar")
    await cell.router.enqueue(secret, Placement(weight=2.0))
    stored: dict[Any, Any] = await cell.redis.hgetall(KEYS.job("j"))
    assert b"canary-" not in b"".join(stored.values())
    assert encode_record(secret)[-200:] not in stored[b"body"]
    with pytest.raises(DecodeError, match="sealed"):
        decode_job(stored[b"body"])
    (claimed,) = await cell.claim()
    assert claimed == replace(secret, weight=2.0)
    assert claimed.adapter is not None
    worker = Verifier(tls_files(cell.directory, "loraplex://store/s"), Role.ROUTER)
    RevisionGrantVerifier(worker).check(claimed.adapter.grant, "acme", REVISION)
    assert cell.refused.reasons == []


async def test_suspect_and_redispatched_jobs_and_sets_agree_with_the_queue(cell: Cell) -> None:
    parts = tuple(WeightedRef(AdapterRef(f"{REVISION}{n}", f"sha256:c{n}", 8, 10), 0.5) for n in (1, 2))
    jobs = [
        job("attempt", attempt=3, emitted={0: (7, 8)}),
        job("resumed", resumed=True, emitted={0: (7, 8)}),
        job("late", deadline_ms=60_000, priority=5),
        job("set", adapter=AdapterRef("sha256:s", "sha256:s", 16, 20, parts)),
        job("several", n=3, done=(1,)),
        job("struck", attempt=2, strikes=1),
    ]
    for one in jobs[:-1]:
        await cell.router.enqueue(one)
    claimed = {one.job_id: one for one in await cell.claim()}
    await cell.router.enqueue(jobs[-1])
    claimed |= {one.job_id: one for one in await cell.claim()}
    assert claimed == {one.job_id: one for one in jobs}
    assert all(part.grant for part in claimed["set"].adapter.summands)  # type: ignore[union-attr]  # it has one


def signed_by(cell: Cell, uri: str, role: Role, ca: DevelopmentCa = CA) -> Callable[[Sealed], None]:
    """Return a change of a seal: the same content with a signature of another one, who knows the job key."""
    tls = tls_files(cell.directory, uri, ca)
    seals = Seals(job_keys(cell.directory), Verifier(tls, role), Signer(tls, role), now=lambda: cell.now)

    def change(sealed: Sealed) -> None:
        forged = seals.seal(SealKind.JOB, KEYS.prefix, encode_record(job(tenant="globex")))
        for name in Sealed.__struct_fields__:
            setattr(sealed, name, getattr(forged, name))

    return change


def flip(field: str) -> Callable[[Sealed], None]:
    def change(sealed: Sealed) -> None:
        value = getattr(sealed, field)
        setattr(sealed, field, value[:-1] + bytes([value[-1] ^ 1]))

    return change


SEAL_CHANGES: dict[str, tuple[Callable[[Sealed], object], str]] = {
    **{field: (flip(field), "SIGNATURE_INVALID") for field in ("nonce", "ciphertext", "signature")},
    "key_id": (lambda sealed: setattr(sealed, "key_id", "other"), "SIGNATURE_INVALID"),
    "expires_at_ms": (lambda sealed: setattr(sealed, "expires_at_ms", sealed.expires_at_ms + 1), "SIGNATURE_INVALID"),
    "never expires": (lambda sealed: setattr(sealed, "expires_at_ms", 0), "SEAL_EXPIRED"),
    "certificates": (lambda sealed: setattr(sealed, "certificates", sealed.certificates[:-1]), "SIGNATURE_INVALID"),
    "another certificate": (
        lambda sealed: setattr(sealed, "certificates", (b"none", *sealed.certificates)),
        "SIGNATURE_INVALID",
    ),
}


@pytest.mark.parametrize("what", SEAL_CHANGES)
async def test_an_altered_seal_is_refused(cell: Cell, what: str) -> None:
    await cell.router.enqueue(job())
    sealed = decode_record(Sealed, (await cell.body()).removeprefix(SEALED))
    change, reason = SEAL_CHANGES[what]
    change(sealed)
    await cell.redis.hset(KEYS.job("j"), "body", SEALED + encode_record(sealed))
    assert await cell.claim() == []
    assert cell.refused.reasons == [reason]


@pytest.mark.parametrize("who", ["worker", "operator", "stranger"])
async def test_a_seal_of_somebody_else_is_refused_though_the_job_key_is_right(cell: Cell, who: str) -> None:
    await cell.router.enqueue(job())
    sealed = decode_record(Sealed, (await cell.body()).removeprefix(SEALED))
    forge = {
        "worker": lambda: signed_by(cell, "loraplex://worker/thief", Role.WORKER),
        "operator": lambda: signed_by(cell, "loraplex://operator/thief", Role.OPERATOR),
        "stranger": lambda: signed_by(cell, "loraplex://router/thief", Role.ROUTER, DevelopmentCa()),
    }[who]()
    forge(sealed)
    await cell.redis.hset(KEYS.job("j"), "body", SEALED + encode_record(sealed))
    assert await cell.claim() == []
    assert cell.refused.reasons == ["SIGNATURE_INVALID"]


@pytest.mark.parametrize("body", [encode_record(job(tenant="globex")), b"", b"\xff", SEALED + b"\xff"])
async def test_a_job_without_a_seal_is_refused(cell: Cell, body: bytes) -> None:
    await cell.router.enqueue(job())
    await cell.redis.hset(KEYS.job("j"), "body", body)
    assert await cell.claim() == []
    assert cell.refused.reasons == ["UNSEALED"]


# The header of an array of as many facts: a function packs them one after the other.
ARRAY_OF_20 = b"\xdc\x00\x14"
# Facts of a job beside its body, by their index.
FACTS = {
    "tenant": (0, "globex"),
    "adapter": (2, "sha256:other"),
    "attempt": (5, 2),
    "weight": (6, 8.5),
    "tokens": (7, 1),
    "prefill": (8, 1),
    "prompt": (9, 1),
    "rank": (10, 1),
    "rows": (11, 2),
}


@pytest.mark.parametrize("fact", [*FACTS, "all of another job"])
async def test_a_job_whose_facts_in_the_queue_differ_is_refused(cell: Cell, fact: str) -> None:
    await cell.router.enqueue(job(prompt_ids=(1, 2, 3)))
    packed = await cell.redis.hget(KEYS.job("j"), "facts")
    assert isinstance(packed, bytes)
    facts = msgspec.msgpack.decode(ARRAY_OF_20 + packed)
    if fact in FACTS:
        index, value = FACTS[fact]
        facts[index] = value
    else:
        await cell.router.enqueue(job("k"))
        await cell.redis.hset(KEYS.job("j"), "body", await cell.body("k"))
        await cell.router.finish("k", 1)
    await cell.redis.hset(KEYS.job("j"), "facts", msgspec.msgpack.encode(facts)[3:])
    assert await cell.claim() == []
    assert cell.refused.reasons == ["FACTS_DIFFER"]


async def test_a_job_is_taken_once_in_its_queue_in_its_time(cell: Cell) -> None:
    await cell.router.enqueue(job())
    stored: dict[Any, Any] = await cell.redis.hgetall(KEYS.job("j"))
    (first,) = await cell.claim()

    async def put_again(queue: JobQueue, keys: Keys) -> None:
        await JobQueue(cell.redis, keys).enqueue(replace(first, job_id="j"))
        await cell.redis.hset(keys.job("j"), mapping=stored)

    await put_again(cell.worker, KEYS)
    assert await cell.claim() == []
    assert cell.refused.reasons == ["REPLAYED"]
    other = Keys("tiny", "other")
    elsewhere, refused = cell.new_worker(other)
    await put_again(elsewhere, other)
    assert (await elsewhere.claim(BASE, ROOMY)).jobs == []
    assert refused.reasons == ["SIGNATURE_INVALID"]
    await cell.router.enqueue(job("late"))
    cell.now += SEALED_JOB_S
    claimed = await cell.worker.claim(BASE, ROOMY)
    assert [(one.job_id, one.attempt, one.reply_to) for one in claimed.unread] == [("late", 1, job().reply_to)]
    assert (claimed.jobs, claimed.refused_here) == ([], 1)
    assert cell.refused.reasons == ["REPLAYED", "SEAL_EXPIRED"]
    await cell.router.enqueue(job("late", attempt=2))  # its router has missed it
    assert [one.attempt for one in await cell.claim()] == [2]


async def test_a_seal_that_has_expired_by_redis_s_clock_too_is_no_fault_of_its_worker(cell: Cell) -> None:
    cell.now -= SEALED_JOB_S  # as a job that a Redis has again which came back older
    await cell.router.enqueue(job("old"))
    cell.now += SEALED_JOB_S
    claimed = await cell.worker.claim(BASE, ROOMY)
    assert [one.job_id for one in claimed.unread] == ["old"]
    assert (claimed.jobs, claimed.refused_here) == ([], 0)
    assert cell.refused.reasons == ["SEAL_EXPIRED"]


async def test_a_waiting_job_is_sealed_anew_until_it_is_claimed_or_replaced(cell: Cell) -> None:
    await cell.router.enqueue(job())
    for _ in range(3):
        cell.now += SEALED_JOB_S - 1
        await cell.router.renew(job(), Placement())
    (claimed,) = await cell.claim()
    assert claimed.adapter is not None
    assert left_s(claimed.adapter.grant, cell.now) > GRANT_S / 2
    await cell.router.renew(job(), Placement())
    assert not await cell.redis.exists(KEYS.job("j"))
    await cell.router.enqueue(job(attempt=2))
    await cell.router.renew(job(), Placement())
    assert [one.attempt for one in await cell.claim()] == [2]
    assert cell.refused.reasons == []


async def test_keys_are_taken_into_use_without_a_restart(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.runtime.files.LOOK_S", 0.0)
    path = cell.directory / "job.key"
    old, new = path.read_text(), new_job_key("new")
    for text in (old + new, new + old):
        write_private(path, text.encode())
        await cell.router.enqueue(job())
        key_id = decode_record(Sealed, (await cell.body()).removeprefix(SEALED)).key_id
        assert len(await cell.claim()) == 1
    assert key_id == "new"
    write_private(path, b"not a key")  # somebody is still writing
    await cell.router.enqueue(job())
    assert len(await cell.claim()) == 1
    path.unlink()
    path.mkdir()  # what mounting a file that is not there yet makes
    await cell.router.enqueue(job())
    assert len(await cell.claim()) == 1
    path.rmdir()
    write_private(path, new_job_key("other").encode())
    await cell.router.enqueue(job())
    write_private(path, old.encode())
    assert await cell.claim() == []
    assert cell.refused.reasons == ["KEY_UNKNOWN"]


def test_keys_and_authorities_that_come_during_a_wait_are_known(tmp_path: Path) -> None:
    worker, _ = worker_seals(tmp_path, time.time)
    write_private(tmp_path / "job.key", new_job_key("new").encode())
    sealed = router_seals(tmp_path, time.time).seal(SealKind.JOB, "lp:", b"1")
    assert worker.open(SealKind.JOB, "lp:", sealed) == b"1"
    other = DevelopmentCa()
    sealed = router_seals(tmp_path, time.time, ca=other).seal(SealKind.JOB, "lp:", b"2")
    other.write_ca(tmp_path / "ca-worker-w")
    assert worker.open(SealKind.JOB, "lp:", sealed) == b"2"


async def test_commands_are_taken_from_routers_alone_once_and_by_their_worker(cell: Cell) -> None:
    warm = Command(Verb.WARM, AdapterRequest(ADAPTER, "acme"))
    await cell.router.commands.send("w-1", warm)
    (entry,) = await cell.redis.lrange(KEYS.commands("w-1"), 0, -1)
    assert b"canary" not in entry
    got = await cell.worker.commands.next("w-1", 0.1)
    assert got == warm
    assert got.request is not None
    assert got.request.adapter.grant
    for forged in (entry, encode_command(DRAIN), encode_command(warm), b"sealed ", b"sealed \xff"):
        await cell.redis.rpush(KEYS.commands("w-1"), forged)
        assert await cell.worker.commands.next("w-1", 0.1) is None
    await cell.router.commands.send("w-1", DRAIN)
    (drain,) = await cell.redis.lrange(KEYS.commands("w-1"), 0, -1)
    await cell.redis.rpush(KEYS.commands("w-2"), drain)
    assert await cell.worker.commands.next("w-2", 0.1) is None
    cell.now += COMMAND_S
    assert await cell.worker.commands.next("w-1", 0.1) is None
    assert cell.refused.reasons == [
        *("REPLAYED", "UNSEALED", "UNSEALED", "UNSEALED", "UNSEALED"),
        *("SIGNATURE_INVALID", "SEAL_EXPIRED"),
    ]


async def test_pins_are_taken_from_routers_alone_and_their_grants_are_renewed(cell: Cell) -> None:
    await cell.router.pins.pin(AdapterRequest(ADAPTER, "acme"))
    (pin,) = await cell.worker.pins.list()
    stored = await cell.redis.hget(KEYS.pins, "sha256:c acme")
    assert isinstance(stored, bytes)
    await cell.redis.hset(KEYS.pins, "sha256:c globex", stored)
    assert await cell.worker.pins.list() == [pin]
    await cell.redis.hdel(KEYS.pins, "sha256:c globex")
    await cell.router.pins.renew_grants(lambda: cell.now)  # a router that starts may have another certificate
    stored = await cell.redis.hget(KEYS.pins, "sha256:c acme")
    await cell.router.pins.renew_grants(lambda: cell.now)
    assert await cell.redis.hget(KEYS.pins, "sha256:c acme") == stored
    cell.now += GRANT_S
    await cell.router.pins.renew_grants(lambda: cell.now)
    (renewed,) = await cell.worker.pins.list()
    assert GRANT_S / 2 <= left_s(renewed.adapter.grant, cell.now) <= GRANT_S
    await cell.router.pins.unpin(ADAPTER)
    assert await cell.worker.pins.list() == []
    assert cell.refused.reasons == ["SIGNATURE_INVALID"]


async def test_pins_and_grants_are_made_anew_with_another_certificate(cell: Cell) -> None:
    seals, other = router_seals(cell.directory, lambda: cell.now), DevelopmentCa()
    pins = JobQueue(cell.redis, KEYS, seals=seals).pins
    await pins.pin(AdapterRequest(ADAPTER, "acme"))
    await pins.renew_grants(lambda: cell.now)
    former = seals.granted(ADAPTER, "acme").grant
    assert seals.granted(ADAPTER, "acme").grant == former
    tls_files(cell.directory, "loraplex://router/r", other)
    (cell.directory / "ca-router-r" / "ca.pem").write_bytes(CA.pem + other.pem)
    await pins.renew_grants(lambda: cell.now)
    other.write_ca(cell.directory / "ca-worker-w")
    assert [pin.tenant for pin in await cell.worker.pins.list()] == ["acme"]
    store = Verifier(tls_files(cell.directory, "loraplex://store/s", trusted=other), Role.ROUTER)
    RevisionGrantVerifier(store).check(seals.granted(ADAPTER, "acme").grant, "acme", REVISION)
    assert cell.refused.reasons == []


def test_a_worker_cannot_forge_a_grant(cell: Cell) -> None:
    store = Verifier(tls_files(cell.directory, "loraplex://store/s"), Role.ROUTER)
    thief = tls_files(cell.directory, "loraplex://worker/thief")
    grants = Seals(job_keys(cell.directory), store, Signer(thief, Role.WORKER))
    with pytest.raises(Exception, match="names worker/thief, not a router"):
        RevisionGrantVerifier(store).check(grants.granted(ADAPTER, "acme").grant, "acme", REVISION)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no key"),
        ("a b", "write ID KEY"),
        ("x", "write ID KEY"),
        (f"a/b {A_KEY}", "write ID KEY"),
        (f"twice {A_KEY}\ntwice {A_KEY}\n", "write ID KEY"),
    ],
)
def test_files_that_are_no_job_keys_are_refused(tmp_path: Path, text: str, why: str) -> None:
    write_private(tmp_path / "job.key", text.encode())
    with pytest.raises(ValueError, match=why):
        JobKeys(tmp_path / "job.key")
    with pytest.raises(ValueError, match="No such file"):
        check_job_key(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="needs --job-key"):
        check_job_key("")


def test_a_key_that_is_added_within_the_same_tick_is_read(tmp_path: Path) -> None:
    keys, path = job_keys(tmp_path), tmp_path / "job.key"
    at = path.stat().st_mtime_ns
    path.write_text(path.read_text() + new_job_key("second"))
    os.utime(path, ns=(at, at))
    assert keys.look()
    assert keys.find("second") is not None
