"""Redis as the cluster sees it: a server with the shipped functions, and all that can happen to it.

Calls take time, wait while the server is stopped, and fail while it is down; an answer may be lost though the call was
carried out, which clients then repeat as the real ones do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from random import Random
from typing import Any

import msgspec
from redis.exceptions import ConnectionError as RedisConnectionError

from bench.in_process.redis import Client, Command, Server
from loraplex.contracts.broker.claims import begin_apart
from loraplex.contracts.broker.functions import LIBRARY
from loraplex.contracts.broker.keys import LEDGER, Keys, key_account
from loraplex.contracts.broker.messages import Job, SealError
from loraplex.contracts.broker.terms import HELD_MS, PRIORITY_LIMIT, SEALED_JOB_S, QueueLimits
from loraplex.router.quotas.quotas import Facts
from tests.simulation.loop import NODE, Node
from tests.simulation.network import Network

# Maximum number of retries, and seconds between them: those of broker.connection.
_RETRIES = 3
_RETRY_S = 0.05


@dataclass(frozen=True)
class Held:
    """A reservation of a call, the router that has it, and the time in seconds at which it was granted."""

    id: str
    router: Node
    granted_s: float


# The reservations of the story whose call runs, by account, in the order of its calls.
HELD: ContextVar[dict[str, list[Held]] | None] = ContextVar("HELD", default=None)


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """What an event charges, to which accounts; `cost` is in nano-units of the currency."""

    accounts: frozenset[str]
    model: str
    revision: str
    input: int
    cached: int
    output: int
    cost: int

    @property
    def tokens(self) -> int:
        """Return the tokens."""
        return self.input + self.output


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job in the queue. `turn` is that of a newcomer of a tenant whose keys have weights."""

    tenant: str
    attempt: int
    priority: int
    key: str
    key_weight: float
    work: float
    turn: int | None


