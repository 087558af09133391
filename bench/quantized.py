"""Quantized bases and layouts of linear layers on the CPU: `python -m bench.quantized [--quick] [--json FILE]`.

Decode: as many requests as rows, timed from the moment that all prompts are computed; the unquantized layouts one by
one, the one that is picked at start-up, int8 and int4; by rows, both schemes of 8 bits beside bfloat16. Requests:
prompts and answers of uneven length, our engine and, with `--peer FOLDER`, vLLM's CPU build in each of its dtypes,
which is installed in that folder, without adapters and with 8. What is compared runs in turn.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.command import command_parser, run_parsed
from bench.isolated import Answers, Isolated
from bench.models import QWEN2_04B, QWEN2_QUICK, ModelShape, save_adapter, save_model
from bench.quantized_engines import LAYOUTS, WORST, BandwidthMeter, decoding, serving
from bench.report import Aim, Report, progress
from bench.rounds import Case, Rounds
from bench.vllm_peer import DTYPES, add_peer_argument, start_peers
from bench.workload import Request, Workload
from loraplex.kernels.tiles import can_use_tiles

ADAPTERS, RANK = 8, 16
# Rows of decodes over 8 bits beside those of bfloat16, and the names of their schemes in ratios.
_ROWS, _CODES = (1, 8, 32), {"int8": "int8", "int8_dynamic": "int8-dynamic"}
AIMS = {
    "int8_over_best": Aim(at_least=1.6),
    "int4_over_best": Aim(at_least=2.2),
    **{f"{name}_over_bfloat16_{rows}": Aim(at_least=1.2) for name in _CODES for rows in _ROWS},
    "int8_of_limit": Aim(at_least=0.7),
    "int8_of_limit_with_one_row": Aim(),
    "auto_over_worst": Aim(),
    "best_passed_over_over_auto": Aim(at_most=1.05),
    "int8_mixed_over_base_mixed": Aim(),
    "base_over_vllm_best": Aim(at_least=1.3),
    "mixed_over_vllm_best": Aim(),
    "int8_mixed_over_vllm_best": Aim(at_least=4),
}
# Where the processor has AMX.
AIMS_WITH_AMX = {"mixed_over_vllm_best": Aim(at_least=5), "int8_mixed_over_vllm_best": Aim(at_least=8)}
_AUTO, _INT8, _INT4 = "decode, auto", "decode, int8", "decode, int4"
_INT8_ROW = "decode of one row, int8"
_BASE32, _BASE, _VLLM = "requests, float32", "requests, auto", "requests, vLLM "
_INT8_MIXED, _MIXED, _MIXED32 = "8 adapters, int8", "8 adapters, auto", "8 adapters, float32"
_VLLM_MIXED = "8 adapters, vLLM "
# Environment variables that switch AVX-512 off in torch's own kernels, its BLAS, oneDNN, and numba's kernels, in turn.
_WITHOUT_AVX512 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "OPENBLAS_CORETYPE": "Haswell",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse2,+sse3,+sse4.1,+sse4.2,+ssse3",
}


@dataclass(frozen=True)
class Setup:
    """The model, the rows of a batch, and the sizes of the work; `worst_tokens` are those of the slowest layout."""

    shape: ModelShape
    workload: Workload
    rows: int = 8
    prompt: int = 16
    tokens: int = 32
    worst_tokens: int = 8
    rounds: int = 3

    def decodes(self, number: int, rows: int, tokens: int) -> list[Request]:
        """Draw requests that decode together, one for each row."""
        return Workload(rows, self.prompt, tokens, tokens).draw(number, self.shape.vocabulary)


FULL = Setup(QWEN2_04B, Workload(requests=16, long=40))
QUICK = Setup(QWEN2_QUICK, Workload(requests=8, prompt=16, long=20), tokens=16, worst_tokens=4, rounds=1)


def main() -> None:
    """Run the benchmark with the command line's arguments."""
    parser = command_parser("quantized", __doc__ or "")
    add_peer_argument(parser)
    parser.add_argument("--without-avx512", action="store_true", help="as on a processor that has only AVX2")
    if "--without-avx512" in sys.argv and not _WITHOUT_AVX512.items() <= os.environ.items():
        # The libraries read these when they are loaded.
        again = [sys.executable, "-m", "bench.quantized", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | _WITHOUT_AVX512)
    run_parsed(parser, lambda given: measure(QUICK if given.quick else FULL, given.quick, given.peer))


def measure(setup: Setup, quick: bool, peer: Path | None = None) -> Report:
    """Make the model and its adapters, start everything, run all cases in turn."""
    shape = setup.shape
    meter, rounds = BandwidthMeter(), Rounds()
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as directory:
        progress(f"making {shape.name} and {ADAPTERS} adapters of rank {RANK}")
        model = save_model(shape, Path(directory, shape.name))
        adapters = [save_adapter(shape, RANK, Path(directory, f"a{index}"), seed=index) for index in range(ADAPTERS)]
        # The engines of all three would take 30 GB.
        with ExitStack() as stack:
            rounds.run(_decodes(setup, stack, model), setup.rounds, between=meter.measure)
        with ExitStack() as stack:
            rounds.run(_decodes_by_rows(setup, stack, model), setup.rounds)
        with ExitStack() as stack:
            rounds.run(_base_requests(setup, stack, model, peer), setup.rounds)
        with ExitStack() as stack:
            rounds.run(_mixed_requests(setup, stack, model, adapters, peer), setup.rounds)
    flags = (" --quick" if quick else "") + (" --peer FOLDER" if peer else "")
    return Report(
        name="quantized",
        command=f"python -m bench.quantized{flags}",
        quick=quick,
        setup=asdict(setup) | {"adapters": ADAPTERS, "rank": RANK},
        rows=[*rounds.rows(), meter.row()],
        page_rows=rounds.rows(),
        ratios=_ratios(setup, rounds, meter),
        aims=AIMS | (AIMS_WITH_AMX if can_use_tiles() else {}),
    )


