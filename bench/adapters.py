"""Many adapters on few slots: `python -m bench.adapters [--quick] [--json FILE]`.

The 28 M model in bfloat16, adapters of ranks 2, 4 and 8 on q, k, v and o, 32 slots, at most 32 rows; requests of the
published multi-LoRA trace (trace.py). The engine runs without a cluster, in its own process. A whole cluster serves
only the measurement of the first token with an adapter that no worker has yet.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.adapter_engine import AdapterEngine, FirstTokens, Saturated, Saturation
from bench.adapter_loads import DecodingGaps, Loads, LoneFirstTokens, Swapping, percentile
from bench.adapter_tables import panels, row, saturated_rows
from bench.ceilings import CeilingMeter, CeilingSize
from bench.command import run_command
from bench.isolated import Isolated
from bench.limit import limit_s
from bench.models import LLAMA_28M, ModelShape, save_adapter, save_model
from bench.ours import ServedCluster
from bench.plots import BENCHMARKS_PAGE, PLOTS, draw
from bench.report import Aim, Report, progress
from bench.trace import Trace, random_request

AIMS = {
    "n1000_over_n5": Aim(at_least=0.85),
    "n1000_of_limit": Aim(),
    "itl_p99_ratio_during_loads": Aim(at_most=1.3),
    "ttft_cold_over_warm": Aim(at_most=1.5),
    "ttft_cold_store_over_warm": Aim(at_most=2.5),
    "ttft_cliff_ratio": Aim(at_most=2),
    "rss_growth_mb": Aim(at_most=20),
}
# Ranks of the adapters, in turn, and the linear layers that they change.
RANKS, LINEARS = (2, 4, 8), ("q_proj", "k_proj", "v_proj", "o_proj")
# Number of distinct adapter files. More adapters share them under their own digests, and each is read separately.
_FILES = 60
# Smallest and largest number of adapters: the few all fit into the slots, the many do not.
_FEW, _MANY = 5, 1000
# Tokens of a lone request's prompt.
_LONE_PROMPT = 64
# Active adapters a slot at which the time to the first token is measured.
_SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Setup:
    """The sizes of a run; fields in seconds are the lengths of one measurement."""

    shape: ModelShape
    counts: tuple[int, ...] = (_FEW, 100, _MANY)
    slots: int = 32
    rows: int = 32
    in_flight: int = 64
    lengths: tuple[int, int] = (8, 64)
    rounds: int = 2
    # Requests of a saturated run.
    requests: int = 400
    open_s: float = 5.0
    decoding_s: float = 5.0
    lone: int = 40
    lone_store: int = 20
    swaps: int = 10_000
    warm_up_swaps: int = 1_000
    ceilings: CeilingSize = field(default_factory=CeilingSize)

    @property
    def adapter_bytes(self) -> int:
        """Return the bytes of the largest adapter."""
        return int(2 * self.shape.adapter_parameters(max(RANKS), LINEARS))


FULL = Setup(LLAMA_28M)
QUICK = Setup(
    LLAMA_28M,
    counts=(_FEW, 100),
    rounds=1,
    requests=80,
    open_s=1.0,
    decoding_s=1.5,
    lone=8,
    lone_store=5,
    swaps=500,
    warm_up_swaps=200,
)
Engine = Isolated[Any, Any]


def main() -> None:
    """Run the benchmark with the command line's arguments; `--write-docs` writes its table and draws the plot."""
    run_command("adapters", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick), BENCHMARKS_PAGE)


def measure(setup: Setup, quick: bool) -> Report:
    """Make the model and its adapters, and run each scenario next to the one that it is compared with."""
    meter = CeilingMeter(setup.ceilings)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-bench-")))
        progress(f"making {setup.shape.name} and {_FILES} adapters")
        model = save_model(setup.shape, directory / setup.shape.name)
        adapters = [
            save_adapter(setup.shape, RANKS[index % len(RANKS)], directory / f"a{index}", index, LINEARS)
            for index in range(_FILES)
        ]
        with _isolated(setup, model, adapters, 2 * max(setup.counts)) as engine:
            saturated = _saturated(setup, engine, meter)
            lone = engine.run(LoneFirstTokens(setup.lone, max(setup.counts), 2 * setup.slots))
            gaps = _gaps(setup, engine)
            first_tokens = _first_tokens(setup, engine)
        progress(f"{setup.swaps} swaps")
        # Host memory holds only some of the adapters, so the others are read from their files again.
        with _isolated(setup, model, adapters, 4 * setup.slots) as engine:
            growth = engine.run(Swapping(setup.swaps, setup.warm_up_swaps, 6 * setup.slots))
        stored = _store_first_tokens(setup, model, adapters[: setup.lone_store])
    ceilings = meter.median()
    mean_rank = sum(RANKS) / len(RANKS)
    few, many = saturated[min(setup.counts)], saturated[max(setup.counts)]
    over_few = [run.tokens_per_s / other.tokens_per_s for run, other in zip(many, few, strict=True)]
    of_limit = [limit_s(run.steps, setup.shape, mean_rank, ceilings, LINEARS) / run.seconds for run in many]
    fits, twice = (median(first_tokens[share]) for share in (0.5, 2.0))
    rows = [
        *saturated_rows(saturated),
        *(row(f"gaps between tokens, {load.value}", "ms", [1e3 * gap for gap in gaps[load]]) for load in Loads),
        *(row(f"first token, adapter {where}", "ms", [1e3 * s for s in taken]) for where, taken in lone.items()),
        *(row(f"cluster: first token, {where}", "ms", [1e3 * s for s in taken]) for where, taken in stored.items()),
    ]
    return Report(
        name="adapters",
        command="python -m bench.adapters" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup) | {"ranks": RANKS, "linears": LINEARS, "dtype": "bfloat16"},
        rows=[
            *rows,
            *(
                row(f"first token, half the peak load, {share:g} adapters a slot", "ms", [1e3 * s for s in taken])
                for share, taken in first_tokens.items()
            ),
            *meter.rows(),
        ],
        page_rows=rows,
        ratios={
            "n1000_over_n5": median(over_few),
            "n1000_of_limit": median(of_limit),
            "itl_p99_ratio_during_loads": percentile(gaps[Loads.COLD], 99) / percentile(gaps[Loads.NONE], 99),
            "ttft_cold_over_warm": median(lone["in host memory"]) / median(lone["in a slot"]),
            "ttft_cold_store_over_warm": median(stored["in the store"]) / median(stored["in a slot"]),
            "ttft_cliff_ratio": twice / fits,
            "rss_growth_mb": growth,
        },
        aims=AIMS,
        draw=lambda: draw(panels(setup.slots, first_tokens), PLOTS / "adapters.svg", columns=1),
    )


