"""Tiny float32 models with weights that matter, their adapters, and transformers' own answers in float64 as the oracle.

A plugin of the test suite (see conftest.py): its fixtures are there in every folder. Torch is imported by those tests
alone that use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine_api import AdapterSource, NewSequence

VOCAB = 320
ALL_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Fields of the adapter of each name: together they cover every field that the worker reads.
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEARS},
    "patterned": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 2, r"layers\.1\.mlp\.down_proj": 12},
        "alpha_pattern": {"down_proj": 24, "layers.0.self_attn.q_proj": 3},
    },
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["o_proj", "up_proj", "gate_proj"]},
}


@dataclass
class TinyModel:
    """A saved model, its saved adapters by name, and what transformers and peft answer with them in float64."""

    directory: Path
    adapters: dict[str, Path]
    peft: Any
    _answers: dict[tuple[Any, ...], tuple[tuple[int, ...], float]] = field(default_factory=dict)

    def answer(self, prompt: tuple[int, ...], max_tokens: int, adapter: str | None) -> tuple[int, ...]:
        """The greedy ids, the request alone. Asserts that no choice was close: two best logits 1e-5 apart."""
        key = (prompt, max_tokens, adapter)
        if key not in self._answers:
            self._answers[key] = self._generate(prompt, max_tokens, adapter)
        ids, margin = self._answers[key]
        assert margin > 1e-5, f"the oracle's best two logits are {margin} apart for {key}"
        return ids

    def request(
        self, name: str, prompt: Iterable[int], tokens: int, adapter: str | None = None, **more: Any
    ) -> NewSequence:
        """A sequence with one of its adapters; `more` are fields of NewSequence."""
        source = AdapterSource(f"digest of {adapter}", str(self.adapters[adapter])) if adapter else None
        more.setdefault("stopping", StoppingParams(max_tokens=tokens))
        return NewSequence(name, tuple(prompt), adapter=source, **more)

    def expected(self, request: NewSequence) -> tuple[int, ...]:
        """The greedy answer to what `request` made."""
        adapter = Path(request.adapter.directory).name if request.adapter else None
        return self.answer(request.prompt_ids, request.stopping.max_tokens, adapter)

    def _generate(self, prompt: tuple[int, ...], max_tokens: int, adapter: str | None) -> tuple[tuple[int, ...], float]:
        import contextlib

        import torch

        plain = self.peft.disable_adapter() if adapter is None else contextlib.nullcontext()
        if adapter is not None:
            self.peft.set_adapter(adapter)
        with plain, torch.inference_mode():
            output = self.peft.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=max_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best = torch.stack([step[0] for step in output.logits]).topk(2).values
        return tuple(output.sequences[0, len(prompt) :].tolist()), float((best[:, 0] - best[:, 1]).min())


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """Small products on one thread: two of them wait for each other where cores are busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def save_adapter(one_thread: None) -> Callable[..., None]:
    """Call with (model, directory, seed, **LoraConfig fields): peft's own files, with a B that is not zero."""
    import torch
    from peft import LoraConfig, get_peft_model

    def save(model: Any, directory: Path, seed: int, scale: float = 0.25, **config: Any) -> None:
        wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        wrapped.save_pretrained(str(directory))
        wrapped.unload()

    return save


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory, save_adapter: Callable[..., None]) -> Callable[..., TinyModel]:
    """Call with (architecture, **config fields): a saved tiny model with the three adapters."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    configs: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config}

    def make(architecture: str, seed: int = 0, **fields: Any) -> TinyModel:
        shape = {
            "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
        }  # fmt: skip
        config = configs[architecture](**(shape | fields))
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                scale = 1.0 if "embed" in name or name.endswith("bias") else 1.7 / parameter.shape[-1] ** 0.5
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        directory = tmp_path_factory.mktemp(architecture)
        model.save_pretrained(directory / "model")
        adapters = {name: directory / name for name in ADAPTERS}
        for index, (name, path) in enumerate(adapters.items()):
            save_adapter(model, path, seed + index, **ADAPTERS[name])
        peft = None
        for name, path in adapters.items():
            if peft is None:
                peft = PeftModel.from_pretrained(model, path, adapter_name=name)
            else:
                peft.load_adapter(path, adapter_name=name)
        assert peft is not None
        # In float32 the oracle itself is off by up to 3e-4: its BLAS adds in another order on each kind of processor.
        return TinyModel(directory / "model", adapters, peft.eval().double())

    return make


@pytest.fixture(scope="session")
def tiny_llama(make_tiny: Callable[..., TinyModel]) -> TinyModel:
    """Llama, grouped heads."""
    return make_tiny("llama")


@pytest.fixture(scope="session")
def tiny_qwen2(make_tiny: Callable[..., TinyModel]) -> TinyModel:
    """Qwen2: biases, tied embeddings; every second layer with a sliding window."""
    return make_tiny(
        "qwen2",
        seed=1,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
    )


@pytest.fixture(params=["tiny_llama", "tiny_qwen2"])
def tiny(request: pytest.FixtureRequest) -> TinyModel:
    """Each of the two in turn."""
    model: TinyModel = request.getfixturevalue(request.param)
    return model
