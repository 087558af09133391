"""Answers that keep to JSON schemas against free ones: `python -m bench.structured [--quick] [--json FILE]`.

All requests of a round are structured, by four schemas in turn, or none is; both go through a whole cluster with one
worker. Lone requests then measure the time to the first token: free ones, and ones with a schema that is new to the
cluster. With `--peer FOLDER` vLLM's CPU build, which is installed in that folder, does the same in the same rounds.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Protocol

import torch

from bench.command import command_parser, run_parsed
from bench.models import QWEN2_04B, ModelShape, save_model
from bench.ours import ServedCluster
from bench.report import Aim, Report, progress
from bench.rounds import Case, Rounds, Timed
from bench.structured_compile import compile_seconds
from bench.structured_schemas import SCHEMAS, schema_text
from bench.tokenizer import END_ID, save_tokenizer
from bench.vllm_peer import VllmPeer, add_peer_argument
from bench.workload import Request

AIMS = {
    "structured_over_plain": Aim(at_least=0.92),
    "first_token_ratio": Aim(at_most=1.5),
    "compile_p50_ms": Aim(),
    "compile_p99_ms": Aim(),
    "peer_structured_over_plain": Aim(),
    "peer_first_token_ratio": Aim(),
    "structured_over_peer": Aim(),
}
_OURS, _PEER = "cluster", "vLLM"
_PLAIN, _STRUCTURED, _NEW = "free", "structured", "new schema"


@dataclass(frozen=True)
class Setup:
    """The model, and the sizes of the work. `lone`: pairs of lone requests; `compiled`: schemas that are compiled."""

    shape: ModelShape
    rows: int = 32
    prompt: int = 24
    tokens: int = 32
    rounds: int = 3
    lone: int = 20
    compiled: int = 200

    def requests(self, number: int, *, structured: bool) -> list[Request]:
        """Draw the requests of a run, one for each row."""
        chance = random.Random(number)
        return [self._request(chance, schema_text(row) if structured else None) for row in range(self.rows)]

    def lone_request(self, number: int, case: str) -> Request:
        """Draw a lone request for one token."""
        schema = schema_text(number, f"field_{number}") if case == _NEW else None
        return replace(self._request(random.Random(f"{case} {number}"), schema), tokens=1)

    def _request(self, chance: random.Random, schema: str | None) -> Request:
        prompt = tuple(chance.randrange(1, self.shape.vocabulary) for _ in range(self.prompt))
        return Request(prompt, self.tokens, json_schema=schema)


FULL = Setup(replace(QWEN2_04B, name="qwen2-0.4b-128k", vocabulary=128_000))
# With heads of 64, the smallest that the peer serves.
QUICK = Setup(ModelShape("tiny-8k", "qwen2", 2, 128, 256, 2, 1, 8_192, 8_192), rows=8, rounds=1, lone=4, compiled=20)


class Served(Protocol):
    """A server of free and structured answers: our cluster, or the peer."""

    def run(self, requests: Sequence[Request]) -> Timed:
        """Answer the requests and time them."""

    def first_token_s(self, request: Request) -> float:
        """Return the seconds from a lone request to its first token."""


def main() -> None:
    """Run the benchmark with the command line's arguments."""
    parser = command_parser("structured", __doc__ or "")
    add_peer_argument(parser)
    run_parsed(parser, lambda given: measure(QUICK if given.quick else FULL, given.quick, given.peer))


def measure(setup: Setup, quick: bool, peer: Path | None = None) -> Report:
    """Make the model, start a cluster and the peer, run all cases in turn."""
    dtype = fastest_dtype()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-bench-")))
        model = save_structured_model(setup.shape, directory / setup.shape.name)
        compiled = compile_seconds((model / "tokenizer.json").read_bytes(), setup.shape.vocabulary, setup.compiled)
        progress(f"starting a cluster with {setup.shape.name} in {dtype}")
        servers: dict[str, Served] = {_OURS: stack.enter_context(ServedCluster(model, (), setup.rows, dtype))}
        if peer is not None:
            try:
                servers[_PEER] = stack.enter_context(VllmPeer(peer, model, setup.rows, dtype))
            except RuntimeError as error:
                progress(f"without the peer: {error}")
        return report(setup, servers, compiled, quick, dtype)


