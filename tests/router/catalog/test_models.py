"""Live workers while Redis is away, and after it has lost its data: none counts as dead too early."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.generation_config import UNSAID, GenerationConfig
from loraplex.contracts.broker.cells import parse_cells
from loraplex.contracts.broker.connection import RedisUnreachableError
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.liveness import CellLoad, Census, Liveness
from loraplex.contracts.broker.messages import AdapterRef, Job, WorkerPhase, WorkerState
from loraplex.contracts.broker.terms import QueueLimits
from loraplex.contracts.options import StoppingParams
from loraplex.router.catalog.cells import GONE_S, LOOK_S, CellServer, LiveWorkers, connect_cells
from loraplex.router.catalog.models import Models
from loraplex.router.catalog.store_client import Manifest, RegisteredModel
from loraplex.runtime.rpc.errors import InvalidField, Mismatch, NotFound, PermissionDenied, Unavailable
from loraplex.runtime.rpc.tasks import every
from tests.broker.test_liveness import worker
from tests.valkey_server import ValkeyServer

BASE = read_base_model("hash:?", "tiny")
KEYS = Keys("tiny", "main")


class OneModel:
    """A store in which one model is registered, or one under several names."""

    digest = BASE.digest

    names: tuple[str, ...] = (BASE.name,)

    tasks: tuple[str, ...] = ("generate",)

    config = UNSAID

    # Digests of the staged and former revisions.
    others: tuple[str, ...] = ()

    async def models(self) -> dict[str, list[RegisteredModel]]:
        live = RegisteredModel(self.digest, self.tasks, generation_config=self.config)
        return {name: [*(RegisteredModel(one, live=False) for one in self.others), live] for name in self.names}

    async def manifest(self, name: str) -> Manifest:
        sizes = (BASE.context_length, BASE.vocab_size)
        name, _, digest = name.partition("@")
        manifest = Manifest(name, digest or self.digest, BASE.architecture, *sizes, dict(BASE.files), tasks=self.tasks)
        return replace(manifest, generation_config=self.config)


class Router:
    """The part of a router that follows the workers, one look at a time. `live`: the incarnations of each look."""

    def __init__(self, redis: Redis, answer_s: float) -> None:
        # Seconds that the router's clock is ahead.
        self.ahead_s = 0.0
        self.store = OneModel()
        store: Any = self.store
        servers = [CellServer("main", redis)]
        self.models = Models(*(store, servers, QueueLimits()), answer_s=answer_s, clock=self._now)
        self.live: list[set[str]] = []

    def _now(self) -> float:
        return time.monotonic() + self.ahead_s

    async def look(self) -> list[str]:
        """Look at the workers; return the ids of those that the router counts as alive."""
        live = await self.models.look_at_workers()
        if live is not None:
            self.live.append(live)
        return [state.worker_id for state in self.models.workers("tiny")]


async def following(redis: Redis, answer_s: float = 1.0) -> Router:
    router = Router(redis, answer_s)
    router.models.announce("127.0.0.1:1")
    await serves_registered(router)
    return router


async def serves_registered(router: Router) -> None:
    """Follow the store until the router serves what is registered there."""
    serving = asyncio.create_task(every(LOOK_S, router.models.look_at_store))
    while not router.models.listed or not any(  # noqa: ASYNC110 — nothing reports it
        m.manifest.digest == router.store.digest for m in router.models.served
    ):
        await asyncio.sleep(0.01)
    serving.cancel()


@pytest.fixture
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("v"))
    await server.start()
    yield server
    await server.kill()


def serves(name: str) -> Any:
    return replace(worker(name), model="tiny", base_digest=BASE.digest)


async def test_a_router_that_has_not_read_the_store_yet_knows_no_model_but_denies_none(redis: Redis) -> None:
    """A stream that resumes there goes on elsewhere, or here a moment later."""
    router = Router(redis, answer_s=1.0)
    with pytest.raises(Unavailable) as early:
        router.models.get("tiny")
    assert early.value.reason == "NO_MODEL"
    await serves_registered(router)
    assert router.models.get("tiny").manifest.name == "tiny"
    with pytest.raises(NotFound):
        router.models.get("other")
    with pytest.raises(Unavailable) as resumed:
        router.models.with_digest("other", "sha256:0")
    assert resumed.value.reason == "NO_MODEL"


async def test_a_call_without_a_model_means_the_default_one_or_the_only_one(redis: Redis) -> None:
    router = await following(redis)
    assert router.models.get("").manifest.name == "tiny"
    router.store.names = ("tiny", "large")
    await router.models.look_at_store()
    with pytest.raises(InvalidField, match=r"name one of large, tiny \(or have an operator set default_model"):
        router.models.get("")
    router.models.default_model = lambda: "tiny"
    assert [router.models.get(name).manifest.name for name in ("", "large")] == ["tiny", "large"]
    router.models.default_model = lambda: "missing"
    with pytest.raises(NotFound, match="missing"):
        router.models.get("")


async def test_a_call_without_a_model_means_the_only_one_that_its_plans_allow(redis: Redis) -> None:
    router = await following(redis)
    router.store.names = ("tiny", "large")
    await router.models.look_at_store()
    router.models.refusal = lambda name, _: None if name == "large" else PermissionDenied(name)
    assert [model.manifest.name for model in router.models.allowed] == ["large"]
    assert router.models.get("").manifest.name == "large"
    for name in ("tiny", "missing"):
        with pytest.raises(PermissionDenied, match=name):
            router.models.get(name)
    alone = await following(redis)
    alone.models.refusal = router.models.refusal
    with pytest.raises(PermissionDenied, match="tiny"):
        alone.models.get("")


@pytest.mark.parametrize("loss", ["loses its data", "restarts empty"])
async def test_a_redis_that_knows_nobody_ends_nobody(server: ValkeyServer, loss: str) -> None:
    async with await server.client() as redis:
        router, liveness = await following(redis), Liveness(redis, KEYS)
        for name in ("w1", "w2"):
            await liveness.beat(serves(name))
        assert await router.look() == ["w1", "w2"]
        assert router.live == [{"w1-inc", "w2-inc"}]
        if loss == "restarts empty":
            await server.restart(keeps=False)
        else:
            await redis.flushall()
        await liveness.beat(serves("w2"))
        # A time to live has to pass first.
        assert sorted(await router.look()) == ["w1", "w2"]
        assert not router.models.waits_for()
        assert len(router.live) == 1
        router.ahead_s = 10
        assert await router.look() == ["w2"]
        assert router.live[1:] == [{"w2-inc"}]


async def test_a_redis_that_does_not_answer_ends_nobody_and_is_named(server: ValkeyServer) -> None:
    async with await server.client() as redis:
        router, liveness = await following(redis, answer_s=0.25), Liveness(redis, KEYS)
        await liveness.beat(serves("w1"))
        assert await router.look() == ["w1"]
        server.hang()
        assert await router.look() == ["w1"]
        assert not router.models.waits_for()
        router.ahead_s = 10
        assert await router.look() == ["w1"]
        assert router.models.waits_for() == "Redis to answer"
        server.wake()
        await redis.delete(KEYS.worker("w1-inc"))  # as its time to live would, meanwhile
        async with asyncio.timeout(60):
            while router.models.waits_for():
                assert await router.look() == ["w1"]
        assert len(router.live) == 1
        await redis.delete(*await redis.keys(KEYS.prefix + "roll:*"))  # as its time to live would
        for router.ahead_s in (20, 20 + GONE_S):
            assert await router.look() == []
        assert "a worker that serves tiny" in router.models.waits_for()
        assert router.live[1:] == [set(), set()]


async def test_a_worker_that_is_removed_is_gone_at_the_next_look(redis: Redis) -> None:
    router, liveness = await following(redis), Liveness(redis, KEYS)
    await liveness.beat(serves("w1"))
    assert await router.look() == ["w1"]
    assert not router.models.waits_for()
    await liveness.declare_dead("w1-inc")
    assert await router.look() == []
    assert not router.models.waits_for(), "it was there a moment ago"
    assert router.models.expects_worker("tiny")
    router.ahead_s = GONE_S
    assert await router.look() == []
    assert "a worker that serves tiny" in router.models.waits_for()
    assert not router.models.expects_worker("tiny")


OLD = replace(serves("old"), max_tokens=1000)
JOB = Job("j", "acme", "tiny", BASE.digest, "here", (1, 2), StoppingParams(100))


async def test_the_jobs_of_a_replaced_model_go_on_while_its_workers_live(redis: Redis) -> None:
    router, liveness = await following(redis), Liveness(redis, KEYS)
    models, former = router.models, router.models.get("tiny")
    await liveness.beat(OLD)
    await router.look()
    router.store.digest = "sha256:new"
    await serves_registered(router)
    assert models.get("tiny").manifest.digest == "sha256:new"
    assert models.with_digest("tiny", BASE.digest) is former
    assert models.why_unservable(JOB) is None
    # A draining worker takes no more, but what it runs needs the tokenizer.
    await liveness.beat(replace(OLD, phase=WorkerPhase.DRAINING))
    await router.look()
    assert models.with_digest("tiny", BASE.digest) is former
    waiting, begun = models.why_unservable(JOB), models.why_unservable(replace(JOB, attempt=2, emitted={0: (5,)}))
    assert isinstance(waiting, Unavailable)  # a new call gets the new model
    assert isinstance(begun, Mismatch)
    assert {waiting.reason, begun.reason} == {"BASE_REPLACED"}
    await liveness.declare_dead("old-inc")
    await router.look()
    with pytest.raises(Mismatch, match="replaced"):
        models.with_digest("tiny", BASE.digest)
    # Without any worker a job of the registered model waits for one.
    assert models.why_unservable(replace(JOB, base_digest="sha256:new")) is None


async def test_a_staged_revision_is_promoted_and_rolled_back_with_the_files_that_were_read(redis: Redis) -> None:
    router, liveness = await following(redis), Liveness(redis, KEYS)
    models, first = router.models, router.models.get("tiny")
    router.store.others = ("sha256:new",)
    await models.look_at_store()
    await router.look()
    assert models.get("tiny") is first
    assert models.revisions("tiny") == [first]  # no worker serves the other one yet
    await liveness.beat(OLD)
    await liveness.beat(replace(OLD, worker_id="new", incarnation="new-inc", base_digest="sha256:new"))
    await router.look()
    _, staged = models.revisions("tiny")
    assert [state.worker_id for state in models.serving("tiny")] == ["old"]
    for live, other in ((staged, first), (first, staged)):
        router.store.digest, router.store.others = live.manifest.digest, (other.manifest.digest,)
        await models.look_at_store()
        assert models.revisions("tiny") == [live, other]
        assert models.get("tiny") is live
        assert models.with_digest("tiny", other.manifest.digest) is other
    await liveness.declare_dead("new-inc")
    await router.look()
    assert models.revisions("tiny") == [first]
    assert models.with_digest("tiny", "sha256:new") is staged  # the store has it


async def test_a_router_that_never_had_the_replaced_manifest_sends_a_resume_elsewhere(redis: Redis) -> None:
    router = await following(redis)
    with pytest.raises(Unavailable):  # it has not looked at the workers yet
        router.models.with_digest("tiny", "sha256:old")
    await Liveness(redis, KEYS).beat(replace(OLD, base_digest="sha256:old"))
    await router.look()
    with pytest.raises(Unavailable):
        router.models.with_digest("tiny", "sha256:old")


async def test_a_job_that_is_larger_than_each_live_worker_is_unservable(redis: Redis) -> None:
    router, liveness = await following(redis), Liveness(redis, KEYS)
    await liveness.beat(replace(serves("small"), max_tokens=102, max_rank=8))
    await liveness.beat(replace(serves("low"), max_tokens=500, max_rank=4))
    await router.look()
    adapter = AdapterRef("r", "sha256:a", 8, 1)
    assert router.models.why_unservable(replace(JOB, adapter=adapter)) is None
    longer = replace(JOB, stopping=StoppingParams(101))
    assert router.models.why_unservable(longer) is None
    # The first worker takes the rank, the second the length; none takes both.
    error = router.models.why_unservable(replace(longer, adapter=adapter))
    assert isinstance(error, Unavailable)
    assert error.reason == "NO_WORKER_FITS"


async def test_a_manifest_that_is_registered_again_with_its_tasks_is_read_again(redis: Redis) -> None:
    """The digest stays: a version without tasks had registered the model."""
    router = Router(redis, 1.0)
    for tasks in (("generate",), ("generate", "embed")):
        router.store.tasks = tasks
        await router.models.look_at_store()
        assert router.models.get("tiny").manifest.tasks == tasks
    assert router.models.with_digest("tiny", BASE.digest) is router.models.get("tiny")


@pytest.mark.parametrize("used", [True, False])
async def test_what_a_generation_config_says_is_followed_and_logged_once(
    redis: Redis, caplog: pytest.LogCaptureFixture, used: bool
) -> None:
    """The digest stays where a model is registered again with another."""
    caplog.set_level(logging.INFO)
    router = Router(redis, 1.0)
    router.models.use_generation_config = used
    await router.models.look_at_store()
    assert router.models.get("tiny").generation_config == UNSAID
    for temperature in (0.5, 0.7):
        router.store.config = GenerationConfig(do_sample=True, temperature=temperature, max_new_tokens=9)
        for _ in range(2):
            await router.models.look_at_store()
        served = router.models.get("tiny")
        assert served.generation_config == (router.store.config if used else UNSAID)
        assert [served.default_max_tokens(default) for default in (128, 7)] == ([9, 9] if used else [128, 7])
    told = [record.getMessage() for record in caplog.records if "generation_config.json" in record.getMessage()]
    assert told == [
        f"requests for tiny that leave them unset get the values of its generation_config.json: temperature "
        f"{temperature}, max_tokens 9 (not with --generation-config none)"
        for temperature in ((0.5, 0.7) if used else ())
    ]


class Censuses:
    """The liveness of a model whose census answers once `asked` censuses have begun; None: never."""

    def __init__(self, asked: asyncio.Barrier | None) -> None:
        self._asked = asked

    async def take_census(self, router: str, busy: float | None) -> Census:
        await (self._asked.wait() if self._asked else asyncio.get_running_loop().create_future())
        return Census("server", [serves("w1")])


async def test_the_models_of_a_slow_redis_are_looked_at_side_by_side() -> None:
    asked = asyncio.Barrier(3)
    models: Any = {(name, "main"): Censuses(asked) for name in ("a", "b", "c")}
    assert await LiveWorkers(time.monotonic, answer_s=100.0).look(models, "") == {"w1-inc"}


async def test_a_model_whose_census_fails_ends_nobody_and_leaves_the_others_served() -> None:
    now = 0.0
    live = LiveWorkers(lambda: now, answer_s=0.01)
    models: Any = {("fails", "main"): Censuses(None), ("answers", "main"): Censuses(asyncio.Barrier(1))}
    for _ in range(3):
        now += 2.0
        assert await live.look(models, "") is None
    assert not live.redis_is_away
    assert live.of("answers") == [serves("w1")]
    assert live.of("fails") is None


class Cell:
    """A cell's Redis: the workers that its census tells, None where it hangs, or an error that it raises."""

    def __init__(self, *workers: str) -> None:
        self.workers: list[WorkerState] | None = [serves(name) for name in workers]
        self.error: Exception | None = None
        self.arrivals = 0

    async def take_census(self, router: str, busy: float | None) -> Census:
        if self.error is not None:
            raise self.error
        if self.workers is None:
            await asyncio.get_running_loop().create_future()
        return Census("server", [*(self.workers or ())], load=CellLoad(arrivals=self.arrivals))


