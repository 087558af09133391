"""The kernels for CUDA without a GPU, interpreted in one process: each alone, and the engine with them.

LoRA against a loop over rows, attention against the torch path, sampling against the CPU's, and the engine's logits and
ids against peft's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from loraplex.worker.engine_api import NewSequence
from tests.worker.engine.model.tiny_families import EXPERTS
from tests.worker.engine.peft_oracle import VOCAB, PeftOracle
from tests.worker.engine.quantized.dequantized import dequantize_into
from tests.worker.engine.triton_runs import BLOCK_ABSENT, results_of

pytest.importorskip("triton", reason="Triton is for Linux")
pytestmark = pytest.mark.model

LORA_TOLERANCES = {"float32": 3e-6, "float16": 3e-3}
ATTENTION_TOLERANCES = {"float32": 5e-6, "float16": 3e-3}

CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "some of a group": {"r": 2, "lora_alpha": 6, "target_modules": ["k_proj", "gate_proj"], "use_rslora": True},
    "patterned": {
        "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 20, "layers.1.self_attn.q_proj": 1},
    },
    "DoRA": {"r": 5, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"]},
}  # fmt: skip
ACTIVATED: dict[str, dict[str, Any]] = {
    "activated": {
        "r": 3,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "alora_invocation_tokens": [4, 5],
    },
}
# Of transposed experts, whose gates are interleaved and which have biases, and of plain ones.
EXPERT_CONFIGS: dict[str, dict[str, Any]] = {
    "some": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"],
             "rank_pattern": {"down_proj": 5}},
    "more": {"r": 3, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
              "target_parameters": ["gate_up_proj", "down_proj"]},
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]},
}  # fmt: skip
ROWS = 6
SETTINGS = {"rows": ROWS, "kv_blocks": 60, "block_size": 4, "adapter_slots": 2, "max_rank": 20, "step_tokens": 16}
# The cases run on a CPU and need numba.
WITHOUT_OTHERS = f"""
{BLOCK_ABSENT}
import loraplex.worker.engine.torch_engine, loraplex.worker.engine.model.runner
import loraplex.worker.engine.lora.base_layers, loraplex.worker.engine.lora.weights
import bench.gpu, loraplex.worker.engine.lora.cuda, tests.gpu.test_engine_on_cuda
import bench.device_checks, bench.device_load, bench.device_peers, bench.device_steps
for name in absent:
    del sys.modules[name]
"""
SHAPE = {"num_hidden_layers": 2, "hidden_size": 32}
QUANTIZED = "int4"


Asked = dict[str, tuple[str | None, NewSequence]]


Case = tuple[PeftOracle, Asked, dict[str, Any]]


@dataclass(frozen=True)
class Interpreted:
    """Hold what the programs printed, by program; of the engine with the oracles and requests."""

    kernels: dict[str, Any]
    engine: list[Case]


def interpret(programs: list[str], cases: list[Case]) -> Interpreted:
    """Run the engine's cases and the programs of some kernels."""
    files = ["cuda_engine_cases.py", *(f"{program}_cases.py" for program in programs)]
    engine, *of_kernels = results_of(files, "cpu", [settings for *_, settings in cases], WITHOUT_OTHERS)
    of_engine = [(oracle, asked, result) for (oracle, asked, _), result in zip(cases, engine, strict=True)]
    return Interpreted(dict(zip(programs, of_kernels, strict=True)), of_engine)


def case(oracle: PeftOracle, chosen: Any, buffers: bool, **settings: Any) -> Case:
    """Make an engine's case of an oracle's adapters and prompts: more adapters than slots, prompts in chunks."""
    asked = {f"{i}: {name}": (name, oracle.request(f"{i}", prompt, 2, name)) for i, (name, prompt) in enumerate(chosen)}
    requests = {
        key: (
            request.prompt_ids,
            request.stopping.max_tokens,
            request.adapter and request.adapter.directory,
            request.adapter and request.adapter.invocation,
            request.invoked_at,
        )
        for key, (_, request) in asked.items()
    }
    settings = {"model": str(oracle.directory), "settings": SETTINGS | settings, "requests": requests}
    return oracle, asked, settings | {"buffers": buffers}


def drawn(names: list[str | None]) -> list[tuple[str | None, list[int]]]:
    """Pair adapters' names with prompts."""
    chance = random.Random(2)
    prompts = [chance.choices(range(VOCAB), k=length) for length in (2, 7, 3, 5, 1, 17)]
    return list(zip(names, prompts, strict=False))


EVERY = [*drawn([*CONFIGS, None, "all"]), ("activated", [3, 8, 15, 4, 5, 2, 17])]
OF_EXPERTS = drawn([*EXPERT_CONFIGS, None, "some"])


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Interpreted:
    """Run the kernels, and the engine with every kind of adapter. Qwen2 has biases on q, k and v alone."""
    directory = tmp_path_factory.mktemp("oracles") / "exact"
    exact = PeftOracle("qwen2", directory, CONFIGS | ACTIVATED, seed=3, shape=SHAPE)
    cases = [case(exact, EVERY, True, ahead=True)]
    return interpret(["lora", "attention", "sampling", "row", "product"], cases)


