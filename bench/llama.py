"""A real model on a CPU beside llama.cpp: `python -m bench.llama [--quick] [--peer FOLDER] [--json FILE]`.

SmolLM2-135M-Instruct and four adapters in clusters with a gateway and in llama.cpp's servers, in three dtypes each. One
client sends the same requests to one server after the other. The first run builds the peer in its folder.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import uvloop
from tokenizers import Tokenizer

from bench.command import command_parser, run_parsed
from bench.llama_load import Answered, Server, Work, agreement, read_text, send
from bench.llama_peer import DTYPES, VERSION, LlamaCpp, PeerMissingError
from bench.local_cluster import serving_cluster
from bench.models import ModelShape, save_adapter
from bench.report import Aim, Report, progress
from examples.real import ROOT, Unavailable, real_model
from loraplex.cli.local import ClusterSettings
from loraplex_client import AsyncStoreClient

ADAPTERS, RANK, ROWS = 4, 16, 8
TENANT = "bench"
# Our dtypes, and the schemes of their weights: the embeddings, which are the head too, are in 8 bits as in Q8_0.
OURS = {"auto": "", "int8": "int8+embeddings", "int4": "int4+embeddings"}
_OURS, _PEER = "ours ", "llama.cpp "
_AUTO, _INT8, _BF16 = f"{_OURS}auto", f"{_OURS}int8", f"{_PEER}{DTYPES[0]}"
# Tokens of a KV cache block.
_BLOCK = 16
AIMS = {
    "alone_over_llama_best": Aim(at_least=1.3),
    "base_over_llama_best": Aim(at_least=1.6),
    "mixed_over_llama_best": Aim(at_least=3),
    "int8_over_bfloat16": Aim(at_least=1.2),
    "long_alone_over_llama_best": Aim(),
    "long_base_over_llama_best": Aim(),
    "long_mixed_over_llama_best": Aim(),
    "first_token_over_llama_best": Aim(at_most=1),
    "first_tokens_alike": Aim(at_least=0.8),
}

# The runs of a work, by server.
Runs = Mapping[str, Sequence[Answered]]


@dataclass(frozen=True)
class Setup:
    """The kinds of requests, with short prompts and with long ones; the number of dtypes of each side."""

    works: Sequence[Work]
    dtypes: int = len(DTYPES)

    def work(self, adapters: int, at_once: int, *, long: bool = False) -> Work:
        """Return one kind of requests."""
        prompts = [work.prompt for work in self.works]
        prompt = max(prompts) if long else min(prompts)
        return next(
            work for work in self.works if (work.prompt, work.adapters, work.at_once) == (prompt, adapters, at_once)
        )

    @property
    def context(self) -> int:
        """Return the maximum tokens of a prompt with its answer, in whole blocks."""
        longest = max(work.prompt + work.tokens for work in self.works)
        return -(-longest // _BLOCK) * _BLOCK


def works(
    prompt: int,
    side_by_side: int,
    alone: int,
    rounds: int,
    tokens: int = 64,
    adapters: Sequence[int] = (0, 1, ADAPTERS),
) -> list[Work]:
    """Return the kinds of requests with such prompts and answers: so many side by side, and so many one by one."""
    return [
        Work(prompt, count, at_once, requests, tokens, rounds)
        for count in adapters
        for at_once, requests in ((1, alone), (ROWS, side_by_side))
    ]


FULL = Setup([*works(100, 16, 2, rounds=2), *works(2_000, 8, 1, rounds=1, adapters=(0, ADAPTERS))])
QUICK = Setup([*works(32, 4, 1, rounds=1, tokens=8), *works(128, 2, 1, rounds=1, tokens=8)], dtypes=2)


def main() -> None:
    """Run the benchmark with the command line's arguments, or say in a line why it cannot be run here."""
    parser = command_parser("llama", __doc__ or "")
    parser.add_argument(
        "--peer", type=Path, metavar="FOLDER", default=ROOT / ".cache" / "llama", help="where llama.cpp is, or is built"
    )
    try:
        run_parsed(parser, lambda given: measure(QUICK if given.quick else FULL, given.quick, given.peer))
    except (PeerMissingError, Unavailable) as error:
        progress(f"bench.llama is left out: {error}")


