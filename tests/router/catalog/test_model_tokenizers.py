"""Tokenizer files that are made to end a router: it keeps them away, serves the others, and takes mended ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.terms import QueueLimits
from loraplex.router.catalog.cells import LOOK_S, CellServer
from loraplex.router.catalog.models import LOOK_AGAIN_S, Models, ModelTokenizers
from loraplex.router.catalog.store_client import Manifest, RegisteredModel
from loraplex.router.request import PromptOptions
from loraplex.router.text.file_tokenizer import FileTokenizer
from loraplex.router.text.tokenizer import PromptTokenizer
from loraplex.runtime.rpc.errors import InvalidField
from loraplex.runtime.rpc.tasks import every
from tests.router.small_tokenizers import files_of


def tokenizer(**parts: Any) -> dict[str, bytes]:
    """Return the files of a small tokenizer, some of whose parts are replaced."""
    return {"tokenizer.json": json.dumps(json.loads(files_of("byte-level")["tokenizer.json"]) | parts).encode()}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replacing(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


HOSTILE = {
    "an empty map panics": (tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": ""}), "Precompiled"),
    "a regex that backtracks panics": (tokenizer(pre_tokenizer=split("(a|a)+$")), "retry-limit-in-match"),
    "a letter becomes ten thousand": (tokenizer(normalizer=replacing("b" * 10_000)), "tokens of 1 characters"),
    "a letter becomes a hundred": (tokenizer(normalizer=replacing("é" * 100)), "tokens of 1 characters"),
    "normalizers in normalizers": (
        {"tokenizer.json": b'{"normalizer":' + b'{"type":"Sequence","normalizers":[' * 50_000},
        "recursion|EOF|ended",
    ),
    "bytes that are no text": ({"tokenizer.json": b"\xff"}, "are not UTF-8"),
}


def manifest(name: str, files: dict[str, bytes]) -> Manifest:
    return Manifest(name, f"sha256:{name}", "llama", 64, 1_000, files)


@pytest.mark.parametrize("name", HOSTILE)
async def test_files_that_panic_hang_or_blow_up_are_not_loaded(name: str, caplog: pytest.LogCaptureFixture) -> None:
    files, why = HOSTILE[name]
    now = 0.0
    texts, bad = ModelTokenizers(lambda: now), manifest("bad", files)
    assert await texts.load(bad) is None
    assert texts.is_refused(bad.digest)
    assert texts.refusals[0].startswith("bad (")
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(texts.refusals[0])
    now = LOOK_AGAIN_S
    assert not texts.is_refused(bad.digest)
    assert await texts.load(bad) is None  # the same files: they are not tried again
    assert len([record for record in caplog.records if "can't be served" in record.message]) == 1
    assert await texts.load(manifest("bad", files_of("byte-level"))) is not None
    assert not texts.refusals


class Registered:
    """A store with two models, one of which is made to end its readers."""

    async def models(self) -> dict[str, list[RegisteredModel]]:
        return {name: [RegisteredModel(f"sha256:{name}")] for name in ("bad", "good")}

    async def manifest(self, name: str) -> Manifest:
        name = name.partition("@")[0]
        return manifest(name, files_of("byte-level") if name == "good" else HOSTILE["an empty map panics"][0])


async def test_a_router_goes_on_beside_a_model_that_panics() -> None:
    store: Any = Registered()
    models = Models(store, [CellServer("main", Redis())], QueueLimits())  # Redis is not asked
    following = asyncio.create_task(every(LOOK_S, models.look_at_store))
    while not models.listed:  # noqa: ASYNC110  # nothing reports it
        await asyncio.sleep(0.01)
    assert not following.done()
    assert [model.manifest.name for model in models.served] == ["good"]
    following.cancel()


async def test_a_prompt_on_which_a_tokenizer_panics_is_refused_by_its_field() -> None:
    text, encoder = FileTokenizer(tokenizer(pre_tokenizer=split("(a|a)+$"))), PromptTokenizer(1)
    with pytest.raises(InvalidField, match="the model's tokenizer failed") as caught:
        await encoder.tokenize(text, "a" * 40 + "!", "prompt", "acme", 1_000, PromptOptions())
    assert (caught.value.field, caught.value.reason) == ("prompt", "TOKENIZER_FAILED")
    encoder.close()
