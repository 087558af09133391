"""Prompts on the CPU, alone and beside decodes: `python -m bench.prompts [--quick] [--json FILE] [--peer FOLDER]`.

Tokens of prompts a second, from the arrival of a run's prompts to the last one's first answered token, by their length,
without adapters and with 8, in float32, in the dtype that is picked for a bfloat16 model, and over weights of 8 bits,
with inputs rounded or not. With `--peer FOLDER` vLLM's CPU build, which is installed in that folder, answers the same
prompts without adapters in each of its dtypes (bench.quantized has it with adapters). The peak memory is that of a
process of its own. The first token of adapters that check a conversation of 2,000 tokens, which the base has answered:
of ordinary ones, and of activated ones.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.bare_engine import BareEngine
from bench.ceilings import CeilingMeter, CeilingSize
from bench.command import command_parser, run_parsed
from bench.isolated import Answers, Isolated
from bench.limit import limit_s, recorded_steps
from bench.models import QWEN2_04B, QWEN2_QUICK, ModelShape, save_adapter, save_model
from bench.peak_memory import peak_memory
from bench.report import Aim, Report, progress
from bench.rounds import Case, Rounds, Timed
from bench.vllm_peer import DTYPES, add_peer_argument, start_peers
from bench.workload import Request, Workload

ADAPTERS, RANK = 8, 16
# Keys without a length are of prompts of 512 tokens.
AIMS = {
    "prompt_over_vllm_best": Aim(at_least=1.1),
    "prompt_over_vllm_best_64": Aim(),
    "prompt_over_vllm_best_4096": Aim(),
    "int8_prompt_over_vllm_best": Aim(),
    "int8_over_bfloat16": Aim(at_least=1.2),
    "int8_dynamic_over_bfloat16": Aim(at_least=1.2),
    "prompt_of_ceiling": Aim(at_least=0.5),
    "mixed_prompt_over_base": Aim(at_least=0.85),
    "beside_decodes_over_alone": Aim(),
    "activated_first_token_over_ordinary": Aim(at_most=0.15),
    "five_activated_first_tokens_over_ordinary": Aim(),
    "peak_over_weights_mb": Aim(at_most=300),
    "int8_peak_over_weights_mb": Aim(at_most=300),
}
# Ours: the dtype and the scheme of quantization.
_FORMS = {
    "float32": ("float32", ""),
    "auto": ("auto", ""),
    "int8": ("auto", "int8"),
    "int8-dynamic": ("auto", "int8-dynamic"),
}
# Tokens that a decode beside prompts may answer: more than there are steps until the prompts end.
_ENDLESS = 1000
_DECODES, _DECODES_PROMPT = 8, 16
_ALONE, _BESIDE = "", ", beside decodes"
_BASE, _MIXED = "", f", {ADAPTERS} adapters"
# Tokens of a conversation, and of its check with the invocation.
_CONVERSATION, _CHECK = 2_000, 8
_CHECKERS = 5


@dataclass(frozen=True)
class Prompts:
    """Prompts of one length: how many come at once, alone and beside decodes, and in how many rounds they are timed."""

    tokens: int
    alone: int
    beside: int
    rounds: int


@dataclass(frozen=True)
class Setup:
    """The model, its prompts, the shortest first, and the length of those whose ratios are held."""

    shape: ModelShape
    prompts: tuple[Prompts, ...]
    main: int = 512
    ceilings: CeilingSize = field(default_factory=CeilingSize)

    @property
    def rows(self) -> int:
        """Return the rows of an engine: for all prompts of a run, and the decodes beside them."""
        return _DECODES + max(prompts.alone for prompts in self.prompts)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest prompts."""
        return max(prompts.tokens for prompts in self.prompts)


FULL = Setup(QWEN2_04B, (Prompts(64, 16, 4, 3), Prompts(512, 4, 1, 3), Prompts(4096, 1, 1, 1)))
QUICK = Setup(QWEN2_QUICK, (Prompts(64, 8, 2, 1), Prompts(512, 2, 1, 1)))


def main() -> None:
    """Run the benchmark with the command line's arguments."""
    parser = command_parser("prompts", __doc__ or "")
    add_peer_argument(parser)
    run_parsed(parser, lambda given: measure(QUICK if given.quick else FULL, given.quick, given.peer))