def _decodes(setup: Setup, stack: ExitStack, model: Path) -> list[Case]:
    """Start the engines that decode, and return their cases."""

    def case(name: str, dtype: str, quantize: str = "", layout: str | None = None, rows: int = setup.rows) -> Case:
        engine = stack.enter_context(Isolated(partial(decoding, model, rows, dtype, quantize, layout)))
        tokens = setup.worst_tokens if layout == WORST else setup.tokens
        return Case(name, lambda number: engine.run(setup.decodes(number, rows, tokens)))

    progress("loading the model in every layout")
    cases = [case(f"decode, {layout.name}", layout.dtype, layout=layout.name) for layout in LAYOUTS]
    quantized = [case(_INT8, "auto", "int8"), case(_INT4, "auto", "int4"), case(_INT8_ROW, "auto", "int8", rows=1)]
    return [*cases, case(_AUTO, "auto"), *quantized]


def _decodes_by_rows(setup: Setup, stack: ExitStack, model: Path) -> list[Case]:
    """Start an engine in bfloat16 and over each scheme of 8 bits, and return the cases of few and of many rows."""

    def case(scheme: str, engine: Answers, rows: int) -> Case:
        return Case(_by_rows(scheme, rows), lambda number: engine.run(setup.decodes(number, rows, setup.tokens)))

    engines = {
        scheme: stack.enter_context(Isolated(partial(decoding, model, max(_ROWS), "auto", scheme, None)))
        for scheme in ("", *_CODES.values())
    }
    return [case(scheme, engine, rows) for rows in _ROWS for scheme, engine in engines.items()]


def _by_rows(scheme: str, rows: int) -> str:
    return f"decode of {rows} rows, {scheme or 'bfloat16'}"


def _base_requests(setup: Setup, stack: ExitStack, model: Path, peer: Path | None) -> list[Case]:
    """Start the engines of whole requests without adapters, and return their cases."""
    forms = {_BASE32: ("float32", ""), _BASE: ("auto", "")}
    return _requests(setup, stack, model, (), forms, _VLLM, peer)


def _mixed_requests(
    setup: Setup, stack: ExitStack, model: Path, adapters: Sequence[Path], peer: Path | None
) -> list[Case]:
    """Start the engines of whole requests with adapters, and return their cases."""
    forms = {_MIXED32: ("float32", ""), _MIXED: ("auto", ""), _INT8_MIXED: ("auto", "int8")}
    return _requests(setup, stack, model, adapters, forms, _VLLM_MIXED, peer)


def _requests(
    setup: Setup,
    stack: ExitStack,
    model: Path,
    adapters: Sequence[Path],
    forms: Mapping[str, tuple[str, str]],
    of_peer: str,
    peer: Path | None,
) -> list[Case]:
    progress(f"loading the model for requests with {len(adapters)} adapters")
    engines: dict[str, Answers] = {
        name: stack.enter_context(Isolated(partial(serving, model, adapters, setup.rows, *options)))
        for name, options in forms.items()
    }
    vocabulary = setup.shape.vocabulary
    if peer is not None:
        trial = setup.workload.draw(0, vocabulary, len(adapters))
        peers = start_peers(stack, peer, model, setup.rows, trial, adapters)
        engines |= {of_peer + dtype: engine for dtype, engine in peers.items()}

    def case(name: str, engine: Answers) -> Case:
        return Case(name, lambda number: engine.run(setup.workload.draw(number, vocabulary, len(adapters))))

    return [case(name, engine) for name, engine in engines.items()]


def _ratios(setup: Setup, rounds: Rounds, meter: BandwidthMeter) -> dict[str, float]:
    unquantized = [f"decode, {layout.name}" for layout in LAYOUTS]
    best, passed_over = rounds.fastest((*unquantized, _AUTO)), rounds.fastest(unquantized)
    vllm, vllm_mixed = (rounds.fastest(name + dtype for dtype in DTYPES) for name in (_VLLM, _VLLM_MIXED))
    # A step gives a token to each row, and reads every weight once: the head's are not quantized.
    step_bytes = setup.shape.linear_parameters + 2 * setup.shape.head_parameters
    steps_per_s = meter.bytes_per_s() / step_bytes
    pairs = {
        "int8_over_best": (_INT8, best),
        "int4_over_best": (_INT4, best),
        "auto_over_worst": (_AUTO, f"decode, {WORST}"),
        "best_passed_over_over_auto": (passed_over, _AUTO),
        "int8_mixed_over_base_mixed": (_INT8_MIXED, _MIXED),
        "base_over_vllm_best": (_BASE, vllm),
        "mixed_over_vllm_best": (_MIXED, vllm_mixed),
        "int8_mixed_over_vllm_best": (_INT8_MIXED, vllm_mixed),
    }
    of_bytes = {
        f"{name}_over_bfloat16_{rows}": (_by_rows(scheme, rows), _by_rows("", rows))
        for name, scheme in _CODES.items()
        for rows in _ROWS
    }
    ratios = {key: rounds.ratio(ours, other) for key, (ours, other) in (pairs | of_bytes).items() if ours and other}
    return ratios | {
        "int8_of_limit": rounds.tokens_per_s(_INT8) / (setup.rows * steps_per_s),
        "int8_of_limit_with_one_row": rounds.tokens_per_s(_INT8_ROW) / steps_per_s,
    }


if __name__ == "__main__":
    main()
