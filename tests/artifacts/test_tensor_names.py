"""Names of tensors as wrappers of models and states of modules have them, and peft's."""

from __future__ import annotations

import pytest

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.revision import as_peft_names

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "peft", "changes"),
    [
        (f"{Q}.lora_A.weight", f"{Q}.lora_A.weight", ()),
        (f"_orig_mod.{Q}.lora_A.weight", f"{Q}.lora_A.weight", ("_orig_mod.",)),
        (f"module._orig_mod.{Q}.lora_B.weight", f"{Q}.lora_B.weight", ("module.", "_orig_mod.")),
        (
            Q.replace("layers.0", "layers.0._fsdp_wrapped_module._checkpoint_wrapped_module") + ".lora_A.weight",
            f"{Q}.lora_A.weight",
            ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."),
        ),
        (f"{Q}.lora_A.default.weight", f"{Q}.lora_A.weight", ("default.",)),
        (f"{Q}.lora_B.my-adapter.weight", f"{Q}.lora_B.weight", ("my-adapter.",)),
        (f"{Q}.lora_magnitude_vector.default.weight", f"{Q}.lora_magnitude_vector", ("default.",)),
        (f"{Q}.lora_magnitude_vector.default", f"{Q}.lora_magnitude_vector", ("default.",)),
        (f"{Q}.lora_embedding_A.default", f"{Q}.lora_embedding_A", ("default.",)),
        (
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta.default",
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
            ("default.",),
        ),
        ("base_model.model.score.modules_to_save.default.weight", "base_model.model.score.weight", ("default.",)),
        (
            "base_model.model.classifier.modules_to_save.default.dense.bias",
            "base_model.model.classifier.dense.bias",
            ("default.",),
        ),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", f"{Q}.lora_A.weight", ("base_model.model.",)),
        (
            "model._orig_mod.layers.0.self_attn.q_proj.lora_A.default.weight",
            f"{Q}.lora_A.weight",
            ("_orig_mod.", "default.", "base_model.model."),
        ),
        (
            "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight",
            f"{Q}.lora_A.weight",
            ("language_model.",),
        ),
        (
            "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_B.weight",
            f"{Q}.lora_B.weight",
            ("language_model.",),
        ),
        # Names that only look like these.
        ("base_model.model.my_module.lora_A.weight", "base_model.model.my_module.lora_A.weight", ()),
    ],
)
def test_names_become_pefts(name: str, peft: str, changes: tuple[str, ...]) -> None:
    assert as_peft_names({name: 1}) == ({peft: 1}, changes)


def test_the_bases_own_beside_a_module_trained_in_full_is_left_out() -> None:
    names = ("score.original_module.weight", "score.modules_to_save.default.weight")
    tensors = {f"base_model.model.{name}": at for at, name in enumerate(names)}
    assert as_peft_names(tensors)[0] == {"base_model.model.score.weight": 1}


def test_a_file_of_two_adapters_is_refused_by_their_names() -> None:
    with pytest.raises(ArtifactError, match=r"of first and of second; save one adapter: .*selected_adapters"):
        as_peft_names({f"{Q}.lora_A.{name}.weight": 1 for name in ("first", "second")})
