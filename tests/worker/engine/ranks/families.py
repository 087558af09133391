"""Families on several ranks beside one process: the same models, adapters and requests, id by id and logit by logit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loraplex.contracts.artifacts.base_model import ModuleShape, read_base_model
from loraplex.contracts.artifacts.families import is_inner
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE, tensor_names
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine_api import AdapterSource, NewSequence, Output
from tests.worker.engine.model.tiny_families import make_config, make_model

# No more than an engine tells log probabilities of; four ranks divide them with padding.
VOCAB = 18
# Sizes that four ranks can divide, on borders of groups of int4: key heads are copied then.
WIDE = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    "shared_intermediate_size": 128,
}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
PROMPTS = ((7, 1, 9, 3, 4, 5, 12, 11, 8, 4, 10, 9, 2, 7, 16, 3, 6), (1, 4, 8), (17, 5, 13, 2, 9, 6, 8, 1, 13))
TOKENS = 8
ENGINE = {"rows": 5, "kv_blocks": 60, "block_size": 4, "step_tokens": 24, "adapter_slots": 6, "max_rank": 8}


def wide_config(model_type: str) -> Any:
    """A family's config in the sizes of WIDE."""
    config = make_config(model_type)
    known = set(config.to_dict()) | set(config.attribute_map)
    for name, size in (WIDE | (LATENT if "kv_lora_rank" in known else {})).items():
        if name in known:
            setattr(config, name, size)
    if "kv_lora_rank" in known:
        config.num_key_value_heads = config.num_attention_heads
    return config


def make_wide(model_type: str, directory: Path, **fields: Any) -> Any:
    """A model, saved; `fields` change its config."""
    config = wide_config(model_type)
    for name, value in fields.items():
        setattr(config, name, value)
    return make_model(config, directory)


def make_adapters(model: Path, directory: Path, *, experts: bool) -> list[Path]:
    """Six adapters of a model: all layers, few, DoRA's, of the ends; of several ranks."""
    shapes = [one for one in read_base_model(str(model)).modules if not experts or ".self_attn." in one.name]
    inner = [one for one in shapes if is_inner(one.name)]
    ends = [one for one in read_base_model(str(model)).modules if not is_inner(one.name)]
    chosen: Mapping[str, tuple[list[ModuleShape], dict[str, Any]]] = {
        "all": (inner, {"r": 8}),
        "some": (inner[::3] or inner, {"r": 3, "use_rslora": True}),
        "one": (inner[:1], {"r": 1}),
        "dora": (inner, {"r": 4, "use_dora": True}),
        "ends": ([*ends, *inner[:2]], {"r": 2}),
        "last": (inner[-1:], {"r": 5, "use_dora": True}),
    }
    return [_write(directory / name, name, *what) for name, what in chosen.items()]


def _write(directory: Path, seed: str, modules: list[ModuleShape], fields: dict[str, Any]) -> Path:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(sum(map(ord, seed)))
    tensors, rank = {}, fields["r"]

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    for module in modules:
        names = tensor_names(module.name)
        tensors[names["A"]] = random(rank, module.in_features) * 0.2
        tensors[names["B"]] = random(module.out_features, rank) * 0.2
        if fields.get("use_dora"):
            tensors[names["magnitude"]] = 1.5 + 0.3 * random(module.out_features)
    directory.mkdir()
    save_file(tensors, directory / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "lora_alpha": 8, **fields}
    config["target_modules"] = sorted({module.name.rpartition(".")[2] for module in modules})
    (directory / CONFIG_FILE).write_text(json.dumps(config))
    return directory


def requests_of(adapters: list[Path]) -> list[NewSequence]:
    """Every adapter and the base, each with a prompt of its own length; all log probabilities."""
    sources = [None, *(AdapterSource(f"digest of {path.name}", str(path)) for path in adapters)]
    return [
        NewSequence(
            source.digest if source else "base",
            PROMPTS[index % len(PROMPTS)],
            adapter=source,
            stopping=StoppingParams(TOKENS),
            logprobs=VOCAB,
            prompt_logprobs=VOCAB,
        )
        for index, source in enumerate(sources)
    ]


def told(outputs: list[Output]) -> tuple[list[int], Any]:
    """An answer's ids, and the log probabilities [positions, ids] of it and its prompt."""
    import torch

    assert outputs[-1].failure is None, outputs[-1].failure
    ids = [token for output in outputs for token in output.token_ids]
    tokens = [one for output in outputs for one in (*output.prompt_logprobs, *output.logprobs)]
    return ids, torch.tensor([[logprob for _, logprob in sorted(one.alternatives)] for one in tokens])


def compare(
    directory: Path,
    requests: list[NewSequence],
    ranks: int,
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
    **settings: Any,
) -> float:
    """Assert that ranks give one process's ids; the largest difference of log probabilities, by the largest."""
    arrivals = {0: requests[:4], 3: requests[4:]}
    alone = run_until_idle(make_engine(directory, **ENGINE, **settings), arrivals)
    engine = make_engine(directory, **ENGINE, tensor_parallel=ranks, **settings)
    together = run_until_idle(engine, arrivals)
    engine.close()
    largest, different = 0.0, set[tuple[int, ...]]()
    for name, outputs in alone.items():
        (ids, expected), (own, logprobs) = told(outputs), told(together[name])
        assert own == ids, f"{name}: other ids"
        different.add(tuple(ids))
        largest = max(largest, float((logprobs - expected).abs().max() / expected.abs().max()))
    assert len(different) >= min(3, len(requests)), f"answers: {different} are to be diverse"
    return largest
