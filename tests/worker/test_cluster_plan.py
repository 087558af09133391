"""`loraplex plan --cluster`: the example of docs/guides/scaling.md as it prints it, and what the plan keeps to."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.broker.cells import CELL_JOBS
from loraplex.worker import cluster_plan
from loraplex.worker.__main__ import rank_parts
from loraplex.worker.cluster_plan import LoadSettings, plan_cluster, routers_for
from loraplex.worker.engine_api import ModelUnusableError
from loraplex.worker.plan import PlanSettings, as_lines, plan
from tests.worker.plan_command import run

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guides/scaling.md").read_text(encoding="utf-8")
FIGURES = " ".join((ROOT / "docs/results/scaling.md").read_text(encoding="utf-8").split())
# The sizes of Llama 3.1 8B.
LAYERS, HIDDEN, INNER, KEYS, VOCABULARY = 32, 4096, 14_336, 1024, 128_256


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with Llama 3.1 8B's config and headers; its 16 GB of weights are a hole in the file."""
    directory = tmp_path_factory.mktemp("models") / "Llama-3.1-8B"
    directory.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": HIDDEN, "intermediate_size": INNER,
        "vocab_size": VOCABULARY, "max_position_embeddings": 131_072, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": (KEYS, HIDDEN) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (HIDDEN, INNER), f"{layer}.input_layernorm": (HIDDEN,)}
        shapes[f"{layer}.post_attention_layernorm"] = (HIDDEN,)
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    weights = directory / "model.safetensors"
    weights.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(weights, 8 + len(text) + end)
    return directory


@pytest.fixture
def load(llama: Path) -> LoadSettings:
    return LoadSettings(
        model=str(llama), requests=500, prompt=512, answer=200, memory="80GiB", prompt_rate=20_000, answer_rate=4_000,
        adapters=1_000,
    )  # fmt: skip


