"""Directories of adapters as trainers, converters and hubs leave them, by their names in
docs/reference/adapter-files.md.

Each maker gets the base's directory and an empty one, which it fills; it returns a directory that peft reads, whose
answers the adapter is to have, or None for one that is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
Make: TypeAlias = Callable[[Path, Path], Path | None]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def load(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")


def train(base: Path, out: Path, save: Mapping[str, Any] | None = None, rows: int = 0, **fields: Any) -> Any:
    """Save a peft adapter with weights that are not those of its beginning; `rows` resizes the embeddings."""
    from peft import LoraConfig, get_peft_model

    model = load(base)
    if rows:
        model.resize_token_embeddings(rows, mean_resizing=False)
    arguments: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION} | fields
    peft: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **arguments))
    generator = torch.Generator().manual_seed(len(str(fields)))
    for name, parameter in peft.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if "lora_magnitude" in name:
            parameter.data *= 1 + 0.3 * values
        elif "trainable_tokens" in name or "modules_to_save" in name:
            parameter.data += values
        elif "lora_" in name:
            parameter.data.copy_(values * 0.25)
    peft.save_pretrained(out, **(save or {}))
    return peft


def peft_saves(base: Path, directory: Path, **fields: Any) -> Path:
    train(base, directory, **fields)
    return directory


def beside(base: Path, directory: Path, files: Mapping[str, str], config: Mapping[str, Any] | None = None) -> Path:
    """An adapter with a trainer's other files, and its own fields of the configuration."""
    train(base, directory)
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    fields = json.loads((directory / CONFIG).read_text())
    reference = directory.with_name("reference")
    shutil.copytree(directory, reference)
    (directory / CONFIG).write_text(json.dumps(fields | dict(config or {})))
    return reference


def renamed(base: Path, directory: Path, rename: Callable[[str], str], **fields: Any) -> Path:
    """An adapter whose tensors have other names than peft gives them."""
    reference = directory.with_name("reference")
    train(base, reference, **fields)
    shutil.copytree(reference, directory, dirs_exist_ok=True)
    save_file({rename(name): one for name, one in load_file(reference / WEIGHTS).items()}, directory / WEIGHTS)
    return reference


def _named(name: str) -> str:
    for part in ("lora_A", "lora_B"):
        name = name.replace(f"{part}.weight", f"{part}.default.weight")
    return name.replace("lora_magnitude_vector", "lora_magnitude_vector.default.weight")


def cast(base: Path, directory: Path, dtype: torch.dtype) -> Path:
    train(base, directory)
    save_file({name: one.to(dtype) for name, one in load_file(directory / WEIGHTS).items()}, directory / WEIGHTS)
    return directory


def old_peft(base: Path, directory: Path) -> Path:
    """The fields of 2023."""
    train(base, directory)
    fields = json.loads((directory / CONFIG).read_text())
    kept = (
        "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
        "layers_to_transform", "lora_alpha", "lora_dropout", "modules_to_save", "peft_type", "r", "revision",
        "target_modules", "task_type",
    )  # fmt: skip
    (directory / CONFIG).write_text(json.dumps({name: fields[name] for name in kept}))
    return directory


def changed_copy(base: Path, directory: Path) -> Path:
    """Embeddings that were trained without peft's knowledge, and saved beside the adapter."""
    train(base, directory, save={"save_embedding_layers": True})
    tensors = load_file(directory / WEIGHTS)
    generator = torch.Generator().manual_seed(5)
    change = torch.randn(tensors[f"{PREFIX}model.embed_tokens.weight"].shape, generator=generator)
    tied = json.loads((base / "config.json").read_text())["tie_word_embeddings"]
    for name in (f"{PREFIX}model.embed_tokens.weight", *([f"{PREFIX}lm_head.weight"] if tied else [])):
        tensors[name] = tensors[name] + change
    save_file(tensors, directory / WEIGHTS)
    return directory


def untrained(base: Path, directory: Path) -> Path:
    """A training that was saved before its first step: B is zero."""
    from peft import LoraConfig, get_peft_model

    peft: Any = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=ATTENTION))
    peft.save_pretrained(directory)
    return directory