def measure(setup: Setup, quick: bool, peer: Path | None = None) -> Report:
    """Make the model and its adapters, start everything, run all cases in turn."""
    shape = setup.shape
    meter, rounds = CeilingMeter(setup.ceilings), Rounds()
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as directory:
        progress(f"making {shape.name} and {ADAPTERS} adapters of rank {RANK}")
        model = save_model(shape, Path(directory, shape.name))
        adapters = [save_adapter(shape, RANK, Path(directory, f"a{index}"), seed=index) for index in range(ADAPTERS)]
        peaks = {form: peak_memory(shape, model, _FORMS[form][1], setup.longest) for form in ("auto", "int8")}
        with ExitStack() as stack:
            ours = _engines(setup, stack, model, adapters)
            with _peers(setup, peer, model) as peers:
                for index, prompts in enumerate(setup.prompts):
                    cases = cases_of(prompts, shape, ours, peers)
                    # Shorter prompts have warmed up for longer ones.
                    rounds.run(cases, prompts.rounds, between=meter.measure, first_turn=min(1, index))
                rounds.run(checks_of(shape, ours["auto"]), setup.prompts[0].rounds, between=meter.measure, first_turn=1)
    rows = [*rounds.rows(), *meter.rows(), *(row for form, peak in peaks.items() for row in peak.rows(form))]
    return Report(
        name="prompts",
        command="python -m bench.prompts" + (" --quick" if quick else "") + (" --peer FOLDER" if peer else ""),
        quick=quick,
        setup=asdict(setup) | {"adapters": ADAPTERS, "rank": RANK, "decodes": _DECODES},
        rows=rows,
        page_rows=_page_rows(rows),
        ratios={
            **ratios_of(setup, rounds, meter),
            "peak_over_weights_mb": peaks["auto"].over_weights_mb,
            "int8_peak_over_weights_mb": peaks["int8"].over_weights_mb,
        },
        aims=AIMS,
    )


def _page_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a row for each form with its medians by the prompts' length."""
    forms: dict[str, dict[str, Any]] = {}
    for row in rows:
        length, of_tokens, form = row["case"].partition(" tokens, ")
        if of_tokens:
            forms.setdefault(form, {"tokens/s": form})[f"prompts of {length}"] = row["median"]
    return list(forms.values())


class PromptEngine(BareEngine):
    """An engine that is timed while it computes prompts: requests for one token; others decode meanwhile."""

    def run(self, requests: Sequence[Request]) -> Timed:
        """Time the prompts, from the moment that all decodes have begun; then abort these."""
        decodes, prompts = [[one for one in requests if (one.tokens == 1) == is_prompt] for is_prompt in (False, True)]
        self.add_requests(decodes)
        begun: set[str] = set()
        while len(begun) < len(decodes):
            begun.update(output.sequence_id for output in self.step() if output.token_ids)
        ended = 0
        with recorded_steps() as steps:
            start = time.perf_counter()
            self.add_requests(prompts, first=len(decodes))
            while ended < len(prompts):
                ended += sum(output.finish is not None for output in self.step())
            seconds = time.perf_counter() - start
        self.abort(decodes)
        return Timed(sum(len(prompt.prompt_ids) for prompt in prompts), seconds, tuple(steps))