def test_the_guide_has_what_the_command_prints(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.search(r"    \$ loraplex plan ((?:.*\\\n)*.*)\n((?:    .*\n)+)", GUIDE)
    assert example is not None
    words, printed = shlex.split(example[1].replace("\\\n", "")), re.sub("(?m)^    ", "", example[2])
    monkeypatch.chdir(llama.parent)
    done = run(*words)
    assert (done.stdout, done.stderr) == (printed, "")


def test_the_default_figures_are_those_that_were_measured() -> None:
    def figure(pattern: str) -> float:
        (found,) = re.findall(pattern, FIGURES)
        return float(found.replace(",", ""))

    assert figure(r"on an AMD EPYC it was ([\d,]+\d)") == CELL_JOBS
    rules = (Path(__file__).parents[2] / "deploy" / "monitoring" / "rules.yml").read_text()
    assert f"rate(loraplex_cell_jobs_total[5m])) > {CELL_JOBS:.0f}\n" in rules
    assert round(figure(r"\| one process \|(?:[^|]*\|){3} ([\d,.]+)")) == cluster_plan.ROUTER_CALL_US
    assert figure(r"costs 11 to 25 us: (\d+) us with 256 streams") == cluster_plan.ROUTER_TOKEN_US
    slots, adapters = figure(r"cache of (\d+) adapters"), figure(r"has (\d+) adapters a worker, used alike")
    assert slots / adapters == cluster_plan.SLOTS_AN_ADAPTER


def test_the_guide_s_table_of_routers_is_computed() -> None:
    rows = re.findall(r"^\| ([\d,]+) \| (\d+) \| ([\d.]+) \| (\d+) \|$", GUIDE, re.MULTILINE)
    assert len(rows) >= 5
    for calls, tokens, cores, processes in rows:
        us = cluster_plan.ROUTER_CALL_US + int(tokens) * cluster_plan.ROUTER_TOKEN_US
        work = int(calls.replace(",", "")) * us / 1e6
        assert (f"{work:.1f}", routers_for(work)) == (cores, int(processes))


@pytest.mark.parametrize(("words", "flag"), [([], "--context"), (["--cluster"], "--requests")])
def test_each_plan_says_which_flags_it_has(words: list[str], flag: str) -> None:
    shown = run(*words, "--help")
    assert shown.returncode == 0
    assert flag in shown.stdout
    assert shown.stdout.startswith(" ".join(["usage: loraplex plan", *words]))


def test_workers_are_the_fewest_that_are_busy_and_prompt_enough(load: LoadSettings) -> None:
    planned = plan_cluster(load)
    device_s = 512 / 20_000 + 200 / 4_000
    assert planned.workers == math.ceil(500 * device_s / 0.9 - 1e-9) + 1
    assert 0.85 < planned.service.busy < 0.9 + 1e-9
    assert planned.service.itl_ms == pytest.approx(16 / (1 - 500 / (planned.workers - 1) * 512 / 20_000))
    # 16 of 50 ms are the step's of 64 answers, and prompts get 34. Of those that wait for others, 1% wait longest.
    prompt_ms = 25.6 * 50 / 34
    busy = 500 / (planned.workers - 1) * prompt_ms / 1000
    assert planned.service.ttft_ms == pytest.approx(prompt_ms * (1 + math.log(busy / 0.01) / (1 - busy)))
    promised = plan_cluster(replace(load, itl_ms=30, ttft_ms=300))
    assert 285 < promised.service.ttft_ms <= 300
    assert promised.workers > planned.workers


def test_one_worker_alone_makes_requests_wait(load: LoadSettings) -> None:
    # Erlang's C of 4 rows that 3.5 answers take: 0.7 wait, 99% at most 8.5 times what an answer takes.
    assert cluster_plan._wait_s(3.5, 4, 1.0) == pytest.approx(math.log(0.7379 / 0.01) / 0.5, rel=0.01)
    few = replace(load, requests=3.9, rows=4, answer_rate=1_000)
    assert plan_cluster(replace(few, ttft_ms=60_000)).workers < plan_cluster(few).workers


def test_slots_are_for_the_adapters_that_a_worker_is_home_of(load: LoadSettings) -> None:
    assert plan_cluster(load).slots == load.rows
    many = plan_cluster(replace(load, adapters=4_000))
    assert many.slots == math.ceil(1.6 * 4_000 / (many.workers - 1))
    crowded = plan_cluster(replace(load, adapters=40_000))
    assert load.rows <= crowded.slots < 1.6 * crowded.adapters_a_worker
    assert crowded.device.needed_bytes <= crowded.device.memory_bytes
    assert crowded.worker_host_bytes > 1.6 * crowded.adapters_a_worker * crowded.device.adapter_bytes


def test_a_load_beyond_a_cell_has_several(load: LoadSettings) -> None:
    planned = plan_cluster(replace(load, requests=7_000, price=2.0, core_price=0.1))
    assert planned.cells == 3
    assert planned.workers % 3 == 0
    one_cell = plan_cluster(replace(load, requests=7_000, cell_jobs=7_000))
    assert 0 <= planned.workers - one_cell.workers < 3
    assert (planned.routers, planned.adapters_a_worker) == (one_cell.routers, one_cell.adapters_a_worker)
    assert planned.cost_an_hour == pytest.approx(planned.workers * 2 + (planned.routers + 3) * 0.1)


def test_ranks_have_parts_of_everything(load: LoadSettings, llama: Path) -> None:
    settings = PlanSettings(str(llama), memory="40GiB", tensor_parallel=2)
    one, two = plan(replace(settings, tensor_parallel=1)), plan(settings, rank_parts(settings))
    assert two.kv_bytes_per_token == one.kv_bytes_per_token // 2
    # Embeddings and norms are whole.
    whole = 2 * (VOCABULARY * HIDDEN + (2 * LAYERS + 1) * HIDDEN)
    assert two.weight_bytes == whole + (one.weight_bytes - whole) // 2
    # q, k, v, gate and up have half of the outputs; o and down half of the inputs.
    numbers = 3 * HIDDEN + (HIDDEN + 2 * KEYS) // 2 + 2 * HIDDEN + INNER + HIDDEN // 2 + HIDDEN + INNER // 2 + HIDDEN
    assert two.adapter_bytes == 16 * LAYERS * numbers * 2
    assert "ranks               2, each on a device with these sizes" in as_lines(two)
    three = replace(settings, tensor_parallel=3)
    with pytest.raises(ModelUnusableError, match="LlamaForCausalLM has 32 attention heads, which cannot be divided"):
        plan(three, rank_parts(three))
    assert (
        plan_cluster(replace(load, price=1)).cost_an_hour * 2
        == plan_cluster(replace(load, price=1, tensor_parallel=2)).cost_an_hour
    )


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"requests": "0"}, "error: --requests 0.0: more than 0"),
        ({"memory": "much"}, "error: --memory much: not a size such as 80GiB or 24GB"),
        ({"memory": "20GiB"}, "error: --memory 20GiB: "),
        ({"answer": "131000"}, "error: --prompt and --answer have 131,512 tokens; the model's context is 131,072"),
        ({"itl-ms": "10"}, "error: --itl-ms 10: 64 rows at 4,000 tokens a second have a token each 16.0 ms; give "),
        ({"ttft-ms": "20"}, "error: --ttft-ms 20: a prompt of 512 tokens takes 38 ms beside 64 answers at these rates"),
    ],
)
def test_a_mistake_is_one_line(flags: dict[str, str], line: str, llama: Path) -> None:
    given = {"model": str(llama), "requests": "500", "prompt": "512", "answer": "200", "memory": "80GiB"}
    given |= {"prompt-rate": "20000", "answer-rate": "4000"} | flags
    done = run("--cluster", *(f"--{name}={value}" for name, value in given.items()))
    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
