"""A model as a gateway sees it: its description, and the zip of its tokenizer."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.contracts.artifacts.generation_config import UNSAID, GenerationConfig
from loraplex.engine_protocols.sglang_messages import reasoning_end
from loraplex.router.catalog.store_client import Manifest
from loraplex.router.text.chat import ChatTemplate
from loraplex.router.text.tokenizer import HashTokenizer, ModelTokenizer
from loraplex.runtime.rpc.errors import InvalidField, NotBuilt

pytest.importorskip("smg_grpc_proto", reason="the engine protocol's package is not installed: pip install '.[smg]'")

from smg_grpc_proto import sglang_scheduler_pb2 as engine

from loraplex.engine_protocols.answers import ReasoningCount
from loraplex.engine_protocols.engine_service import TokenizerFiles, model_info
from loraplex.engine_protocols.sglang_messages import engine_field_names

MODEL = Path(__file__).parents[3] / "examples" / "model"
DEFAULTS = GenerationConfig(do_sample=True, temperature=0.5, top_k=20, max_new_tokens=9)
FILES = {name: (MODEL / name).read_bytes() for name in ("config.json", "generation_config.json", "tokenizer.json")}


def manifest(**files: bytes) -> Manifest:
    """Return a model with these files."""
    return Manifest("tiny", "sha256:0", "llama", 512, 4096, files, tasks=("generate", "embed"), labels=("bad", "good"))


def test_a_model_is_described_by_its_own_files() -> None:
    info = model_info(engine, manifest(**FILES), DEFAULTS, "")
    config = json.loads(FILES["config.json"])
    assert (info.served_model_name, info.model_type, list(info.architectures)) == ("tiny", "llama", ["llama"])
    assert list(info.eos_token_ids) == [config["eos_token_id"]]
    assert (json.loads(info.id2label_json), info.num_labels) == ({"0": "bad", "1": "good"}, 2)
    assert json.loads(info.default_sampling_params_json) == {"temperature": 0.5, "top_k": 20}
    # No name that a gateway could look up at a hub.
    assert info.model_path == "/loraplex/sha256:0"
    assert model_info(engine, manifest(), UNSAID, "support").served_model_name == "support"
    bare = model_info(engine, manifest(), UNSAID, "")
    assert (bare.model_path, bare.default_sampling_params_json) == ("", "")


@pytest.mark.parametrize("config", [b"no JSON", b"[]", b'{"eos_token_id": ["x", true, -1, 7], "bos_token_id": "x"}'])
def test_files_that_anybody_may_have_written_break_nothing(config: bytes) -> None:
    info = model_info(engine, manifest(**{"config.json": config}), UNSAID, "")
    assert list(info.eos_token_ids) in ([], [7])
    assert (info.bos_token_id, info.pad_token_id) == (0, 0)


async def test_the_tokenizers_zip_comes_in_parts_with_its_hash_last() -> None:
    tokenizers, own = TokenizerFiles(), manifest(**FILES)
    sent: list[list[Any]] = [[chunk async for chunk in tokenizers.chunks(own)] for _ in range(2)]
    assert sent[0] == sent[1]
    whole = b"".join(chunk.data for chunk in sent[0])
    assert [chunk.sha256 for chunk in sent[0] if chunk.sha256] == [hashlib.sha256(whole).hexdigest()]
    assert sent[0][-1].sha256
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == FILES


async def test_calls_at_the_same_time_share_a_zip(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def zipped(files: Any) -> tuple[bytes, str]:
        made.append(len(files))
        return b"zip", "sha256"

    monkeypatch.setattr("loraplex.engine_protocols.engine_service._zipped", zipped)
    tokenizers, own = TokenizerFiles(), manifest(**FILES)

    async def ask() -> list[Any]:
        return [chunk async for chunk in tokenizers.chunks(own)]

    assert [len(chunks) for chunks in await asyncio.gather(*(ask() for _ in range(5)))] == [1] * 5
    assert len(made) == 1


def test_reasoning_is_counted_to_the_token_that_ends_it() -> None:
    thinks: Any = SimpleNamespace(
        chat=ChatTemplate(), tokenize=lambda mark, special_tokens: [9] if mark == "</think>" else [1, 2]
    )
    assert reasoning_end(thinks) == 9
    for text in (HashTokenizer(), ModelTokenizer()):
        with pytest.raises(NotBuilt):
            reasoning_end(text)
    for deltas, tokens in ((((1, 2), (3, 9, 4), (5, 9)), 3), (((1, 2), (3,)), 3), (((9,), (1,)), 0)):
        count = ReasoningCount(9)
        for delta in deltas:
            count.add(delta)
        assert count.tokens == tokens


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("sampling.top_p", "sampling_params.top_p"),
        ("stopping.max_tokens", "sampling_params.max_new_tokens"),
        ("json_schema.properties.a", "sampling_params.json_schema.properties.a"),
        ("inputs[0].token_ids", "tokenized.input_ids"),
        ("output.n", "sampling_params.n"),
        ("request_id", "request_id"),
    ],
)
def test_errors_name_the_protocols_own_fields(field: str, name: str) -> None:
    with pytest.raises(InvalidField) as caught, engine_field_names():
        raise InvalidField(field, "is wrong", reason="WRONG")
    assert (caught.value.field, caught.value.message, caught.value.reason) == (name, f"{name}: is wrong", "WRONG")