def _isolated(setup: Setup, model: Path, adapters: Sequence[Path], host_adapters: int) -> Engine:
    return Isolated(partial(_engine, setup, model, adapters, host_adapters))


def _engine(
    setup: Setup, model: Path, adapters: Sequence[Path], host_adapters: int
) -> AbstractContextManager[AdapterEngine]:
    return closing(
        AdapterEngine(
            model,
            adapters,
            setup.shape.vocabulary,
            rows=setup.rows,
            adapter_slots=setup.slots,
            max_rank=max(RANKS),
            host_adapter_bytes=host_adapters * setup.adapter_bytes,
        )
    )


def _saturated(setup: Setup, engine: Engine, meter: CeilingMeter) -> dict[int, list[Saturation]]:
    """Return the runs by the number of adapters. The first round is a warm-up that loads adapters into host memory."""
    runs: dict[int, list[Saturation]] = {}
    engine.run(Saturated(Trace(max(setup.counts), 3 * max(setup.counts) + setup.in_flight, (1, 2)), 0, setup.in_flight))
    for turn in range(setup.rounds + 1):
        for count in setup.counts:
            meter.measure()
            trace = Trace(count, setup.requests + setup.in_flight, setup.lengths)
            run = engine.run(
                Saturated(trace, 1 + turn * len(setup.counts) + setup.counts.index(count), setup.in_flight)
            )
            progress(f"round {turn}: {count} adapters: {run.tokens_per_s:.0f} tokens/s, {run.swaps} swaps")
            if turn:
                runs.setdefault(count, []).append(run)
    return runs


def _gaps(setup: Setup, engine: Engine) -> dict[Loads, list[float]]:
    """Return the gaps between the decodes' tokens, by the adapters that arrive beside them."""
    gaps: dict[Loads, list[float]] = {}
    for turn in range(setup.rounds):
        for load in Loads:
            gaps.setdefault(load, []).extend(engine.run(DecodingGaps(load, setup.decoding_s, setup.slots // 2, turn)))
    return gaps


def _first_tokens(setup: Setup, engine: Engine) -> dict[float, list[float]]:
    """Return the seconds to the first token at half of the peak load, which is measured while all adapters fit."""
    requests = setup.requests + setup.in_flight
    active = {share: max(1, int(share * setup.slots)) for share in _SHARES}
    peak = engine.run(Saturated(Trace(active[0.5], requests, setup.lengths), 10_000, setup.in_flight))
    rate = peak.requests / peak.seconds / 2
    taken: dict[float, list[float]] = {}
    for turn in range(setup.rounds):
        for share in _SHARES:
            trace = Trace(active[share], max(10, int(rate * setup.open_s)), setup.lengths, rate=rate)
            prompts = 20_000 + turn * len(_SHARES) + _SHARES.index(share)
            times = engine.run(FirstTokens(trace, prompts, trace.requests // 5))
            progress(
                f"{rate:.1f} requests/s, {share:g} adapters a slot: first token after {1e3 * median(times):.1f} ms"
            )
            taken.setdefault(share, []).extend(times)
    return taken


def _store_first_tokens(setup: Setup, model: Path, adapters: Sequence[Path]) -> dict[str, list[float]]:
    """Return the seconds to the first token through a cluster: with adapters new to its worker, and once more."""
    taken: dict[str, list[float]] = {"in the store": [], "in a slot": []}
    progress("first tokens through a cluster")
    with ServedCluster(model, adapters, setup.rows) as cluster:
        for number in range(setup.lone_store):
            for turn, times in enumerate(taken.values()):
                seed = 30_000 + 2 * number + turn
                request = random_request(seed, _LONE_PROMPT, 1, number, setup.shape.vocabulary)
                times.append(cluster.first_token_s(request))
    # Without the first request, which is slower because the worker has not run before.
    return {where: times[1:] for where, times in taken.items()}


if __name__ == "__main__":
    main()
