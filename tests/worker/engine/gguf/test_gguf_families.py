"""Every architecture that is imported: the model that was converted comes back, with its configuration.

transformers' own reading of these files is wrong for most, since it passes over keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from loraplex.contracts.artifacts import ArtifactError
from loraplex.model_tools.gguf import import_gguf
from loraplex.model_tools.gguf.config import ARCHITECTURES
from tests.worker.engine.gguf.written import logits, make_source, write_model

# Norms of these are stored with 1 added, which rounds.
ROUNDED = ("gemma2", "gemma3", "nemotron")
# Fields that say nothing of the computation, or that a GGUF file does not have.
OTHER = {"_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "n_inner"}
OTHER |= {"feed_forward_length", "partial_rotary_factor", "unk_token_id", "max_window_layers", "n_ctx"}


def check(source: Any, file: Path, directory: Path, *, rounded: bool = False) -> None:
    import_gguf(file, directory, "float32")
    auto: Any = AutoModelForCausalLM
    imported = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    before, after = source.config.to_dict(), imported.config.to_dict()
    changed = {name: (before.get(name), after.get(name)) for name in (before.keys() | after.keys()) - OTHER}
    assert not {
        name: values
        for name, values in changed.items()
        if values[0] != values[1] and not (isinstance(values[0], float) and values[1] == pytest.approx(values[0]))
    }
    state = imported.state_dict()
    assert state.keys() == source.state_dict().keys()
    for name, tensor in source.state_dict().items():
        if not (rounded and "norm" in name):
            assert torch.equal(state[name], tensor), name
    torch.testing.assert_close(logits(imported), logits(source))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_converted_model_comes_back(architecture: str, tmp_path: Path) -> None:
    source = make_source(architecture, tmp_path / "source")
    file = write_model(source, tmp_path / "model.gguf", architecture)
    check(source, file, tmp_path / "imported", rounded=architecture in ROUNDED)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"rope_theta": 5e5, "original_max_position_embeddings": 8192}


def divisors(scaling: dict[str, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Return what llama.cpp's converter writes for Llama 3's rope scaling: a divisor for each frequency."""
    factors = []
    for frequency in 1 / scaling["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim):
        wavelength, context = 2 * np.pi / frequency, scaling["original_max_position_embeddings"]
        if wavelength < context / scaling["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > context / scaling["low_freq_factor"]:
            factors.append(scaling["factor"])
        else:
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def test_rope_scaling_of_llama_3_comes_back(tmp_path: Path) -> None:
    source = make_source("llama", tmp_path / "source", rope_parameters=LLAMA3, head_dim=32)
    factors = divisors(LLAMA3, 32)
    assert len({1.0, 8.0} & set(factors.tolist())) == 2
    assert len(set(factors.tolist())) > 2
    file = write_model(source, tmp_path / "model.gguf", "llama", tensors={"rope_freqs.weight": factors})
    check(source, file, tmp_path / "imported")
    other = write_model(source, tmp_path / "other.gguf", "llama", tensors={"rope_freqs.weight": factors**2})
    with pytest.raises(ArtifactError, match=r"rope_freqs\.weight is not the rope scaling of Llama 3"):
        import_gguf(other, tmp_path / "refused")


def test_linear_rope_scaling_comes_back(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    source = make_source("llama", tmp_path / "source", rope_parameters=scaling)
    check(source, write_model(source, tmp_path / "model.gguf", "llama"), tmp_path / "imported")
