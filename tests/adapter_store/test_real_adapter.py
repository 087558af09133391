"""An adapter that peft itself trained nothing into and saved, over a model that transformers saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE

if TYPE_CHECKING:
    from tests.adapter_store.conftest import Client


@pytest.mark.model
async def test_pefts_own_files_are_accepted(client: Client, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    sizes = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
    )
    base: Any = LlamaForCausalLM(sizes)
    base.save_pretrained(tmp_path / "base")
    config = LoraConfig(
        r=4,
        target_modules="all-linear",
        rank_pattern={"k_proj": 8},
        use_rslora=True,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    get_peft_model(base.to(torch.bfloat16), config).save_pretrained(str(tmp_path / "adapter"))
    registered = await client.register(read_base_model(str(tmp_path / "base")))
    files = {name: (tmp_path / "adapter" / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
    revision = (await client.upload("real", files)).revision
    assert (revision.rank, revision.base_digest) == (8, registered.digest)
    assert await client.download(revision.name) == (revision, files)
