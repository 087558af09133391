"""Continuous batching against transformers and peft: `python -m bench.engine [--quick] [--json FILE]`.

32 requests of 64 prompt tokens; every eighth asks for 100 new tokens, the rest for 10; greedy, no end token. Our engine
and the peers run in turn; a ratio is the median of the rounds' ratios. The limit is the time of the same steps on a
machine that only reads weights or multiplies (see limit.py, ceilings.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from bench.bare_engine import BareEngine
from bench.ceilings import CeilingMeter, CeilingSize
from bench.command import run_command
from bench.isolated import Answers, Isolated
from bench.limit import limit_s
from bench.models import QWEN2_04B, QWEN2_QUICK, ModelShape, save_adapter, save_model
from bench.ours import ServedCluster
from bench.peers import ContinuousBatches, StaticBatches
from bench.report import Aim, Report, progress
from bench.rounds import Case, Rounds, Timed
from bench.workload import Workload

# Number and rank of the adapters.
ADAPTERS, RANK = 8, 16
AIMS = {
    "base_vs_hf_static": Aim(at_least=6),
    "base_vs_hf_continuous": Aim(at_least=2.7),
    "mixed_vs_peft_static": Aim(at_least=11),
    "mixed_over_base": Aim(at_least=0.80),
    "mixed_over_base_32": Aim(at_least=0.80),
    "distinct_over_identical": Aim(at_least=0.90),
    "base_of_limit": Aim(at_least=0.75),
    "mixed_of_limit": Aim(at_least=0.70),
    "cluster_over_engine": Aim(at_least=0.90),
}

# The cases' names in the tables.
_STATIC, _CONTINUOUS, _PEFT = "transformers, static", "transformers, continuous", "peft, mixed, static"
_BASE, _BASE_32 = "engine, base, batch 8", "engine, base, batch 32"
_MIXED, _MIXED_32 = "engine, 8 adapters, batch 8", "engine, 8 adapters, batch 32"
_IDENTICAL = "engine, 1 adapter, batch 8"
_CLUSTER = "cluster, 8 adapters, batch 8"


@dataclass(frozen=True)
class Setup:
    """The model, the requests, and the number of rounds after the warm-up.

    Static peers answer only the first `static_requests` of a round's requests, because all their batches are alike.
    """

    shape: ModelShape
    workload: Workload
    rounds: int
    static_requests: int = 8
    ceilings: CeilingSize = field(default_factory=CeilingSize)


FULL = Setup(QWEN2_04B, Workload(), rounds=3)
QUICK = Setup(QWEN2_QUICK, Workload(long=40), rounds=1)


def main() -> None:
    """Run the benchmark with the command line's arguments."""
    run_command("engine", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick))


def measure(setup: Setup, quick: bool) -> Report:
    """Make the model and its adapters, start everything, run all cases in turn."""
    meter, rounds = CeilingMeter(setup.ceilings), Rounds()
    with ExitStack() as stack:
        rounds.run(_cases(setup, stack), setup.rounds, between=meter.measure)
    ceilings = meter.median()
    of_limit = {
        key: median(limit_s(run.steps, setup.shape, RANK, ceilings) / run.seconds for run in rounds.runs[case])
        for key, case in (("base_of_limit", _BASE_32), ("mixed_of_limit", _MIXED_32))
    }
    return Report(
        name="engine",
        command="python -m bench.engine" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup) | {"adapters": ADAPTERS, "rank": RANK, "dtype": "bfloat16"},
        rows=[*rounds.rows(), *meter.rows()],
        page_rows=rounds.rows(),
        ratios=_ratios(rounds) | of_limit,
        aims=AIMS,
    )


def _cases(setup: Setup, stack: ExitStack) -> list[Case]:
    """Start the engines and return their cases, in an order that puts compared cases next to each other."""
    shape = setup.shape
    progress(f"making {shape.name} and {ADAPTERS} adapters of rank {RANK}")
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-bench-")))
    model = save_model(shape, directory / shape.name)
    adapters = [save_adapter(shape, RANK, directory / f"a{index}", seed=index) for index in range(ADAPTERS)]
    progress("loading the model into the engine, transformers, peft and a cluster")
    small, large, static, mixed_static, continuous = (
        stack.enter_context(Isolated(make))
        for make in (
            partial(_bare, model, adapters, rows=8),
            partial(_bare, model, adapters, rows=32),
            partial(_static, model),
            partial(_static, model, adapters),
            partial(ContinuousBatches, model),
        )
    )
    cluster = stack.enter_context(ServedCluster(model, adapters, rows=8))

    def case(name: str, answers: Answers, adapters: int = 0, requests: int | None = None) -> Case:
        def run(number: int) -> Timed:
            return answers.run(setup.workload.draw(number, shape.vocabulary, adapters)[:requests])

        return Case(name, run)

    return [
        case(_STATIC, static, requests=setup.static_requests),
        case(_BASE, small),
        case(_CONTINUOUS, continuous),
        case(_BASE_32, large),
        case(_MIXED_32, large, ADAPTERS),
        case(_PEFT, mixed_static, ADAPTERS, setup.static_requests),
        case(_IDENTICAL, small, 1),
        case(_MIXED, small, ADAPTERS),
        case(_CLUSTER, cluster, ADAPTERS),
    ]


def _bare(model: Path, adapters: Sequence[Path], rows: int) -> AbstractContextManager[BareEngine]:
    return closing(BareEngine(model, adapters, rows))


def _static(model: Path, adapters: Sequence[Path] = ()) -> AbstractContextManager[StaticBatches]:
    return nullcontext(StaticBatches(model, adapters))


def _ratios(rounds: Rounds) -> dict[str, float]:
    pairs = {
        "base_vs_hf_static": (_BASE, _STATIC),
        "base_vs_hf_continuous": (_BASE_32, _CONTINUOUS),
        "mixed_vs_peft_static": (_MIXED, _PEFT),
        "mixed_over_base": (_MIXED, _BASE),
        "mixed_over_base_32": (_MIXED_32, _BASE_32),
        "distinct_over_identical": (_MIXED, _IDENTICAL),
        "cluster_over_engine": (_CLUSTER, _MIXED),
    }
    return {key: rounds.ratio(*pair) for key, pair in pairs.items()}


if __name__ == "__main__":
    main()