def report(setup: Setup, servers: Mapping[str, Served], compiled: Sequence[float], quick: bool, dtype: str) -> Report:
    """Run all cases in turn; return the report of their figures and of the seconds that compilations took."""
    rounds = Rounds()
    rounds.run(_cases(setup, servers), setup.rounds)
    first_tokens = _first_tokens(setup, servers)
    times = {**first_tokens, "check, proof, compilation of a new schema": compiled}
    flags = (" --quick" if quick else "") + (" --peer FOLDER" if _PEER in servers else "")
    return Report(
        name="structured",
        command=f"python -m bench.structured{flags}",
        quick=quick,
        setup=asdict(setup) | {"schemas": list(SCHEMAS), "dtype": dtype},
        rows=[*rounds.rows(), *(_time_row(case, seconds) for case, seconds in times.items())],
        ratios={
            **_ratios(_OURS, rounds, first_tokens),
            "compile_p50_ms": median(compiled) * 1e3,
            "compile_p99_ms": _p99(compiled) * 1e3,
            **(_peer_ratios(rounds, first_tokens) if _PEER in servers else {}),
        },
        aims=AIMS,
    )


def fastest_dtype() -> str:
    """Return the dtype in which this processor computes fastest: bfloat16 is fast with AVX-512 or AMX alone."""
    return "bfloat16" if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else "float32"


def save_structured_model(shape: ModelShape, directory: Path) -> Path:
    """Write a model with random weights, a tokenizer of as many tokens and an end token; return the directory."""
    progress(f"making {shape.name} and a tokenizer of {shape.vocabulary:,} tokens")
    save_model(shape, directory)
    save_tokenizer(shape.vocabulary, directory)
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": {END_ID}}}\n')
    return directory


def _cases(setup: Setup, servers: Mapping[str, Served]) -> list[Case]:
    def case(server: str, kind: str) -> Case:
        structured = kind == _STRUCTURED
        return Case(
            f"{server}, {kind}", lambda number: servers[server].run(setup.requests(number, structured=structured))
        )

    return [case(server, kind) for server in servers for kind in (_PLAIN, _STRUCTURED)]


def _first_tokens(setup: Setup, servers: Mapping[str, Served]) -> dict[str, list[float]]:
    """Run lone requests of all cases in turn; return the seconds to their first tokens by case, without a warm-up."""
    seconds: dict[str, list[float]] = {}
    for number in range(setup.lone + 1):
        for name, server in servers.items():
            for kind in (_PLAIN, _NEW):
                taken = server.first_token_s(setup.lone_request(number, kind))
                if number:
                    seconds.setdefault(_first_token(name, kind), []).append(taken)
    progress(f"{setup.lone} lone requests of each case")
    return seconds


def _first_token(server: str, kind: str) -> str:
    return f"{server}, first token, {kind}"


def _ratios(server: str, rounds: Rounds, first_tokens: Mapping[str, Sequence[float]]) -> dict[str, float]:
    plain, new = (median(first_tokens[_first_token(server, kind)]) for kind in (_PLAIN, _NEW))
    return {
        "structured_over_plain": rounds.ratio(f"{server}, {_STRUCTURED}", f"{server}, {_PLAIN}"),
        "first_token_ratio": new / plain,
    }


def _peer_ratios(rounds: Rounds, first_tokens: Mapping[str, Sequence[float]]) -> dict[str, float]:
    of_peer = _ratios(_PEER, rounds, first_tokens)
    return {
        **{f"peer_{key}": value for key, value in of_peer.items()},
        "structured_over_peer": rounds.ratio(f"{_OURS}, {_STRUCTURED}", f"{_PEER}, {_STRUCTURED}"),
    }


def _time_row(case: str, seconds: Sequence[float]) -> Mapping[str, Any]:
    ms = [each * 1e3 for each in seconds]
    return {
        "case": case,
        "unit": "ms",
        "median": median(ms),
        "low": min(ms),
        "high": max(ms),
        "runs": len(ms),
        "p99": _p99(ms),
    }


def _p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


if __name__ == "__main__":
    main()
