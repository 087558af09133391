"""A GGUF file's import: equal to transformers' own loading of the file, in pieces, of parts, and never half done."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.options import StoppingParams
from loraplex.model_tools.gguf import base, import_gguf
from loraplex.model_tools.gguf import file as gguf_file
from loraplex.worker.engine_api import NewSequence
from tests.worker.engine.gguf.written import END, add_tensor, finish, make_source, write_model
from tests.worker.engine.model.tiny_families import CRAMPED, answer

TYPES = (GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1)
auto: Any = AutoModelForCausalLM


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_source("llama", tmp_path_factory.mktemp("source"))


@pytest.fixture
def file(source: Any, tmp_path: Path) -> Path:
    (tmp_path / "given").mkdir()
    return write_model(source, tmp_path / "given" / "model.gguf", "llama", GGMLQuantizationType.Q4_1)


def own_loading(file: Path, dtype: torch.dtype) -> Any:
    """The model as transformers loads it of a GGUF file."""
    return auto.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype, attn_implementation="eager").eval()


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tensors_have_the_bits_of_transformers_own_loading(
    source: Any, tmp_path: Path, kind: GGMLQuantizationType, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_model(source, tmp_path / "model.gguf", "llama", kind)
    monkeypatch.setattr(gguf_file, "PIECE_BYTES", 3 * 32 * 4)  # so that matrices come in pieces
    manifest = import_gguf(file, tmp_path / "imported", dtype)
    expected = own_loading(file, getattr(torch, dtype)).state_dict()
    tensors = load_file(tmp_path / "imported" / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert manifest.digest == read_base_model(str(tmp_path / "imported")).digest


def test_experts_have_the_bits_of_the_original(tmp_path: Path) -> None:
    source = make_source("qwen2moe", tmp_path / "source")
    file = write_model(source, tmp_path / "model.gguf", "qwen2moe", GGMLQuantizationType.F16)
    import_gguf(file, tmp_path / "imported")
    tensors = load_file(tmp_path / "imported" / "model.safetensors")
    for name, tensor in source.state_dict().items():
        stored = tensor if tensor.ndim == 1 or (tensor.shape[-1] % 32 and tensor.ndim < 2) else tensor.half()
        assert torch.equal(tensors[name], stored.bfloat16()), name


def test_tokenizer_template_and_ends_are_those_of_the_file(file: Path, tmp_path: Path) -> None:
    import_gguf(file, tmp_path / "imported")
    own = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    own.save_pretrained(tmp_path / "own")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "imported" / name).read_bytes()
    ours = AutoTokenizer.from_pretrained(tmp_path / "imported")
    chat = [{"role": "user", "content": "hello there <|im_end|> Ünïcode"}]
    rendered = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for tokenizer in (own, ours)]
    assert rendered[0] == rendered[1]
    assert read_base_model(str(tmp_path / "imported")).end_token_ids == (END,)
    assert "quantization_config" not in json.loads((tmp_path / "imported" / "config.json").read_text())


def test_the_token_that_ends_a_turn_ends_an_answer_too(source: Any, tmp_path: Path) -> None:
    file = write_model(source, tmp_path / "model.gguf", "llama", keys={"tokenizer.ggml.eot_token_id": 9})
    assert import_gguf(file, tmp_path / "imported").end_token_ids == (END, 9)
    assert read_base_model(str(tmp_path / "imported")).end_token_ids == (END, 9)


@pytest.mark.model
def test_the_engine_answers_as_transformers_with_the_file(
    file: Path, tmp_path: Path, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    import_gguf(file, tmp_path / "imported", "float32")
    expected = own_loading(file, torch.float32)
    prompts = [(7, 21, 90, 33, 64, 5, 12), (101, 4, 8), (200, 13, 77, 150, 6)]
    engine = make_engine(tmp_path / "imported", **CRAMPED)
    stopping = StoppingParams(max_tokens=12)
    arrivals = {0: [NewSequence(str(number), ids, stopping=stopping) for number, ids in enumerate(prompts)]}
    outputs = run_until_idle(engine, arrivals)
    ids = [tuple(token for output in outputs[str(number)] for token in output.token_ids) for number in range(3)]
    assert ids == [answer(expected, prompt) for prompt in prompts]


def split(file: Path, directory: Path) -> list[Path]:
    """Write a file's two parts, as llama-gguf-split does: keys in the first, tensors in both."""
    reader = GGUFReader(file)
    paths = [directory / f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    half = len(reader.tensors) // 2
    for number, tensors in enumerate((reader.tensors[:half], reader.tensors[half:])):
        writer = GGUFWriter(paths[number], "llama")
        fields = reader.fields.values() if number == 0 else ()
        for field in fields:
            if not field.name.startswith(("GGUF.", "general.architecture")):
                sub = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
    return paths


def test_parts_are_one_model(file: Path, tmp_path: Path) -> None:
    parts = split(file, tmp_path)
    whole = import_gguf(file, tmp_path / "whole")
    assert import_gguf(parts[1], tmp_path / "parts").digest == whole.digest
    alone = parts[0].rename(tmp_path / "renamed.gguf")
    refuse(
        alone,
        tmp_path,
        r"renamed\.gguf: is one of 2 parts; name them NAME-00001-of-00002\.gguf and so on in one folder$",
    )
    refuse(parts[1], tmp_path, r"is one of 2 parts, and model-00001-of-00002\.gguf is missing beside it$")


def test_many_shards_have_an_index(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = import_gguf(file, tmp_path / "one")
    monkeypatch.setattr(base, "SHARD_BYTES", 20_000)
    import_gguf(file, tmp_path / "several")
    names = [path.name for path in sorted((tmp_path / "several").glob("*.safetensors"))]
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert len(names) > 2
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    loaded = auto.from_pretrained(tmp_path / "several").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert one.modules == read_base_model(str(tmp_path / "several")).modules


def refuse(file: Path, tmp_path: Path, sentence: str) -> None:
    """Assert that an import ends with a sentence, and leaves nothing."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ArtifactError, match=sentence):
        import_gguf(file, tmp_path / "refused")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"general.type": "adapter"}, "is an adapter; push it with: loraplex adapters push$"),
        ({"general.type": "mmproj"}, r"is a projector of images or sound \(mmproj\); give the language model's file$"),
        ({"general.type": "imatrix"}, "is a GGUF file of type 'imatrix', not a model$"),
        ({"expert_count": 4}, r"llama\.expert_count is 4, which has no effect in transformers' model$"),
        ({"rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not served; use a version with a shorter"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            "lacks llama.rope.scaling.original_context_length$",
        ),
        ({"rope.dimension_count": 4}, r"llama\.rope\.dimension_count is 4, and transformers' model has 8$"),
        ({"attention.value_length": 16}, r"llama\.attention\.value_length is 16, and transformers' model has 8$"),
        ({"block_count": 3}, "lacks tensor blk.2.attn_q.weight, which a model of architecture llama has$"),
        ({"block_count": 1 << 30}, "has 1073741824 layers and 21 tensors$"),
        (
            {"block_count": 1},
            "has tensor blk.1.attn_k.weight, which a model of architecture llama has not in transformers$",
        ),
        (
            {"feed_forward_length": 96},
            r"the tensor of model.layers.0.mlp.gate_proj.weight is \[64, 32\], and its keys say",
        ),
        ({"embedding_length": None}, r"lacks llama\.embedding_length$"),
        ({"attention.head_count": 3}, "cannot be imported by transformers: "),
        ({"tokenizer.ggml.tokens": ""}, r"has no tokenizer \(tokenizer\.ggml\.tokens\); convert the model with its"),
    ],
)
def test_what_would_be_read_wrongly_is_refused_by_its_name(
    source: Any, tmp_path: Path, keys: dict[str, Any], sentence: str
) -> None:
    file = write_model(source, tmp_path / "model.gguf", "llama", keys=keys)
    refuse(file, tmp_path, sentence)


@pytest.mark.parametrize("architecture", ["mamba", "t5", "falcon", "gemma3n", "clip"])
def test_other_architectures_are_refused_by_their_names(tmp_path: Path, architecture: str) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", architecture)
    add_tensor(writer, "token_embd.weight", np.zeros((4, 32), np.float32), GGMLQuantizationType.F32)
    finish(writer)
    sentence = rf"architecture '{architecture}' is not imported from GGUF, only llama, qwen2, "
    refuse(tmp_path / "model.gguf", tmp_path, "mmproj" if architecture == "clip" else sentence)


def test_a_type_that_cannot_be_dequantized_is_named(source: Any, tmp_path: Path) -> None:
    embeddings = np.zeros((263, 32), np.int8)
    file = write_model(source, tmp_path / "model.gguf", "llama", tensors={"token_embd.weight": embeddings})
    refuse(file, tmp_path, "has type I8, which the package gguf cannot dequantize$")


def test_a_directory_that_exists_stays(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ArtifactError, match=r"taken: exists; give a new directory$"):
        import_gguf(file, tmp_path / "taken")
    with pytest.raises(ArtifactError, match=r"--dtype: 'int8' is not one of bfloat16, float32$"):
        import_gguf(file, tmp_path / "new", "int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given", "taken"]


@pytest.mark.parametrize("size", [5_000, 40_000])
def test_a_disk_that_fills_leaves_nothing(file: Path, tmp_path: Path, size: int) -> None:
    """The tokenizer's file does not fit, or the weights'."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        refuse(file, tmp_path, r"File too large( \(os error 27\))?$")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_import_that_is_interrupted_leaves_nothing(file: Path, tmp_path: Path) -> None:
    def interrupt(done: int, of: int) -> None:
        if done == 3:
            assert (tmp_path / "out.unfinished" / "model.safetensors").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_gguf(file, tmp_path / "out", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["given"]
