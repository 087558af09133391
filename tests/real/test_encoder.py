"""Embeddings of the real encoder, equal to transformers' mean pooling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraplex_client import InvalidRequestError
from tests.e2e.conftest import running_cluster

pytestmark = [pytest.mark.model, pytest.mark.nightly]
TEXTS = [
    "The capital of France is Paris.",
    "Paris is France's capital city.",
    "A fox jumped over the fence.",
    "Der Mond scheint über Zürich.",
    "word " * 100,
    "longer " * 300,
]
# The maximum of sentence_bert_config.json.
MAX_SEQ_LENGTH = 256


async def test_embeddings_are_mean_pooled(encoder_directory: Path, tmp_path: Path, one_thread: None) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    auto: Any = AutoModel
    model = auto.from_pretrained(encoder_directory, dtype=torch.float32).eval()
    cut = {"truncation": True, "max_length": MAX_SEQ_LENGTH}
    batch = AutoTokenizer.from_pretrained(encoder_directory)(TEXTS, padding=True, return_tensors="pt", **cut)
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
    flags = ("--dtype", "float32")
    async with running_cluster(tmp_path / "cluster", str(encoder_directory), {}, worker_flags=flags) as cluster:
        answer = await cluster.client.embed(TEXTS, truncate=True)
        with pytest.raises(InvalidRequestError, match=f"is {MAX_SEQ_LENGTH} tokens; 302 tokens do not fit"):
            await cluster.client.embed(TEXTS)
    vectors = torch.tensor([list(vector) for vector in answer.vectors])
    torch.testing.assert_close(vectors, expected, atol=2e-6, rtol=0)
    alike = vectors @ vectors.t()
    assert alike[0, 1] > 0.9
    assert alike[0, 2] < 0.3