def measure(setup: Setup, quick: bool, folder: Path) -> Report:
    """Make what is served, start all servers, run all works. Raises PeerMissingError, Unavailable, LaunchError."""
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as directory:
        peer = LlamaCpp(folder, Path(directory))
        model = real_model()
        progress(f"converting {model.name} and {ADAPTERS} adapters of rank {RANK}")
        shape = _shape(model)
        adapters = [save_adapter(shape, RANK, Path(directory, f"a{seed}"), seed) for seed in range(ADAPTERS)]
        files = peer.convert(model)
        converted = [peer.convert_adapter(adapter, model) for adapter in adapters]
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runs = runner.run(_measure(setup, tokenizer, _Sides(setup, model, adapters, peer, files, converted)))
    rows = rows_of(runs, tokenizer)
    return Report(
        name="llama",
        command="python -m bench.llama" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup) | {"model": model.name, "adapters": ADAPTERS, "rank": RANK, "llama.cpp": VERSION},
        rows=rows,
        page_rows=[row for row in rows if row["unit"] == "tokens/s"],
        ratios=ratios_of(setup, runs, tokenizer),
        aims=AIMS,
    )


def _shape(model: Path) -> ModelShape:
    """Return the shape that a Llama's config.json tells."""
    config = json.loads((model / "config.json").read_text())
    return ModelShape(
        model.name,
        "llama",
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        mlp=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        vocabulary=config["vocab_size"],
        context=config["max_position_embeddings"],
    )