class TwoCells:
    """The looks at a model in two cells, at a time that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.main, self.second = Cell("w1"), Cell("w2")
        self.live = LiveWorkers(lambda: self.now_s, answer_s=0.05)

    async def look(self, seconds: float = 0.0) -> set[str] | None:
        """Let time pass, and look."""
        self.now_s += seconds
        cells: Any = {("tiny", "main"): self.main, ("tiny", "second"): self.second}
        return await self.live.look(cells, "")

    def known(self) -> list[str]:
        return [state.worker_id for state in self.live.of("tiny") or ()]


async def test_a_cell_that_fails_stops_no_look_at_the_others_and_its_workers_count_until_it_is_away() -> None:
    cells = TwoCells()
    assert await cells.look() == {"w1-inc", "w2-inc"}
    cells.second.error = RedisConnectionError("away")
    cells.main.workers = [serves("w3")]
    assert await cells.look(1.0) == {"w3-inc", "w2-inc"}, "w1 is lost, w2 may live"
    sights = cells.live.sights()
    assert [sights["tiny", name].answers for name in ("main", "second")] == [True, False]
    assert (await cells.look(1.0), cells.known()) == ({"w3-inc", "w2-inc"}, ["w3", "w2"])
    assert (await cells.look(1.5), cells.known()) == ({"w3-inc"}, ["w3"])
    assert (cells.live.is_away("second"), cells.live.redis_is_away) == (True, False)
    cells.second.error, cells.second.workers = None, []
    assert await cells.look(0.5) == {"w3-inc", "w2-inc"}, "it has not had the time to beat again"
    cells.second.workers = [serves("w2")]
    assert (await cells.look(0.5), cells.known()) == ({"w3-inc", "w2-inc"}, ["w3", "w2"])


async def test_no_call_waits_for_a_worker_that_drained_before_it_was_gone() -> None:
    cells = TwoCells()
    cells.second.workers = []
    await cells.look()
    cells.main.workers = []
    await cells.look(1.0)
    assert cells.live.expects("tiny", serves("w1").base_digest)
    cells.main.workers = [replace(serves("w1"), phase=WorkerPhase.DRAINING)]
    await cells.look(1.0)
    cells.main.workers = []
    await cells.look(1.0)
    assert not cells.live.expects("tiny", serves("w1").base_digest)


async def test_a_router_that_looks_late_waits_for_a_worker_from_the_first_look_without_it() -> None:
    cells = TwoCells()
    await cells.look()
    cells.main.workers = cells.second.workers = []
    await cells.look(2 * GONE_S)
    assert cells.live.expects("tiny", serves("w1").base_digest)
    await cells.look(GONE_S)
    assert not cells.live.expects("tiny", serves("w1").base_digest)


async def test_calls_wait_for_a_worker_that_was_lost_while_another_one_drains() -> None:
    cells = TwoCells()
    await cells.look()
    cells.main.workers, cells.second.workers = [], [replace(serves("w2"), phase=WorkerPhase.DRAINING)]
    await cells.look(1.0)
    assert cells.live.expects("tiny", serves("w1").base_digest)


@pytest.mark.parametrize("returns", [False, True])
async def test_a_worker_that_claims_nothing_for_a_while_is_waited_for_for_long_only_if_it_returns(
    returns: bool,
) -> None:
    cells = TwoCells()
    cells.second.workers = []
    await cells.look()
    cells.main.workers = [replace(serves("w1"), phase=WorkerPhase.FAILING, returns=returns)]
    await cells.look(1.0)
    assert cells.live.expects("tiny", serves("w1").base_digest)
    await cells.look(2 * GONE_S)
    assert cells.live.expects("tiny", serves("w1").base_digest) is returns
    assert bool(cells.live.sizes("tiny", serves("w1").base_digest)) is returns, "jobs of its size wait for it"


async def test_where_all_cells_are_away_no_worker_counts_as_dead() -> None:
    cells = TwoCells()
    await cells.look()
    cells.main.error = cells.second.error = RedisConnectionError("away")
    assert await cells.look(1.0) is None
    assert await cells.look(5.0) is None
    assert (cells.live.redis_is_away, cells.known()) == (True, ["w1", "w2"])


async def test_a_cell_that_hangs_delays_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.router.catalog.cells.LOOK_S", 0.01)
    cells = TwoCells()
    cells.live = LiveWorkers(lambda: cells.now_s, answer_s=600.0)
    await cells.look()
    cells.second.workers, cells.main.workers = None, [serves("w3")]
    assert await cells.look() == {"w3-inc", "w2-inc"}
    assert cells.live.sights()["tiny", "second"].answers
    assert await cells.look(1.0) == {"w3-inc", "w2-inc"}
    assert not cells.live.sights()["tiny", "second"].answers, "it is late"
    assert await cells.look(2.5) == {"w3-inc"}
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def test_the_jobs_of_a_cell_are_counted_over_some_seconds() -> None:
    cells = TwoCells()
    for arrivals in range(0, 3_000, 100):
        cells.main.arrivals = arrivals
        await cells.look(0.5)
    assert cells.live.jobs_per_s("tiny", "main") == pytest.approx(200)
    cells.main.arrivals = 5  # it lost its data
    await cells.look(0.5)
    assert cells.live.jobs_per_s("tiny", "main") == 0


async def test_a_router_starts_while_a_cell_is_away_but_not_with_a_bad_url(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = parse_cells("main second=unix:///nowhere/valkey.sock")
    servers = await connect_cells(server.url, addresses)
    assert servers.names == ["main", "second"]
    assert len(servers.clients) == 2
    assert "--cells second unix:///nowhere/valkey.sock: no answer" in caplog.text
    for client in servers.clients:
        await client.aclose()
    same = await connect_cells(server.url, parse_cells(f"main second={server.url}"))
    assert same.clients == {same.home}, "one server, one client"
    await same.home.aclose()
    with pytest.raises(RedisUnreachableError, match=r"--cells second http://h: http:// is not one of redis://"):
        await connect_cells(server.url, parse_cells("main second=http://h"))