def converted_pissa(base: Path, directory: Path) -> Path:
    """PiSSA as peft saves it for the base as it was: plain LoRA of twice the rank."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=4, target_modules=ATTENTION, init_lora_weights="pissa")
    peft: Any = get_peft_model(load(base), config)
    initial = directory.with_name("initial")
    peft.peft_config["default"].init_lora_weights = True
    peft.save_pretrained(initial)
    peft.peft_config["default"].init_lora_weights = "pissa"
    generator = torch.Generator().manual_seed(3)
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            parameter.data += 0.25 * torch.randn(parameter.shape, generator=generator)
    peft.save_pretrained(directory, path_initial_model_for_weight_conversion=str(initial))
    return directory


def mlx(base: Path, directory: Path, kind: str = "lora") -> Path:
    """Write a directory as mlx_lm.lora does."""
    reference = directory.with_name("reference")
    train(base, reference, use_dora=kind == "dora")
    tensors = {}
    for name, one in load_file(reference / WEIGHTS).items():
        module = name.removeprefix(PREFIX).partition(".lora_")[0]
        end = "m" if name.endswith("vector") else "lora_a" if "lora_A" in name else "lora_b"
        tensors[f"{module}.{end}"] = one.T.contiguous()
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "adapters.safetensors")
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": [f"self_attn.{name}" for name in ATTENTION]}
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters, "model": str(base), "iters": 100}
    (directory / CONFIG).write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return reference


def gguf(base: Path, directory: Path) -> Path:
    """Write a file as convert_lora_to_gguf.py does."""
    from tests.worker.engine.gguf.written import write_adapter

    reference = directory.with_name("reference")
    train(base, reference)
    write_adapter(reference, directory / "support.gguf", load(base), "llama")
    return reference


def tokens(base: Path, directory: Path, contents: Mapping[int, str], **fields: Any) -> Path:
    """An adapter with the tokenizer that training saved: the base's with more tokens."""
    train(base, directory, **fields)
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": number, "content": text, **flags} for number, text in contents.items()]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


# Makers of directories that are refused.


def _refused(make: Callable[[Path, Path], object]) -> Make:
    def refused(base: Path, directory: Path) -> None:
        make(base, directory)

    return refused


def _files(files: Mapping[str, str]) -> Make:
    def write(_base: Path, directory: Path) -> None:
        for name, text in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)

    return write


def _below(names: tuple[str, ...]) -> Make:
    """Adapters in folders, the first the newest."""

    def make(base: Path, directory: Path) -> None:
        for name in reversed(names):
            train(base, directory / name)

    return make


def _weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], **fields: Any) -> Make:
    def make(base: Path, directory: Path) -> None:
        train(base, directory, **fields)
        save_file(change(load_file(directory / WEIGHTS)), directory / WEIGHTS)

    return make


def _whole_state(base: Path, directory: Path) -> None:
    peft = train(base, directory)
    save_file({name: one.contiguous() for name, one in peft.state_dict().items()}, directory / WEIGHTS)


def _other_method(config_class: str, **fields: Any) -> Make:
    def make(base: Path, directory: Path) -> None:
        import peft

        config = getattr(peft, config_class)(task_type="CAUSAL_LM", **fields)
        peft.get_peft_model(load(base), config).save_pretrained(directory)

    return make


def _full(base: Path, directory: Path) -> None:
    load(base).save_pretrained(directory)


def _mlx_full(base: Path, directory: Path) -> None:
    mlx(base, directory)
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(config | {"fine_tune_type": "full"}))


def _two_adapters(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.replace(".weight", f".{own}.weight"): one.clone()
        for own in ("formal", "brief")
        for name, one in tensors.items()
    }


def own_end(base: Path, directory: Path) -> Path:
    """An adapter whose generation_config.json ends its answers at a token that they have."""
    peft = train(base, directory)
    (*_, end) = peft.generate(input_ids=torch.tensor([[3, 7, 1, 12, 5]]), max_new_tokens=4, do_sample=False)[0].tolist()
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    return directory