@dataclass(frozen=True)
class _Sides:
    """The model and the adapters, in the files of both sides."""

    setup: Setup
    model: Path
    adapters: Sequence[Path]
    peer: LlamaCpp
    files: Mapping[str, Path]
    converted: Sequence[Path]

    @asynccontextmanager
    async def ours(self, quantize: str) -> AsyncIterator[Server]:
        """Run a cluster that has the base in a scheme, and the adapters."""
        blocks = str(ROWS * self.setup.context // _BLOCK)
        flags = ("--rows", str(ROWS), "--kv-blocks", blocks, f"--quantize={quantize}")
        settings = ClusterSettings(str(self.model), port=0, store_port=0, http_port=0, worker_flags=flags)
        async with (
            serving_cluster(settings, quantize=quantize) as cluster,
            AsyncStoreClient(cluster.store, TENANT) as store,
        ):
            for adapter in self.adapters:
                await store.push(adapter, adapter.name)
            yield Server(cluster.http, {"model": self.model.name}, [{"model": of.name} for of in self.adapters])

    @asynccontextmanager
    async def theirs(self, dtype: str) -> AsyncIterator[Server]:
        """Run llama.cpp's server with the base in a dtype, and the adapters."""
        serving = self.peer.serving(self.files[dtype], self.converted, ROWS, self.setup.context)
        # Adapters that a request does not name have scale 0, but only if it names one.
        none = {"cache_prompt": False, "lora": [{"id": 0, "scale": 0.0}]}
        async with serving as address:
            yield Server(address, none, [none | {"lora": [{"id": i, "scale": 1.0}]} for i in range(ADAPTERS)])


async def _measure(setup: Setup, tokenizer: Tokenizer, sides: _Sides) -> dict[Work, Runs]:
    """Start all servers, and run all works."""
    text = read_text(tokenizer)
    async with AsyncExitStack() as stack:
        servers: dict[str, Server] = {}
        for (ours, quantize), theirs in list(zip(OURS.items(), DTYPES, strict=True))[: setup.dtypes]:
            progress(f"starting a cluster ({ours}) and llama.cpp ({theirs})")
            servers[_OURS + ours] = await stack.enter_async_context(sides.ours(quantize))
            servers[_PEER + theirs] = await stack.enter_async_context(sides.theirs(theirs))
        return {work: await _run(work, servers, text) for work in setup.works}


async def _run(work: Work, servers: Mapping[str, Server], text: Sequence[int]) -> Runs:
    """Send the same requests to one server after the other, other requests in every round.

    Round 0 warms up with a few tokens.
    """
    runs: dict[str, list[Answered]] = {name: [] for name in servers}
    for turn in range(work.rounds + 1):
        requests = work.draw(text, turn)
        for name, server in servers.items():
            if not turn:
                await send(server, [replace(request, tokens=2) for request in requests[:ADAPTERS]], work.at_once)
                continue
            run = await send(server, requests, work.at_once)
            progress(f"round {turn} of {work.rounds}: {work.name}: {name}: {run.tokens_per_s:.1f} tokens/s")
            runs[name].append(run)
    return runs


def rows_of(runs: Mapping[Work, Runs], tokenizer: Tokenizer) -> list[Mapping[str, Any]]:
    """Return three rows for each work: throughput with the widest spread of its rounds, first tokens, likeness."""
    rows: list[Mapping[str, Any]] = []
    for work, of in runs.items():
        spread = max((max(rates) - min(rates)) / median(rates) for rates in map(_rates, of.values()))
        speeds = {name: median(_rates(each)) for name, each in of.items()}
        rows.append({"case": work.name, "unit": "tokens/s"} | speeds | {"spread": f"{spread:.0%}"})
        rows.append({"case": work.name, "unit": "first token, s"} | {name: _first_token_s(of[name]) for name in of})
        alike = {name: _alike(of[name], of[_BF16], tokenizer) for name in of}
        rows.append({"case": work.name, "unit": "first 16 tokens as bf16's"} | alike)
    return rows


def ratios_of(setup: Setup, runs: Mapping[Work, Runs], tokenizer: Tokenizer) -> dict[str, float]:
    """Return the ratios of our fastest dtype over the peer's fastest, each for its kind of requests."""
    found = {}
    for prefix, long in (("", False), ("long_", True)):
        for name, adapters, at_once in (("alone", 0, 1), ("base", 0, ROWS), ("mixed", ADAPTERS, ROWS)):
            of = runs[setup.work(adapters, at_once, long=long)]
            found[f"{prefix}{name}_over_llama_best"] = _ratio(of, _fastest(of, _OURS), _fastest(of, _PEER))
    base = runs[setup.work(0, ROWS)]
    first_s = {
        side: min(_first_token_s(base[name]) for name in base if name.startswith(side)) for side in (_OURS, _PEER)
    }
    return found | {
        "int8_over_bfloat16": _ratio(base, _INT8, _AUTO),
        "first_token_over_llama_best": first_s[_OURS] / first_s[_PEER],
        "first_tokens_alike": _alike(base[_AUTO], base[_BF16], tokenizer),
    }


def _rates(runs: Sequence[Answered]) -> list[float]:
    return [run.tokens_per_s for run in runs]


def _fastest(of: Runs, side: str) -> str:
    return max((name for name in of if name.startswith(side)), key=lambda name: median(_rates(of[name])))


def _ratio(of: Runs, ours: str, other: str) -> float:
    """Return the median of the rounds' ratios."""
    return median(one / two for one, two in zip(_rates(of[ours]), _rates(of[other]), strict=True))


def _first_token_s(runs: Sequence[Answered]) -> float:
    return median(seconds for run in runs for seconds in run.first_token_s)


def _alike(runs: Sequence[Answered], others: Sequence[Answered], tokenizer: Tokenizer) -> float:
    """Return the mean share of first tokens that answers have in common with those of another server."""
    pairs = zip(runs, others, strict=True)
    return mean(agreement(tokenizer, run.texts, other.texts) for run, other in pairs)


if __name__ == "__main__":
    main()