@pytest.fixture(scope="module")
def interpreted_at_night(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Interpreted:
    """Run families, rows in every company, and engines without buffers, quantized, and with adapters of experts."""
    directory, sizes = tmp_path_factory.mktemp("oracles"), SHAPE | EXPERTS | {"head_dim": 8}
    exact = PeftOracle("qwen2", directory / "exact", CONFIGS, shape=SHAPE)
    quantized = PeftOracle(
        "qwen2",
        directory / "quantized",
        CONFIGS,
        shape=SHAPE,
        change=lambda base, at: dequantize_into(base, at, QUANTIZED),
    )
    experts, plain = (
        PeftOracle(family, directory / family, EXPERT_CONFIGS, shape=sizes) for family in ("gpt_oss", "mixtral")
    )
    cases = [
        case(exact, EVERY[1::2], False),
        case(quantized, EVERY[3:5], True, ahead=True, quantize=QUANTIZED),
        case(experts, OF_EXPERTS, True, ahead=True, max_expert_rank=5),
        case(plain, OF_EXPERTS[:2], False, max_expert_rank=5),
    ]
    return interpret(["family", "invariant"], cases)


def test_adapters_kernels_compute_what_a_loop_computes(interpreted: Interpreted) -> None:
    differences = interpreted.kernels["lora"]
    assert [len(differences[name]) for name in LORA_TOLERANCES] == [12, 3]
    assert [differences["float32"].pop(one) for one in ("alone, exact", "swapped", "tiles")] == [0, 0, 0]
    for name, tolerance in LORA_TOLERANCES.items():
        assert {case: value for case, value in differences[name].items() if value > tolerance} == {}, name


def test_attentions_kernels_compute_what_torch_computes(interpreted: Interpreted) -> None:
    differences = interpreted.kernels["attention"]
    assert [len(differences[name]) for name in ATTENTION_TOLERANCES] == [15, 4]
    same = [differences["float32"].pop(case) for case in ("alone", "parts", "parts, window", "codes")]
    assert same == [0] * 4, "a row's bits depend on nothing but the row"
    for name, tolerance in ATTENTION_TOLERANCES.items():
        assert {case: value for case, value in differences[name].items() if value > tolerance} == {}, name


def test_the_kernels_of_rows_compute_what_torch_computes(interpreted: Interpreted) -> None:
    for name, tolerance in {"float32": 1e-6, "float16": 1e-3}.items():
        differences = interpreted.kernels["row"][name]
        assert len(differences) == 45
        assert {case: value for case, value in differences.items() if value > tolerance} == {}, name


def test_products_with_codes_are_those_of_the_definition(interpreted: Interpreted) -> None:
    """Of every scheme, in float32; in float16 the definition rounds the weights, and the kernel does not."""
    for name, tolerance in {"float32": 3e-6, "float16": 1e-3}.items():
        differences = interpreted.kernels["product"][name]
        assert (differences.pop("alone"), differences.pop("same tile")) == (0, 0)
        assert len(differences) == 42
        assert {case: value for case, value in differences.items() if value > tolerance} == {}, name


@pytest.mark.nightly
def test_families_with_the_kernels_of_rows_give_the_same_logits(interpreted_at_night: Interpreted) -> None:
    """Only modules of the kernels' forms are replaced, of layers that rotate, by their position alone."""
    assert {name: found for name, (found, _) in interpreted_at_night.kernels["family"].items() if found > 2e-6} == {}
    assert {name: kinds for name, (_, kinds) in interpreted_at_night.kernels["family"].items()} == {
        "llama": {"_layer_forward": 2, "_attention_forward": 2, "_gated_forward": 2, "NormKernel": 5},
        "gemma3_text": {"_layer_forward": 2, "_attention_forward": 2, "_gated_forward": 2, "NormKernel": 13},
        "olmo2": {"_layer_forward": 2, "_attention_forward": 2, "_gated_forward": 2, "NormKernel": 9},
        "smollm3": {"_layer_forward": 2, "_attention_forward": 1, "_gated_forward": 2, "NormKernel": 5},
        "mixtral": {"_layer_forward": 2, "_attention_forward": 2, "NormKernel": 5},
        "glm4_moe": {"_layer_forward": 2, "_attention_forward": 2, "_gated_forward": 2, "NormKernel": 5},
        "nemotron": {"_attention_forward": 2},
        "gpt2": {},
    }


@pytest.mark.nightly
def test_a_row_has_the_same_bits_alone_and_beside_others(interpreted_at_night: Interpreted) -> None:
    """Computes a prompt at once and in chunks, with an adapter. Without batch invariance the bits differ."""
    single = interpreted_at_night.kernels["invariant"]["float32"]
    assert single.pop("decode kernel") > 0, "the test would not see it"
    assert list(single.values()) == [0]


def test_samplings_kernel_chooses_the_ids_that_the_cpu_chooses(interpreted: Interpreted) -> None:
    """Of greedy rows and rows with every limit, with forbidden and equal logits, and those that are not numbers."""
    assert len(interpreted.kernels["sampling"]) == 19
    assert {case: counts for case, counts in interpreted.kernels["sampling"].items() if counts[0]} == {}


def test_mixed_adapters_give_pefts_logits_and_tokens(interpreted: Interpreted) -> None:
    """With decode steps in padded buffers."""
    check_engine(interpreted, [True])


@pytest.mark.nightly
def test_mixed_adapters_give_pefts_logits_and_tokens_in_every_engine(interpreted_at_night: Interpreted) -> None:
    """With decode steps in padded buffers and without."""
    check_engine(interpreted_at_night, [False, True, True, False])


def check_engine(interpreted: Interpreted, padded: list[bool]) -> None:
    """Compare the engines' answers with peft's; `padded` says whose steps ran in padded buffers."""
    assert [result["padded"] > 0 for *_, result in interpreted.engine] == padded
    for oracle, asked, result in interpreted.engine:
        answers = result["answers"]
        for key, (name, request) in asked.items():
            ids, logprobs = answers[key]
            oracle.check_answer(request, tuple(ids), logprobs, name)
        assert len({tuple(ids) for ids, _ in answers.values()}) == len(answers), "answers are to be diverse"
