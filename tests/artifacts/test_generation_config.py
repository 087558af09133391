"""Values of a model's generation_config.json, for requests that leave sampling unset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.generation_config import UNSAID, GenerationConfig, read_generation_config


def read(**content: Any) -> GenerationConfig:
    return read_generation_config({"generation_config.json": json.dumps(content).encode()})


def test_the_manifest_has_the_fields_of_sampling(model_directory: Path) -> None:
    before = read_base_model(str(model_directory))
    assert before.generation_config == UNSAID
    content = {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_new_tokens": 2048, "eos_token_id": 2}
    (model_directory / "generation_config.json").write_text(json.dumps(content | {"top_p": None, "num_beams": 4}))
    base = read_base_model(str(model_directory))
    del content["eos_token_id"]
    assert base.generation_config.given == content
    assert base.digest == before.digest, "a model that is registered keeps its digest"


@pytest.mark.parametrize(
    ("content", "sampling", "text"),
    [
        ({}, {}, ""),
        ({"do_sample": True}, {"temperature": 1.0}, "temperature 1"),
        (
            {"do_sample": True, "temperature": 1, "top_k": -1, "min_p": 0.05, "typical_p": 0.9},
            {"temperature": 1.0, "top_k": 0, "min_p": 0.05, "typical_p": 0.9},
            "temperature 1, top_k 0, min_p 0.05, typical_p 0.9",
        ),
        # transformers draws tokens only with do_sample, which is false by default.
        ({"temperature": 0.6, "top_p": 0.9}, {}, ""),
        ({"do_sample": False, "top_k": 5, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}, None),
        ({"max_new_tokens": 1_048_576}, {}, "max_tokens 1048576"),
    ],
)
def test_its_values_stand_for_unset_ones(content: dict[str, Any], sampling: dict[str, Any], text: str | None) -> None:
    config = read(**content)
    as_requests_have_them = {n: v if n == "top_k" else float(np.float32(v)) for n, v in sampling.items()}
    assert config.sampling == as_requests_have_them
    assert text is None or config.text == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": "0.6"}, "temperature: '0.6' is not a number; correct it or take it out"),
        ({"temperature": True}, "temperature: 'True' is not a number"),
        ({"temperature": -1}, "temperature: -1 is not between 0 and 100"),
        ({"temperature": 1e300}, "temperature: inf is not between 0 and 100"),
        ({"temperature": 10**400}, "temperature: '1000.*' is not a number"),
        ({"do_sample": 1}, "do_sample: '1' is not true or false"),
        ({"top_k": 50.0}, "top_k: '50.0' is not a whole number of at most 32 bits"),
        ({"top_k": -2}, "top_k: -2 is not between 0 and"),
        ({"do_sample": False, "top_p": 1.5}, "top_p: 1.5 is not greater than 0 and at most 1"),
        ({"top_p": 1e-60}, "top_p: 0 is not greater than 0 and at most 1"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0 is not between 1 and"),
        ({"repetition_penalty": float("nan")}, "is not valid JSON: NaN is not JSON"),
    ],
)
def test_a_bad_value_is_refused_by_file_and_field(model_directory: Path, content: dict[str, Any], message: str) -> None:
    (model_directory / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=f"^generation_config.json: {message}") as refused:
        read_base_model(str(model_directory))
    assert len(str(refused.value)) < 150


def test_values_of_later_versions_are_left_out() -> None:
    assert GenerationConfig.of({"top_h": 0.5, "top_k": 3}) == GenerationConfig(top_k=3)
