"""bench.prompts: only prompts are timed, beside decodes that go on; the peer's fastest dtype is the one that counts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from bench.ceilings import CeilingMeter, CeilingSize
from bench.models import TINY, save_adapter, save_model
from bench.prompts import PromptEngine, Prompts, Setup, cases_of, checks_of, ratios_of
from bench.rounds import Case, Rounds, Timed
from bench.vllm_peer import start_peers
from bench.workload import Request, Workload, answered_tokens

# Answers in float32 alone: in bfloat16 it loads the model and never answers.
PEER = f"""#!{sys.executable}
import json, sys
from threading import Event

print("{{}}", flush=True)
for line in sys.stdin:
    if sys.argv[4] == "bfloat16":
        Event().wait()
    print(json.dumps({{"tokens": sum(json.loads(line)["tokens"]), "seconds": 2.0}}), flush=True)
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[PromptEngine]:
    engine = PromptEngine(save_model(TINY, tmp_path / "model"), (), rows=6)
    yield engine
    engine.close()


@pytest.mark.model
def test_prompts_are_timed_and_the_decodes_beside_them_are_not(engine: PromptEngine) -> None:
    prompts = Workload(2, 40, 1, 1).draw(1, TINY.vocabulary)
    alone = engine.run(prompts)
    assert (alone.tokens, sum(step.tokens for step in alone.steps)) == (80, 80)
    prompts, decodes = Workload(2, 40, 1, 1).draw(2, TINY.vocabulary), Workload(3, 8, 500, 500).draw(3, TINY.vocabulary)
    beside = engine.run([*decodes, *prompts])
    assert beside.tokens == 80
    # Each step computes a token of each decode.
    assert sum(step.tokens for step in beside.steps) == 80 + 3 * len(beside.steps)
    # They end with the prompts.
    after = engine.run(Workload(2, 40, 1, 1).draw(4, TINY.vocabulary))
    assert sum(step.tokens for step in after.steps) == 80


@pytest.mark.model
def test_activated_adapters_find_what_the_base_has_computed(tmp_path: Path) -> None:
    adapters = [save_adapter(TINY, 4, tmp_path / f"a{index}", seed=index) for index in range(5)]
    with closing(PromptEngine(save_model(TINY, tmp_path / "model"), adapters, rows=6, kv_blocks=400)) as engine:
        for case, computed in zip(checks_of(TINY, engine), (2_008, 8, 40), strict=True):
            assert sum(step.tokens for step in case.run(1 + computed).steps) == computed


@pytest.mark.model
def test_the_faster_dtype_of_the_peer_counts() -> None:
    setup = Setup(TINY, (Prompts(64, 1, 1, 1), Prompts(512, 1, 1, 1)), ceilings=CeilingSize(2**20, 8))
    speeds = {"auto": 300, "auto, 8 adapters": 270, "auto, beside decodes": 150, "int8": 240, "int8-dynamic": 450}
    speeds |= {"vLLM float32": 100, "vLLM bfloat16": 200}
    rounds, meter = Rounds(), CeilingMeter(setup.ceilings)

    def case(name: str, tokens: int) -> Case:
        return Case(f"512 tokens, {name}", lambda _: Timed(tokens, 1.0))

    cases = [case(name, tokens) for name, tokens in speeds.items()]
    rounds.run(cases, 1, between=meter.measure)
    rounds.run(checks_of(TINY, Waiting()), 1)
    ratios = ratios_of(setup, rounds, meter)
    assert ratios.pop("prompt_of_ceiling") == 0.0
    assert ratios == {
        "prompt_over_vllm_best": 1.5,
        "int8_prompt_over_vllm_best": 1.2,
        "int8_over_bfloat16": 0.8,
        "int8_dynamic_over_bfloat16": 1.5,
        "mixed_prompt_over_base": 0.9,
        "beside_decodes_over_alone": 0.5,
        "activated_first_token_over_ordinary": 0.25,
        "five_activated_first_tokens_over_ordinary": 0.5,
    }


class Waiting:
    """An engine that takes longest for an ordinary adapter, and longer for several."""

    def run(self, requests: Sequence[Request]) -> Timed:
        return Timed(1, 4.0 if not requests[0].invoked_at else min(len(requests), 2))


class Counting:
    """An engine that counts what it answers, as the peer does."""

    def run(self, requests: Sequence[Request]) -> Timed:
        return Timed(answered_tokens(requests), 2.0)


def test_the_tokens_of_a_case_are_those_of_its_prompts() -> None:
    peers = {"vLLM float32": Counting()}
    prompts = Prompts(64, 4, 1, 1)
    (case,) = cases_of(prompts, TINY, {}, peers)
    assert case.name == "64 tokens, vLLM float32"
    assert case.run(1).tokens_per_s == 4 * 64 / 2.0


def test_a_dtype_that_the_peer_does_not_answer_in_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PEER)
    python.chmod(0o755)
    (tmp_path / "ready").touch()
    with ExitStack() as stack:
        peers = start_peers(stack, tmp_path, tmp_path, 1, [Request((5, 6), 3)], answer_s=2.0)
        assert list(peers) == ["float32"]
        assert peers["float32"].run([Request((5, 6), 3)]) == Timed(3, 2.0)
    assert "without vLLM in bfloat16: no answer within 2 s" in capsys.readouterr().err