class SimulatedRedis:
    """A server and its network. `node` is its process: frozen, it answers later."""

    def __init__(self, chance: Random, network: Network, cell: Keys, limits: QueueLimits | None = None) -> None:
        self.node = Node("redis")
        self.down = False
        # Seconds that each call and each answer takes beside the network's delay.
        self.slow_s = 0.0
        # Processes that do not reach it.
        self.cut_off: set[Node] = set()
        # Workers that refuse the seals of all jobs that they claim.
        self.refusing: set[str] = set()
        # Time in seconds for which a job's seal is valid, and number of those that a worker found older.
        self.seal_s = SEALED_JOB_S
        self.seals_expired = 0
        # Called with every attempt that is put into the queue, and whether it goes before newcomers.
        self.enqueued: Callable[[Job, bool], None] = lambda job, leads: None
        # Called with each claimed job, and the digests that its worker has, as a claim names them.
        self.claimed: Callable[[Job, str], None] = lambda job, resident: None
        # Called after each claim.
        self.scanned: Callable[[], None] = lambda: None
        # Reservations of tokens, in their order: accounts, times, amounts and routers.
        self.granted: list[tuple[str, int, int, str]] = []
        # Losses of data: the times since which it is gone, and at which it was lost.
        self.losses: list[tuple[int, int]] = []
        # Usage events by id.
        self.events: dict[str, UsageEvent] = {}
        # Times of the loop at which routers counted what they last told of reservations, by router and id.
        self.told_s: dict[tuple[Node, str], float] = {}
        # Time in ms that the server's clock is ahead.
        self.ahead_ms = 0
        # Which start of which server it is.
        self.run = 0
        # The jobs by their bodies, and the times at which these were sealed.
        self.jobs: dict[bytes, Job] = {}
        self._sealed_ms: dict[bytes, int] = {}
        # The calls of the ledger: by their messages the callers' processes, reservations and times.
        self.callers: dict[bytes, tuple[Node | None, dict[str, list[Held]] | None, float]] = {}
        self.cell, self.limits = cell, limits
        self._chance = chance
        self._network = network
        self._saved: tuple[Any, int] | None = None
        self._waiting_tenants: dict[str, bool] = {}
        # Calls that wait at the server, and the processes whose they are.
        self._blocked: dict[asyncio.Task[Any], Node | None] = {}
        self.server = Server(lambda: self.now_ms)
        self.client = SimulatedClient(self)

    @property
    def now_ms(self) -> int:
        """Return the server's own time."""
        return self.right_ms + self.ahead_ms

    @property
    def right_ms(self) -> int:
        """Return the time of routers and workers."""
        return self.ms_of(asyncio.get_running_loop().time())

    @staticmethod
    def ms_of(time_s: float) -> int:
        """Return the time of a right clock at a time of the loop."""
        return 1_700_000_000_000 + round(time_s * 1e3)

    def wipe(self) -> None:
        """Remove all data."""
        self.losses.append((self.now_ms, self.now_ms))
        self.run += 1
        self._waiting_tenants.clear()
        self.server.start(str(self.run))

    def restart(self) -> None:
        """Start again, with the data."""
        self.down = False
        self.run += 1
        self.server.start(str(self.run), self.server.data)

    def save(self) -> None:
        """Keep what a replica has that lags from now on."""
        self._saved = self.server.copy(), self.now_ms

    def roll_back(self) -> None:
        """A failover to that replica."""
        self.run += 1
        data = self.server.data
        self._waiting_tenants.clear()
        if self._saved is not None:
            (data, saved_ms), self._saved = self._saved, None
            self.losses.append((saved_ms, self.now_ms))
        self.server.start(str(self.run), data)

    def lost(self, node: Node) -> None:
        """A process ended: its calls that wait at the server end too."""
        for task in [task for task, one in self._blocked.items() if one is node]:
            task.cancel()

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Carry commands out at the server, even if the caller is cancelled meanwhile, unless they wait there.

        Raises RedisConnectionError.
        """
        if commands[0][0] == "BLPOP":
            outcome = await self._outcome(commands)
        else:
            outcome = await asyncio.shield(asyncio.get_running_loop().create_task(self._outcome(commands)))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _outcome(self, commands: Sequence[Command]) -> list[Any] | Exception:
        """Return the answers, or an error that nobody may be left to hear of."""
        for retry in range(_RETRIES + 1):
            try:
                return await self._try(commands)
            except RedisConnectionError as error:
                if retry == _RETRIES:
                    return error
                await asyncio.sleep(_RETRY_S * 2**retry)
            except Exception as error:
                return error
        raise AssertionError

    async def _try(self, commands: Sequence[Command]) -> list[Any]:
        await asyncio.sleep(self._network.delay_s() + self.slow_s)
        if self._is_away():
            raise RedisConnectionError("refused")
        if self.node.frozen or commands[0][0] == "BLPOP":
            answers = await self._wait(commands)
        else:
            answers = [self._carry_out(command) for command in commands]
        await asyncio.sleep(self._network.delay_s() + self.slow_s)
        if self._is_away():
            raise RedisConnectionError("the answer was lost")
        return answers

    def _is_away(self) -> bool:
        """Tell whether the process that calls does not reach it now."""
        return self.down or NODE.get() in self.cut_off

    async def _wait(self, commands: Sequence[Command]) -> list[Any]:
        """Carry commands out once the server runs and has what they wait for."""
        task = self.node.start(self._carry_out_later(commands))
        self._blocked[task] = NODE.get()
        try:
            return await task
        finally:
            del self._blocked[task]

    async def _carry_out_later(self, commands: Sequence[Command]) -> list[Any]:
        run, answers = self.run, []
        for command in commands:
            answers.append(await self.server.pop(command) if command[0] == "BLPOP" else self._carry_out(command))
            if self.down or self.run != run:
                raise RedisConnectionError("the server has ended")
        return answers

    def _carry_out(self, command: Command) -> Any:
        """Carry a command out, or a function that does what no command does; return the answer or error."""
        if callable(command[0]):
            return command[0]()
        answer = self.server.answer(command)
        if command[0] != "FCALL" or isinstance(answer, Exception):
            return answer
        name = command[1].removeprefix(LIBRARY.name + "_").removesuffix("_when_full")
        if name != "beat":
            self._waiting_tenants.clear()
        arguments = command[3 + command[2] :]
        match name:
            case "enqueue":
                self._note_queued(arguments, answer)
            case "admit":
                if answer[0]:
                    self._note_told(name, arguments[7], msgspec.msgpack.decode(answer[0]))
                self._note_queued(arguments, answer[1:])
            case "renew_job":
                self._sealed_ms[arguments[1]] = self.right_ms
            case "claim":
                self._note_claim(arguments, answer)
            case "ledger_reserve" | "ledger_tell":
                self._note_told(name, arguments[0], msgspec.msgpack.decode(answer))
        return answer

    def _note_queued(self, arguments: Sequence[Any], answer: Sequence[bytes]) -> None:
        if answer and answer[0] == b"queued":
            self._sealed_ms[arguments[6]] = self.right_ms
            leads = self.server.execute("ZSCORE", self.cell.prefix + "again", arguments[1]) is not None
            self.enqueued(self.jobs[arguments[6]], leads)

    def _note_claim(self, arguments: Sequence[Any], answer: list[Any]) -> None:
        jobs = [self.jobs[body] for body in answer[1]]
        if jobs and answer[11]:
            jobs[-1] = begin_apart(jobs[-1])
        for job in jobs:
            self.claimed(job, arguments[5])
        self.scanned()

    def check_seal(self, worker: str, body: bytes) -> None:
        """Raise SealError where a worker refuses a job's seal."""
        expires_at_ms = self._sealed_ms[body] + round(self.seal_s * 1e3)
        if self.right_ms >= expires_at_ms:
            self.seals_expired += 1
            raise SealError("SEAL_EXPIRED", "", expires_at_ms)
        if worker in self.refusing:
            raise SealError("KEY_UNKNOWN", "")

    def _note_told(self, name: str, packed: bytes, answer: Mapping[str, Any]) -> None:
        message = msgspec.msgpack.decode(packed)
        router, held, counted_at = self.callers[packed]
        self.told(name, message)
        if answer.get("behind") or answer.get("closed_ms") or "refused" in answer or router is None:
            return
        if granted := answer.get("reservation"):
            for account in granted["accounts"].split():
                held_now = granted["input"] - granted["used_input"] + granted["output"] - granted["used_output"]
                self.granted.append((account, self.now_ms, held_now, router.name))
                if held is not None:
                    held.setdefault(account, []).append(Held(granted["id"], router, counted_at))
        told = [message["reservation"]] if granted else message["reservations"]
        for one in told:
            key = router, one["id"]
            self.told_s[key] = max(self.told_s.get(key, 0.0), counted_at)

    def read_usage(self) -> None:
        """Take the events of the stream; of two with the same id the larger counts."""
        for _, entry in self.server.execute("XRANGE", LEDGER + "usage", "-", "+"):
            fields = dict(zip(entry[::2], entry[1::2], strict=True))
            facts = msgspec.json.decode(fields[b"facts"], type=Facts)
            accounts = frozenset({facts.tenant, *([key_account(facts.key)] if facts.key else [])})
            numbers = (int(fields.get(name, b"0")) for name in (b"input", b"cached", b"output", b"cost"))
            event = UsageEvent(accounts, facts.model, facts.adapter_revision, *numbers)
            name = fields[b"id"].decode()
            self.events[name] = max(self.events.get(name, event), event, key=attrgetter("tokens"))
        self.server.execute("DEL", LEDGER + "usage")

    def look(self, account: str) -> dict[str, int]:
        """Return the numbers of an account, once reservations of routers that died have ended: time passes here."""
        nobody = {"router": "nobody", "number": 0, "reservations": [], "accounts": [], "events": []}
        self._tell_ledger({**nobody, "step": "open"})
        for _ in range(12):
            self.ahead_ms += HELD_MS // 4
            self._tell_ledger({**nobody, "step": "", "renews": True})
        packed = self.server.execute("GET", f"{LEDGER}account:{account}")
        return msgspec.msgpack.decode(packed, type=dict[str, Any]) if packed else {}

    @staticmethod
    def told(name: str, message: Mapping[str, Any]) -> None:
        """Do nothing: tests note the ledger's calls."""

    def _tell_ledger(self, message: Mapping[str, Any]) -> None:
        self.server.execute("FUNCTION LOAD", LIBRARY.text)
        self.server.execute("FCALL", f"{LIBRARY.name}_ledger_tell", 0, msgspec.msgpack.encode(message))

    def have_waiting(self, tenants: Iterable[str]) -> dict[str, bool]:
        """Return which tenants have newcomers that wait."""
        found = self._waiting_tenants
        for tenant in tenants:
            if tenant not in found:
                found[tenant] = bool(self.server.execute("EXISTS", f"{self.cell.prefix}queue:{tenant}"))
        return found

    def find(self, job_id: str) -> WaitingJob | None:
        """Return a waiting job."""
        facts = self.server.execute("HGET", self.cell.job(job_id), "facts")
        if facts is None:
            return None
        # 20 is the number of fields that broker/lua/jobs.lua packs.
        tenant, *_, key, key_weight, place, _, work, _, _ = msgspec.msgpack.decode(b"\xdc\x00\x14" + facts)
        attempt, has_turn = int(self.server.execute("HGET", self.cell.job(job_id), "attempt")), place[3:4] == ":"
        priority = PRIORITY_LIMIT - int(place[:3]) if place != job_id else 0
        return WaitingJob(
            tenant, attempt, priority, key, key_weight, work, int(place[4:18]) if has_turn and place != job_id else None
        )

    def claimed_turn(self, tenant: str, priority: int) -> float:
        """Return the highest turn of a tenant's jobs that were claimed."""
        field = f"turn:{PRIORITY_LIMIT - priority:03d}"
        return float(self.server.execute("HGET", f"{self.cell.prefix}queue:{tenant}/keys", field) or 0)

    @property
    def waiting(self) -> int:
        """Return how many jobs wait."""
        return int(self.server.execute("ZCARD", self.cell.waiting))


class SimulatedClient(Client):
    """A client of the simulated server, in whose process its caller runs."""

    def __init__(self, redis: SimulatedRedis) -> None:
        super().__init__(redis.server)
        self.simulated = redis

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands over the simulated network."""
        return await self.simulated.send(commands)
