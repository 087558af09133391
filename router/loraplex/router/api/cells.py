"""The cells as operators see them: what waits in each, and the commands that drain and open one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from loraplex.cluster.v1 import cluster_pb2 as pb
from loraplex.contracts.broker.commands import Command, Verb
from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.messages import AdapterRequest, WorkerPhase, WorkerState
from loraplex.contracts.broker.terms import QueueLoad
from loraplex.router.catalog.models import Living, ModelCell, Models, ServedModel, asking_redis, redis_is_silent
from loraplex.router.dispatch.cells import Cells
from loraplex.runtime.rpc.errors import InvalidField, Mismatch


class CellCommands:
    """The operators' commands about cells. All raise Unavailable where Redis does not answer."""

    def __init__(self, models: Models, cells: Cells) -> None:
        self._models = models
        self._cells = cells

    async def queues(self) -> list[pb.Queue]:
        """Return what waits, for how long, and how many jobs run, by model and cell."""
        living = await self._models.living()
        states: dict[tuple[str, str], list[WorkerState]] = defaultdict(list)
        for model, cell, state in living.workers:
            states[model.manifest.name, cell.name].append(state)
        asked = [(model.manifest.name, cell) for model in self._models.served for cell in model.cells.values()]
        return [await self._queue(name, cell, states[name, cell.name], living) for name, cell in asked]

    async def _queue(self, model: str, cell: ModelCell, states: Sequence[WorkerState], living: Living) -> pb.Queue:
        load = None if cell.name in living.silent else await self._load(cell)
        shown = load or QueueLoad()
        is_open = cell.name not in self._cells.drained
        serving = [state for state in states if state.phase is WorkerPhase.SERVING]
        return pb.Queue(
            model=model,
            waiting=shown.waiting,
            running=sum(state.rows_running for state in states),
            waiting_work=int(shown.waiting_work),
            arrived_work=int(shown.arrived_work),
            claimed_work=int(shown.claimed_work),
            oldest_wait=shown.oldest_wait_s,
            cell=cell.name,
            state=pb.CELL_STATE_AWAY if load is None else pb.CELL_STATE_OPEN if is_open else pb.CELL_STATE_DRAINED,
            workers=len(serving),
            rows=sum(state.rows_limit for state in serving),
            jobs_per_second=self._models.live.jobs_per_s(model, cell.name) if load else 0.0,
        )

    async def _load(self, cell: ModelCell) -> QueueLoad | None:
        """Return what waits in a cell; None where its Redis does not answer, and there are others."""
        try:
            return await cell.queue.load()
        except REDIS_DOWN as error:
            if len(self._cells.names) == 1:
                raise redis_is_silent() from error
            return None

    async def drain(self, name: str) -> None:
        """Send no more jobs to a cell. Raises InvalidField, or Mismatch where no other cell could take its jobs."""
        self._check(name)
        others = [other for other in self._cells.names if other != name]
        for model in self._models.served:
            self._check_others(model.manifest.name, name, [one for one in others if one not in self._cells.drained])
        with asking_redis():
            drained = await self._cells.drain(name)
        if not drained:
            raise Mismatch(f"cells/{name}", "it is the last open cell; open another one first", reason="LAST_CELL")

    def _check_others(self, model: str, name: str, others: Sequence[str]) -> None:
        """Raise Mismatch where workers of a model serve in the named cell alone."""
        serves = {cell: bool(self._models.serving(model, cell=cell)) for cell in (name, *others)}
        if others and serves[name] and not any(serves[cell] for cell in others):
            where = f"the other open cells ({', '.join(others)})" if len(others) > 1 else f"cell {others[0]}"
            message = f"no worker of {model} serves in {where}: start one there first"
            raise Mismatch(f"cells/{name}", message, reason="NO_OTHER_CELL")

    async def open(self, name: str) -> int:
        """Send jobs to a cell again, whose workers keep what is pinned in other cells too.

        Returns the number of pins that were copied. Raises InvalidField.
        """
        self._check(name)
        with asking_redis():
            copied = [await self._copy_pins(model, model.cells[name]) for model in self._models.served]
            await self._cells.open(name)
        return sum(copied)

    async def _copy_pins(self, model: ServedModel, cell: ModelCell) -> int:
        others = [other for other in self._models.reached(model) if other is not cell]
        elsewhere = {_key(pin): pin for other in others for pin in await other.queue.pins.list()}
        here = set(map(_key, await cell.queue.pins.list()))
        lacking = [pin for key, pin in elsewhere.items() if key not in here]
        for pin in lacking:
            await cell.queue.pins.pin(pin)
        # Workers that start later read the pins.
        for state in await cell.liveness.live_workers() if lacking else ():
            for pin in lacking:
                if pin.adapter.rank <= state.max_rank:
                    await cell.queue.commands.send(state.incarnation, Command(Verb.PIN, pin))
        return len(lacking)

    def _check(self, name: str) -> None:
        if name not in self._cells.names:
            known = f"this router serves {', '.join(self._cells.names)}"
            raise InvalidField(
                "cell", f"{name!r} is not a cell of --cells: {known}" if name else f"name a cell: {known}"
            )


def _key(pin: AdapterRequest) -> tuple[str, str]:
    return pin.adapter.digest, pin.tenant