def _engines(setup: Setup, stack: ExitStack, model: Path, adapters: Sequence[Path]) -> dict[str, Answers]:
    """Start an engine in each form."""
    progress("loading the model in every form")
    # A block of 16 tokens more for each row, for what is answered.
    tokens = _DECODES * (_DECODES_PROMPT + _ENDLESS) + max(
        prompts.alone * (prompts.tokens + 16) for prompts in setup.prompts
    )
    return {
        form: stack.enter_context(Isolated(partial(_engine, model, adapters, setup.rows, -(-tokens // 16), *options)))
        for form, options in _FORMS.items()
    }


def _engine(
    model: Path, adapters: Sequence[Path], rows: int, kv_blocks: int, dtype: str, quantize: str
) -> AbstractContextManager[PromptEngine]:
    return closing(PromptEngine(model, adapters, rows, dtype=dtype, quantize=quantize, kv_blocks=kv_blocks))


@contextmanager
def _peers(setup: Setup, folder: Path | None, model: Path) -> Iterator[dict[str, Answers]]:
    """Start the peer, if there is one, in each dtype that it answers in; gives its processes by their forms' names."""
    trial = Workload(1, 64, 1, 1).draw(0, setup.shape.vocabulary)
    with ExitStack() as stack:
        if folder is None:
            peers = {}
        else:
            peers = start_peers(stack, folder, model, setup.rows, trial, context=setup.longest + 16)
        yield {f"vLLM {dtype}": peer for dtype, peer in peers.items()}


def cases_of(
    prompts: Prompts, shape: ModelShape, ours: Mapping[str, Answers], peers: Mapping[str, Answers]
) -> list[Case]:
    """Return the cases of one length: ours and the peer's prompts alone, then ours beside decodes."""

    def alone(form: str, mixed: str, engine: Answers) -> Case:
        workload = Workload(prompts.alone, prompts.tokens, 1, 1)

        def run(number: int) -> Timed:
            timed = engine.run(workload.draw(number, shape.vocabulary, ADAPTERS if mixed else 0))
            # The peer counts what it answers.
            return replace(timed, tokens=prompts.alone * prompts.tokens)

        return Case(_name(prompts.tokens, form, mixed), run)

    def beside(form: str, mixed: str, engine: Answers) -> Case:
        workload = Workload(prompts.beside, prompts.tokens, 1, 1)
        decodes = Workload(_DECODES, _DECODES_PROMPT, _ENDLESS, _ENDLESS)

        def run(number: int) -> Timed:
            adapters = ADAPTERS if mixed else 0
            # A negative seed, so that they begin unlike the prompts.
            decoding = decodes.draw(-number, shape.vocabulary, adapters)
            return engine.run([*decoding, *workload.draw(number, shape.vocabulary, adapters)])

        return Case(_name(prompts.tokens, form, mixed, _BESIDE), run)

    return [
        *(alone(form, _BASE, engine) for form, engine in {**ours, **peers}.items()),
        *(alone(form, _MIXED, engine) for form, engine in ours.items()),
        *(beside(form, mixed, engine) for form, engine in ours.items() for mixed in (_BASE, _MIXED)),
    ]


def checks_of(shape: ModelShape, engine: Answers) -> list[Case]:
    """Return the cases of adapters that check a conversation which the base has answered: their first tokens."""

    def check(count: int, *, activated: bool) -> Case:
        def run(number: int) -> Timed:
            (conversation,) = Workload(1, _CONVERSATION, 1, 1).draw(number, shape.vocabulary)
            engine.run([conversation])
            (end,) = Workload(1, _CHECK, 1, 1).draw(-number, shape.vocabulary)
            prompt, at = conversation.prompt_ids + end.prompt_ids, _CONVERSATION if activated else 0
            return engine.run([Request(prompt, 1, index, invoked_at=at) for index in range(count)])

        return Case(_check_name(count, activated=activated), run)

    return [check(1, activated=False), check(1, activated=True), check(_CHECKERS, activated=True)]


def _check_name(count: int, *, activated: bool) -> str:
    return f"{count} {'activated' if activated else 'ordinary'} after {_CONVERSATION} of the base"


def _name(tokens: int, form: str, mixed: str = _BASE, where: str = _ALONE) -> str:
    return f"{tokens} tokens, {form}{mixed}{where}"


def ratios_of(setup: Setup, rounds: Rounds, meter: CeilingMeter) -> dict[str, float]:
    """Return the ratios of those pairs of cases that were run."""
    tokens = setup.main

    def best(of_tokens: int) -> str | None:
        return rounds.fastest(_name(of_tokens, f"vLLM {dtype}") for dtype in DTYPES)

    base, ceilings = _name(tokens, "auto"), meter.median()
    pairs = {
        "prompt_over_vllm_best": (base, best(tokens)),
        "prompt_over_vllm_best_64": (_name(64, "auto"), best(64)),
        "prompt_over_vllm_best_4096": (_name(4096, "auto"), best(4096)),
        "int8_prompt_over_vllm_best": (_name(tokens, "int8"), best(tokens)),
        "int8_over_bfloat16": (_name(tokens, "int8"), base),
        "int8_dynamic_over_bfloat16": (_name(tokens, "int8-dynamic"), base),
        "mixed_prompt_over_base": (_name(tokens, "auto", _MIXED), base),
        "beside_decodes_over_alone": (_name(tokens, "auto", where=_BESIDE), base),
    }
    ratios = {key: rounds.ratio(ours, other) for key, (ours, other) in pairs.items() if other}
    ordinary = rounds.runs[_check_name(1, activated=False)]
    for key, count in (("activated_first_token_over", 1), ("five_activated_first_tokens_over", _CHECKERS)):
        checks = zip(rounds.runs[_check_name(count, activated=True)], ordinary, strict=True)
        ratios[f"{key}_ordinary"] = median(check.seconds / other.seconds for check, other in checks)
    of_ceiling = [limit_s(run.steps, setup.shape, RANK, ceilings) / run.seconds for run in rounds.runs[base]]
    return ratios | {"prompt_of_ceiling": median(of_ceiling)}


if __name__ == "__main__":
    main()
