"""The real model, its adapters and the encoder of examples/real.py. Where they are not cached, these tests are skipped.

`make real` fetches them first and asks everything, `make nightly` a few questions.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from examples.real import ADAPTERS, ENCODER, is_cached, real_encoder, real_model
from examples.tasks import TASKS

# Whether all of it is asked.
WHOLE = os.environ.get("REAL") == "1"


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The real model as a transformers directory in bfloat16."""
    if not (WHOLE or is_cached()):
        pytest.skip("the real model is not cached; `make real` fetches it")
    return real_model()


@pytest.fixture(scope="session")
def encoder_directory() -> Path:
    """The real encoder."""
    if not (WHOLE or is_cached(ENCODER)):
        pytest.skip("the real encoder is not cached; `make real` fetches it")
    return real_encoder()


@pytest.fixture(scope="session")
def adapters() -> dict[str, Path]:
    """The trained adapters by name."""
    return {task.adapter: ADAPTERS / task.tenant / task.adapter for task in TASKS.values()}


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> Any:
    """The real model's tokenizer, as transformers reads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_directory)


@pytest.fixture(scope="session")
def peft_model(model_directory: Path, adapters: dict[str, Path], one_thread: None) -> Any:
    """The real model with its adapters, by transformers and peft in float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    base = auto.from_pretrained(model_directory, dtype=torch.float32)
    (first, path), *others = adapters.items()
    model = PeftModel.from_pretrained(base, str(path), adapter_name=first)
    for name, path in others:
        model.load_adapter(str(path), adapter_name=name)
    return model.eval()
