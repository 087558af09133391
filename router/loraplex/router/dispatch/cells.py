"""The cells that a router sends its jobs to: chosen by broker/cells.py from what the last look saw."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from loraplex.contracts.broker.cells import Backlog, CellSight, CellView, DrainedCells, choose_cell
from loraplex.contracts.broker.messages import Job, WorkerPhase, WorkerState
from loraplex.contracts.broker.terms import work_of
from loraplex.runtime.telemetry.logging import LogOnce

log = logging.getLogger(__name__)

# Maximum number of workers that may fail a job for a fault of their own: each costs a moment.
WORKERS_TRIED = 3


@dataclass(slots=True)
class _Cell:
    """A cell for jobs of one base model: the ids of its workers by their size, maximum tokens and rank."""

    view: CellView
    sizes: Mapping[tuple[int, int], Set[str]]
    is_open: bool
    answers: bool
    away: bool

    def takes(self, job: Job) -> bool:
        """Tell whether a worker there that has not failed a job can take it."""
        return any(
            job.tokens <= most_tokens and job.rank <= most_rank and not workers <= set(job.failed_at)
            for (most_tokens, most_rank), workers in self.sizes.items()
        )


class Cells:
    """The cells of a router, by their names; one cell alone costs nothing.

    `linked` returns those of some workers that may claim this router's jobs.
    """

    def __init__(
        self,
        names: Sequence[str] = ("main",),
        linked: Callable[[Sequence[WorkerState]], Sequence[WorkerState]] = lambda states: states,
        drained_cells: DrainedCells | None = None,
    ) -> None:
        self.names = tuple(names)
        self._linked = linked
        self._drained_cells = drained_cells
        self._sights: Mapping[tuple[str, str], CellSight] = {}
        self._backlogs: dict[tuple[str, str], Backlog] = {}
        self.drained: frozenset[str] = frozenset()
        # Those whose Redis has not answered since the last look, for a job.
        self._failed: set[str] = set()
        # By model and base digest, since the last look.
        self._of_base: dict[tuple[str, str], list[_Cell]] = {}
        self._log_once = LogOnce(log)

    def update(
        self,
        sights: Mapping[tuple[str, str], CellSight],
        waiting: Iterable[tuple[Job, str]],
    ) -> None:
        """Take a look at the cells; `waiting`: this router's waiting jobs, each with its cell."""
        if len(self.names) == 1:
            return
        self._sights = sights
        own: dict[tuple[str, str], dict[str, float]] = {}
        for job, cell in waiting:
            works = own.setdefault((job.model, cell), {})
            works[job.tenant] = works.get(job.tenant, 0.0) + work_of(job)
        self._backlogs = {key: Backlog.of(sight.load, own.get(key, {})) for key, sight in sights.items()}
        self._failed.clear()
        self._of_base.clear()

    async def look_at_drained(self) -> None:
        """Read which cells are drained. Raises an error of REDIS_DOWN; then those stay drained that were."""
        if self._drained_cells is not None:
            self.note_drained(await self._drained_cells.read())

    async def drain(self, name: str) -> bool:
        """Drain a cell for all routers; False where it is the last open one. Raises an error of REDIS_DOWN."""
        others = [other for other in self.names if other != name]
        is_drained = bool(others and self._drained_cells and await self._drained_cells.drain(name, others))
        await self.look_at_drained()
        return is_drained

    async def open(self, name: str) -> None:
        """Open a cell for all routers. Raises an error of REDIS_DOWN."""
        if self._drained_cells is not None:
            await self._drained_cells.open(name)
            await self.look_at_drained()

    def note_drained(self, names: Collection[str]) -> None:
        """Take the names of the drained cells."""
        drained = frozenset(names).intersection(self.names)
        if len(drained) == len(self.names):  # a router whose --cells others do not have
            self._log_once(f"all cells are drained: {', '.join(self.names)}; all get jobs until one is opened")
            drained = frozenset()
        if drained != self.drained:
            self.drained = drained
            self._of_base.clear()

    def choose(self, job: Job, former: str = "") -> str:
        """Return the cell that gets a job, or its next attempt, which waited or ran in the `former` one.

        A job that engines may have died of stays where it is known, if it can. One that workers could not serve has its
        last try elsewhere: the fault may be their cell's.
        """
        if len(self.names) == 1:
            return self.names[0]
        cells = self._candidates(job)
        if job.strikes and any(cell.view.name == former for cell in cells):
            return former
        if len(job.failed_at) == WORKERS_TRIED - 1:
            cells = [cell for cell in cells if cell.view.name != former] or cells
        digest = job.adapter.digest if job.adapter else ""
        work = work_of(job)
        chosen = choose_cell([cell.view for cell in cells], digest, job.job_id, job.tenant, work)
        chosen.backlog.place(job.tenant, job.rows, work)
        return chosen.name

    def failed(self, cell: str) -> None:
        """Note that a cell's Redis did not answer: until the next look others get the jobs."""
        self._failed.add(cell)
        self._of_base.clear()

    def another(self, job: Job, cell: str) -> str | None:
        """Return a cell that can take a job whose cell's Redis did not answer; None: there is no other."""
        return self.choose(job) if self.fits_elsewhere(job, cell) else None

    def fits_elsewhere(self, job: Job, cell: str) -> bool:
        """Tell whether the workers of another cell can take a job."""
        return len(self.names) > 1 and any(one.view.name != cell for one in self._fit(job))

    def leaves_after_s(self, job: Job, cell: str, patience_s: float) -> float | None:
        """Return after which time in seconds a job that waits in a cell goes to another; None: it stays.

        At once where the cell is drained or away, after `patience_s` where no worker there can take the job.
        """
        if not self.fits_elsewhere(job, cell):
            return None
        here = next((one for one in self._all(job) if one.view.name == cell), None)
        if here is None or not here.is_open or here.away:
            return 0.0
        return None if here.takes(job) else patience_s

    def _candidates(self, job: Job) -> list[_Cell]:
        """Return the cells to choose from: if no workers can take the job, open cells, preferably reachable ones."""
        everywhere = self._all(job)
        return (
            self._fit(job)
            or [cell for cell in everywhere if cell.answers and cell.is_open]
            or [cell for cell in everywhere if cell.is_open]
        )

    def _fit(self, job: Job) -> list[_Cell]:
        """Return the cells whose workers can take the job; drained ones only where no others can."""
        fit = [cell for cell in self._all(job) if cell.answers and cell.takes(job)]
        return [cell for cell in fit if cell.is_open] or fit

    def _all(self, job: Job) -> list[_Cell]:
        key = job.model, job.base_digest
        if (cells := self._of_base.get(key)) is None:
            cells = self._of_base[key] = [self._cell(*key, name) for name in self.names]
        return cells

    def _cell(self, model: str, base_digest: str, name: str) -> _Cell:
        sight = self._sights.get((model, name))
        backlog = self._backlogs.setdefault((model, name), Backlog())
        is_open = name not in self.drained
        if sight is None:
            return _Cell(CellView(name, 0, 0, backlog), {}, is_open, answers=False, away=False)
        serving = [s for s in sight.workers if s.phase is WorkerPhase.SERVING and s.base_digest == base_digest]
        # By all of them, so that every router has the same ranking, whatever links it has just now.
        rows, used = sum(s.rows_limit for s in serving), sum(s.rows_running + s.rows_waiting for s in serving)
        sizes = defaultdict[tuple[int, int], set[str]](set)
        for state in self._linked(serving):
            sizes[state.max_tokens, state.max_rank].add(state.worker_id)
        return _Cell(
            CellView(name, rows, used, backlog), sizes, is_open, sight.answers and name not in self._failed, sight.away
        )
