"""Manifests of encoders, and the heads that adapters bring, from headers alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from loraplex.contracts.artifacts import ArtifactError, MismatchError
from loraplex.contracts.artifacts.base_model import ModuleShape, read_base_model
from loraplex.contracts.artifacts.checkpoint import TensorInfo
from loraplex.contracts.artifacts.encoders import ENCODERS, canonical_header, check_head, head_tensors, with_prefix
from loraplex.contracts.artifacts.peft_config import parse_peft_config

ROBERTA: dict[str, Any] = {
    "model_type": "roberta", "architectures": ["RobertaForSequenceClassification"], "max_position_embeddings": 20,
    "vocab_size": 32, "pad_token_id": 1, "id2label": {"0": "no", "1": "yes"},
}  # fmt: skip
BODY = {
    "embeddings.word_embeddings.weight": (32, 8),
    "embeddings.position_embeddings.weight": (20, 8),
    "encoder.layer.0.attention.self.query.weight": (8, 8),
    "encoder.layer.0.output.dense.weight": (8, 12),
}
HEAD = {"classifier.dense.weight": (8, 8), "classifier.out_proj.weight": (2, 8)}


def write(directory: Path, config: dict[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    save_file(
        {name: rng.standard_normal(shape).astype(np.float32) for name, shape in tensors.items()},
        directory / "model.safetensors",
    )
    return str(directory)


def test_an_encoder_is_known_by_one_set_of_names_whatever_class_it_was_saved_from(tmp_path: Path) -> None:
    whole = {f"roberta.{name}": shape for name, shape in BODY.items()} | HEAD
    base = read_base_model(write(tmp_path, ROBERTA, whole))
    assert (base.tasks, base.labels, base.pooling, base.context_length) == (
        ("embed", "classify"),
        ("no", "yes"),
        "mean",
        18,
    )
    assert base.modules == (
        ModuleShape("classifier.dense", 8, 8),
        ModuleShape("classifier.out_proj", 8, 2),
        ModuleShape("roberta.embeddings.word_embeddings", 32, 8),
        ModuleShape("roberta.encoder.layer.0.attention.self.query", 8, 8),
        ModuleShape("roberta.encoder.layer.0.output.dense", 12, 8),
    )
    masked = ROBERTA | {"architectures": ["RobertaForMaskedLM"]}
    alone = read_base_model(write(tmp_path, masked, BODY | {"lm_head.dense.weight": (8, 8)}))
    assert (alone.tasks, alone.labels) == (("embed",), ())
    assert alone.modules == base.modules[2:]


def test_sentence_transformers_files_say_the_pooling(tmp_path: Path) -> None:
    directory = write(tmp_path, ROBERTA, BODY)
    digest = read_base_model(directory).digest
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(
        '{"pooling_mode_cls_token": true, "word_embedding_dimension": 8}'
    )
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Normalize"}]')
    base = read_base_model(directory)
    assert base.pooling == "cls"
    assert base.digest != digest
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.cross_encoder.modules.LogitScore"}]')
    (tmp_path / "1_LogitScore").mkdir()
    (tmp_path / "1_LogitScore" / "config.json").write_text('{"true_token_id": 7, "false_token_id": 3}')
    assert read_base_model(directory).files["logit_score.json"].endswith(b'"false_token_id": 3}')
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense"}]')
    with pytest.raises(ArtifactError, match=r"modules\.json: Dense is not served"):
        read_base_model(directory)
    (tmp_path / "modules.json").unlink()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ArtifactError, match="pooling_mode_max_tokens is not served"):
        read_base_model(directory)


@pytest.mark.parametrize(("value", "context"), [("7", 7), ("512", 18), ("null", 18)])
def test_sentence_transformers_files_say_how_long_a_text_may_be(tmp_path: Path, value: str, context: int) -> None:
    directory = write(tmp_path, ROBERTA, BODY)
    digest = read_base_model(directory).digest
    (tmp_path / "sentence_roberta_config.json").write_text(f'{{"max_seq_length": {value}, "do_lower_case": false}}')
    base = read_base_model(directory)
    assert (base.context_length, base.digest) == (context, digest)
    (tmp_path / "sentence_roberta_config.json").write_text('{"max_seq_length": "7"}')
    with pytest.raises(ArtifactError, match=r"sentence_roberta_config.json: max_seq_length is '7', not a whole number"):
        read_base_model(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["RobertaForTokenClassification"]},
            "RobertaForTokenClassification is not supported, only Rob",
        ),
        ({"is_decoder": True}, "is_decoder: an encoder that decodes"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key' is not served"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rope type 'dynamic' is not supported"),
    ],
)
def test_encoders_that_would_be_computed_wrongly_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArtifactError, match=message):
        read_base_model(write(tmp_path, ROBERTA | changes, BODY))


def test_decoders_that_were_saved_as_classifiers_are_refused(tmp_path: Path) -> None:
    config = ROBERTA | {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    tensors = {"model.layers.0.mlp.up_proj.weight": (8, 8), "score.weight": (2, 8)}
    with pytest.raises(ArtifactError, match="LlamaForSequenceClassification is not served; push the classifier as an"):
        read_base_model(write(tmp_path, config | {"num_hidden_layers": 1}, tensors))


def header(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    return {f"base_model.model.{name}": TensorInfo("F32", shape, 0, 0) for name, shape in tensors.items()}


QUERY = "encoder.layer.0.attention.self.query.lora_A.weight"


def config(**fields: Any) -> Any:
    return parse_peft_config(json.dumps({"peft_type": "LORA", "r": 2, "task_type": "SEQ_CLS"} | fields).encode())


def test_names_of_adapters_that_were_trained_without_a_head() -> None:
    plain = header({QUERY: (2, 8), "classifier.dense.weight": (8, 8)})
    named = header({f"roberta.{QUERY}": (2, 8), "classifier.dense.weight": (8, 8)})
    assert with_prefix(plain, "roberta") == named == with_prefix(named, "roberta")
    causal = header({"layers.0.mlp.up_proj.lora_A.weight": (2, 8)})
    assert list(with_prefix(causal, "llama")) == ["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"]
    with pytest.raises(MismatchError, match=r"rank_pattern: begins a pattern with '\^'"):
        canonical_header(plain, config(rank_pattern={"^encoder": 2}), "roberta")
    assert canonical_header(named, config(rank_pattern={"^roberta.encoder": 2}), "roberta") == (named, ())


def test_the_heads_that_adapters_bring() -> None:
    pooler = {"pooler.dense.weight": (8, 8), "pooler.dense.bias": (8,)}
    classifier = {"classifier.weight": (3, 8), "classifier.bias": (3,)}
    whole = header(pooler | classifier)
    assert list(head_tensors(whole, "deberta-v2")) == [*pooler, *classifier]
    three = {"0": "a", "1": "b", "2": "c"}
    check_head(whole, config(id2label=three), "deberta-v2", (), 8)
    # peft saves no pooler by default, and a base that never classified has none.
    with pytest.raises(
        MismatchError, match=r"neither in the adapter nor in the base; train with modules_to_save=\['pooler'"
    ):
        check_head(header(classifier), config(), "deberta-v2", (), 8)
    check_head(header(classifier), config(), "deberta-v2", ("pooler.dense",), 8)
    with pytest.raises(MismatchError, match=r"has the shape \[3, 9\], not \[3, 8\]"):
        check_head(header(pooler | {"classifier.weight": (3, 9)}), config(), "deberta-v2", (), 8)
    with pytest.raises(ArtifactError, match="id2label: names 1 labels; the head has 3"):
        check_head(whole, config(id2label={"0": "a"}), "deberta-v2", (), 8)
    with pytest.raises(ArtifactError, match="names the labels of a head that the adapter does not have"):
        check_head(header({}), config(id2label=three), "deberta-v2", (), 8)


def test_every_family_has_a_head_and_names_of_its_own() -> None:
    assert len(ENCODERS) == 5
    assert len({name for family in ENCODERS.values() for name in family.architectures}) == 16
