"""The whole path with a real encoder in float32: vectors and labels equal those of transformers and peft."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import loraplex_client as lx
import pytest

from tests.e2e.conftest import running_cluster

pytestmark = pytest.mark.model
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
FLAGS = ("--dtype", "float32", "--threads", "1", "--rows", "8")
WORDS = [
    "[UNK]",
    "[PAD]",
    "[CLS]",
    "[SEP]",
    *["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "cat"],
    *"abcdefgh",
]
LABELS = {"0": "bad", "1": "fair", "2": "good"}


def make_encoder(directory: Path) -> Any:
    """Save a BERT without a head, with its tokenizer and two adapters: one has a head with three labels."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    from tests.worker.engine.encoder.encoder_oracle import make_oracle

    oracle = make_oracle("bert", directory)
    oracle.add_classifier("own", 1, 3, target_modules=["query", "value"])
    oracle.add_features("plain", 2, target_modules=["query", "value"])
    body: Any = oracle.tuned[""].body
    body.save_pretrained(oracle.directory)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(oracle.directory / "tokenizer.json"))
    config = directory / "own" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"id2label": LABELS}))
    return oracle


async def test_texts_of_several_adapters_are_exact_and_what_is_not_served_is_refused(
    tmp_path: Path, eventually: Eventually, one_thread: None
) -> None:
    import torch

    from artifacts.encode import Encode

    oracle = make_encoder(tmp_path)
    texts: list[Any] = ["the quick brown fox", "a", "jumps over the lazy dog and the cat " * 5, ("the fox", "a b c")]
    words = [[WORDS.index(word) for word in text.split()] for text in texts if isinstance(text, str)]
    ids = [(2, *of_text, 3) for of_text in words] + [(2, 4, 7, 3, *map(WORDS.index, "abc"), 3)]
    pairs = [0, 0, 0, 4]

    def truth(adapter: str, task: Any, at: int, pooling: Any = "") -> Any:
        return oracle.vector(adapter, ids[at], Encode(task, pooling, pairs[at]))

    adapters = {name: tmp_path / name for name in ("own", "plain")}
    async with running_cluster(tmp_path / "cluster", str(oracle.directory), adapters, worker_flags=FLAGS) as cluster:
        client = cluster.client
        poolings: tuple[Any, ...] = (None, "cls", "last")
        asked = [(name, pooling) for name in (None, *adapters) for pooling in poolings]
        found = await asyncio.gather(
            *(client.embed(texts, adapter_id=name, pooling=pooling, normalize=False) for name, pooling in asked)
        )
        for (name, pooling), answer in zip(asked, found, strict=True):
            assert answer.usage.prompt_tokens == sum(map(len, ids))
            for at, vector in enumerate(answer.vectors):
                expected = truth(name or "", "embed", at, pooling or "")
                assert torch.allclose(torch.tensor(vector), expected, atol=1e-4), (name, pooling, at)
        labels = await client.classify(texts, adapter_id="own")
        assert labels.labels == tuple(LABELS.values())
        for at, one in enumerate(labels.classifications):
            logits = truth("own", "classify", at)
            assert torch.allclose(torch.tensor(one.logits), logits, atol=1e-4)
            assert torch.allclose(torch.tensor(one.probabilities), logits.softmax(0), atol=1e-4)
            assert one.label == LABELS[str(int(logits.argmax()))]
        long = "the cat " * 40
        with pytest.raises(lx.InvalidRequestError, match=r"inputs\[0\].text: 82 tokens; the model takes 64 tokens"):
            await client.embed([long])
        (cut,) = (await client.embed([long], truncate=True, normalize=False)).vectors
        whole = oracle.vector("", (2, *([4, 13] * 31), 3), Encode("embed"))
        assert torch.allclose(torch.tensor(cut), whole, atol=1e-4)
        await refusals(client)
        await eventually(cluster.idle)


async def refusals(client: lx.AsyncClient) -> None:
    """Ask for what an encoder without a head does not do."""
    for call, words in (
        (client.generate("the fox"), "generates nothing; call Embed or Classify"),
        (client.score("the fox", ["a"]), "generates nothing; call Embed or Classify"),
        (client.classify(["the fox"]), "has no classification head; name an adapter that brings one"),
        (client.classify(["the fox"], adapter_id="plain"), "has no classification head; name an adapter that brings"),
    ):
        with pytest.raises(lx.FailedPreconditionError, match=words) as caught:
            await call
        assert caught.value.reason == "WRONG_TASK"
