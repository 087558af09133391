"""Tiny random encoders with peft's adapters, and what transformers and peft compute of each text alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraplex.contracts.options import Encode, StoppingParams
from loraplex.worker.engine_api import AdapterSource, NewSequence

VOCAB = 60
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "type_vocab_size": 2, "pad_token_id": 1, "num_labels": 2,
}  # fmt: skip
RELATIVE: dict[str, Any] = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0, "pooler_hidden_size": 32,
}  # fmt: skip
# model_type and the fields that make its own paths run. DeBERTa's second model is shaped like the first version's.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "roberta": ("roberta", {"type_vocab_size": 1}),
    "xlm-roberta": ("xlm-roberta", {"type_vocab_size": 1}),
    "deberta-v3": ("deberta-v2", RELATIVE | {"share_att_key": True}),
    "deberta-v2": (
        "deberta-v2",
        RELATIVE | {"conv_kernel_size": 3, "position_buckets": -1, "embedding_size": 24, "max_relative_positions": 12,
                    "position_biased_input": True, "type_vocab_size": 2},
    ),
    "modernbert": (
        "modernbert",
        {"local_attention": 8, "global_attn_every_n_layers": 2, "classifier_pooling": "mean", "num_hidden_layers": 3},
    ),
}  # fmt: skip


def make_model(name: str, directory: Path) -> Any:
    """Make and save a classifier whose weights matter; returns it as transformers loads it."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    auto: Any = AutoModelForSequenceClassification
    model_type, own = MODELS[name]
    model = auto.from_config(AutoConfig.for_model(model_type, **(SIZES | own)), dtype=torch.float32)
    scatter(model, 0, lambda _: True)
    model.save_pretrained(directory)
    return auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def scatter(model: Any, seed: int, chosen: Any) -> None:
    """Fill the chosen parameters with random values of a size that matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not chosen(name):
            continue
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name.lower() and parameter.ndim == 1:
            parameter.data.copy_(1 + 0.1 * values if name.endswith("weight") else 0.1 * values)
        elif "lora_magnitude" in name:
            parameter.data *= 1 + 0.3 * values
        else:
            parameter.data.copy_(values * (0.2 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5))


@dataclass
class Tuned:
    """A model with an adapter, and the adapter's directory; `body` is the encoder without its head."""

    model: Any
    body: Any
    source: AdapterSource | None = None


@dataclass
class EncoderOracle:
    """A saved encoder, and its adapters by name; "" is the model alone."""

    directory: Path
    tuned: dict[str, Tuned] = field(default_factory=dict)

    def classifier(self, labels: int = 2) -> Any:
        """Load the model anew."""
        from transformers import AutoModelForSequenceClassification

        auto: Any = AutoModelForSequenceClassification
        return auto.from_pretrained(
            self.directory,
            dtype=torch.float32,
            attn_implementation="eager",
            num_labels=labels,
            ignore_mismatched_sizes=True,
        ).eval()

    def add_classifier(self, name: str, seed: int, labels: int, **config: Any) -> None:
        """Train, as it were, an adapter with a head of its own."""
        self._add(name, seed, self.classifier(labels), task_type="SEQ_CLS", **config)

    def add_features(self, name: str, seed: int, **config: Any) -> None:
        """Train, as it were, an adapter of the encoder without its head."""
        from transformers import AutoModel

        auto: Any = AutoModel
        model = auto.from_pretrained(self.directory, dtype=torch.float32, attn_implementation="eager").eval()
        self._add(name, seed, model, task_type="FEATURE_EXTRACTION", **config)

    def _add(self, name: str, seed: int, model: Any, **config: Any) -> None:
        from peft import LoraConfig, get_peft_model

        peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, **config))
        scatter(peft, seed, lambda one: "lora_" in one or "modules_to_save" in one)
        directory = self.directory.parent / name
        peft.save_pretrained(str(directory))
        inner: Any = peft.base_model.model
        body = getattr(inner, inner.base_model_prefix, inner)
        self.tuned[name] = Tuned(peft.eval(), body, AdapterSource(name, str(directory)))

    @torch.inference_mode()
    def vector(self, adapter: str, ids: tuple[int, ...], encode: Encode) -> Tensor:
        """Compute one text's vector, alone."""
        tuned = self.tuned[adapter]
        batch: dict[str, Tensor] = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
        if getattr(tuned.body.config, "type_vocab_size", 0) > 1:
            types = [0] * (len(ids) - encode.pair_tokens) + [1] * encode.pair_tokens
            batch["token_type_ids"] = torch.tensor([types])
        if encode.task == "classify":
            logits: Tensor = tuned.model(**batch).logits[0]
            return logits
        hidden: Tensor = tuned.body(**batch).last_hidden_state[0]
        return {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[encode.pooling or "mean"]

    def request(self, name: str, adapter: str, ids: tuple[int, ...], encode: Encode) -> NewSequence:
        """Return the sequence of a text."""
        return NewSequence(
            name, ids, adapter=self.tuned[adapter].source, stopping=StoppingParams(max_tokens=0), encode=encode
        )


def make_oracle(name: str, directory: Path) -> EncoderOracle:
    """Return an encoder without adapters."""
    model = make_model(name, directory / "model")
    return EncoderOracle(directory / "model", {"": Tuned(model, getattr(model, model.base_model_prefix))})


def texts(count: int, seed: int, longest: int = 40) -> list[tuple[int, ...]]:
    """Return texts of lengths from 1 on, the padding's id among theirs."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist()) for length in lengths]


def vectors_of(outputs: Mapping[str, list[Any]]) -> dict[str, Tensor]:
    """Return the vectors of sequences that ended well, each with its only output."""
    found = {}
    for name, its in outputs.items():
        assert all(one.failure is None for one in its), its
        assert [(one.finish, one.failure, one.token_ids, one.offset) for one in its] == [("length", None, (), 0)]
        found[name] = torch.tensor(its[0].vector)
    return found


def dequantized(oracle: EncoderOracle, scheme: str, directory: Path) -> EncoderOracle:
    """Save an encoder with the numbers that its weights have once they are quantized."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForSequenceClassification

    from loraplex.contracts.artifacts.checkpoint import read_checkpoint
    from loraplex.contracts.artifacts.encoders import ENCODERS, inner_weights
    from loraplex.contracts.artifacts.quantization import parse_quantization
    from loraplex.worker.engine.quantized.weight import quantize_weight

    auto: Any = AutoModelForSequenceClassification
    model = oracle.tuned[""].model
    quantization = parse_quantization(scheme)
    assert quantization is not None
    family = ENCODERS[model.config.model_type]
    tensors = load_file(oracle.directory / "model.safetensors")
    for weight in inner_weights(read_checkpoint(oracle.directory), family).values():
        if weight.scheme(quantization):
            tensors[weight.tensor] = quantize_weight(tensors[weight.tensor], quantization).dequantize()
    (directory / "model").mkdir(parents=True)
    save_file(tensors, directory / "model" / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(directory / "model")
    loaded = auto.from_pretrained(directory / "model", dtype=torch.float32, attn_implementation="eager").eval()
    return EncoderOracle(directory / "model", {"": Tuned(loaded, getattr(loaded, loaded.base_model_prefix))})