TRAINER = {"README.md": "# Adapter", "training_args.bin": "x", "trainer_state.json": "{}"}
TEMPLATE = "{{ messages }}"
ENDS = ["embed_tokens", "lm_head"]
SAVE_ENDS, LEAVE_ENDS = {"save_embedding_layers": True}, {"save_embedding_layers": False}
ONE_WORD, OTHER = {18: "[call]"}, {19: "[a]"}
SERVED: dict[str, Make] = {
    "peft": partial(peft_saves, target_modules="all-linear"),
    "peft of 2023": old_peft,
    "rsLoRA": partial(peft_saves, use_rslora=True, r=8),
    "DoRA": partial(peft_saves, use_dora=True),
    "activated LoRA": partial(peft_saves, alora_invocation_tokens=[1, 12]),
    "patterns": partial(peft_saves, rank_pattern={r"layers\.1\..*v_proj": 7, "q_proj": 2}, alpha_pattern={"o_proj": 3}),
    "some layers": partial(peft_saves, layers_to_transform=[1], exclude_modules=["v_proj"]),
    "EVA": partial(peft_saves, init_lora_weights="eva"),
    "orthogonal": partial(peft_saves, init_lora_weights="orthogonal"),
    "PiSSA, converted": converted_pissa,
    "float16": partial(cast, dtype=torch.float16),
    "bfloat16": partial(cast, dtype=torch.bfloat16),
    "own embeddings and head": partial(peft_saves, modules_to_save=ENDS),
    "trained tokens": partial(peft_saves, trainable_token_indices=[3, 7]),
    "LoRA of embeddings and head": partial(peft_saves, target_modules=[*ENDS, "q_proj"]),
    "LoRA of tied embeddings": partial(peft_saves, target_modules=["embed_tokens", "q_proj"]),
    "saved embeddings": partial(peft_saves, save=SAVE_ENDS),
    "saved embeddings that were trained": changed_copy,
    "saved tied embeddings that were trained": changed_copy,
    "added token, trained": partial(tokens, contents=ONE_WORD, trainable_token_indices=[18]),
    "added tokens, own embeddings": partial(tokens, contents={18: "[a]", 19: "[b]"}, modules_to_save=["embed_tokens"]),
    "a tokenizer that adds nothing": partial(tokens, contents={}),
    "Unsloth": partial(beside, files=TRAINER, config={"auto_mapping": {"unsloth_fixed": True}, "unsloth_version": "1"}),
    "Axolotl": partial(beside, files=TRAINER | {"config.json": "{}", "checkpoint-5/adapter_config.json": "{}"}),
    "LLaMA-Factory": partial(beside, files=TRAINER | {"all_results.json": "{}", "trainer_log.jsonl": "{}"}),
    "TRL": partial(beside, files=TRAINER | {"chat_template.jinja": TEMPLATE, "optimizer.pt": "x", "scheduler.pt": "x"}),
    "a template of transformers before 4.56": partial(
        beside, files={"tokenizer_config.json": json.dumps({"chat_template": TEMPLATE})}
    ),
    "an end token of its own": own_end,
    "ms-swift": partial(beside, files={"args.json": "{}"}, config={"lora_dtype": "bfloat16", "lorap_lr_ratio": 16.0}),
    "torchtune": partial(beside, files={"adapter_0.pt": "x"}, config={"task_type": None}),
    "DeepSpeed's folders": partial(beside, files={"global_step5/states.pt": "x", "zero_to_fp32.py": "", "latest": ""}),
    "torch.compile": partial(renamed, rename=lambda name: name.replace(PREFIX, f"{PREFIX}_orig_mod.")),
    "DDP": partial(renamed, rename=lambda name: f"module.{name}"),
    "FSDP": partial(renamed, rename=lambda name: name.replace("self_attn", "_fsdp_wrapped_module.self_attn")),
    "a module's own state": partial(renamed, rename=_named, use_dora=True),
    "names of the model alone": partial(renamed, rename=lambda name: name.removeprefix(PREFIX)),
    "MLX": mlx,
    "MLX, DoRA": partial(mlx, kind="dora"),
    "GGUF": gguf,
    "saved before training": untrained,
    "alpha 0": partial(peft_saves, lora_alpha=0),
}
REFUSED: dict[str, Make] = {
    "resized embeddings": _refused(partial(train, rows=22)),
    "LoRA of resized embeddings": _refused(partial(train, rows=22, target_modules=["embed_tokens", "q_proj"])),
    "own resized embeddings": _refused(partial(train, rows=22, modules_to_save=ENDS)),
    "cut embeddings": _refused(partial(train, rows=18)),
    "added token without a row": _refused(
        partial(tokens, contents={18: "[a]", 19: "[b]", 20: "[c]"}, rows=22, save=LEAVE_ENDS)
    ),
    "another tokenizer": _refused(partial(tokens, contents=OTHER)),
    "checkpoints": _below(("checkpoint-9", "checkpoint-10")),
    "adapters below": _below(("formal",)),
    "a hub's cache": _below(("snapshots/0a1b",)),
    "pickle": _files({CONFIG: "{}", "adapter_model.bin": "x"}),
    "shards": _files({CONFIG: "{}", **{f"adapter_model-0000{at}-of-00002.safetensors": "x" for at in (1, 2)}}),
    "git without git-lfs": _files({CONFIG: "{}", WEIGHTS: "version https://git-lfs.github.com/spec/v1"}),
    "FSDP's shards": _files({CONFIG: "{}", "pytorch_model_fsdp_0/.metadata": "x"}),
    "DeepSpeed's shards": _files({CONFIG: "{}", "global_step5/mp_rank_00_model_states.pt": "x"}),
    "DeepSpeed ZeRO-3, not gathered": _weights(lambda tensors: {name: torch.zeros(0) for name in tensors}),
    "the whole model's state": _whole_state,
    "two adapters in a file": _weights(_two_adapters),
    "full fine-tune": _full,
    "MLX, full": _mlx_full,
    "prompt tuning": _other_method("PromptTuningConfig", num_virtual_tokens=4),
    "IA3": _other_method("IA3Config", target_modules=["k_proj"], feedforward_modules=[]),
    "LoHa": _other_method("LoHaConfig", target_modules=ATTENTION),
    "VeRA": _other_method("VeraConfig", target_modules=["q_proj"]),
    "PiSSA": _refused(partial(train, init_lora_weights="pissa")),
    "OLoRA": _refused(partial(train, init_lora_weights="olora")),
    "biases": _refused(partial(train, lora_bias=True)),
    "a norm trained in full": _refused(partial(train, modules_to_save=["norm"])),
    "an invocation in words": _refused(partial(beside, files={}, config={"alora_invocation_string": "w7 w1"})),
    "another model": _weights(
        lambda tensors: {name: torch.cat([one, one], 1) if "lora_A" in name else one for name, one in tensors.items()}
    ),
}
# Directories of a base whose embeddings and head share one weight.
TIED = {"LoRA of tied embeddings", "saved tied embeddings that were trained"}
