"""Imports a GGUF file as a transformers directory, by transformers' own reading of GGUF.

transformers gives the configuration, the tokenizer, the tensors' names and how llama.cpp's converter has changed them.
Its from_pretrained holds all tensors in float32; here each is dequantized in pieces into the dtype and written before
the next is read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import BaseModel, read_base_model
from loraplex.model_tools.gguf.config import ROPE_FACTORS, named_tensors, read_config
from loraplex.model_tools.gguf.file import GgufFile, TensorEntry

# Tensors of files that the model has no parameter for.
UNREAD = (ROPE_FACTORS,)
# Maximum bytes of a file with more than one tensor.
SHARD_BYTES = 2 << 30
_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}
# safetensors wants the header's length to be a multiple of it.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Return its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_model(file: GgufFile, directory: Path, dtype: str, progress: Callable[[int, int], None]) -> BaseModel:
    """Write a file's model to a new directory and return its manifest. Raises ArtifactError; then it leaves nothing."""
    unfinished = directory.with_name(directory.name + ".unfinished")
    try:
        with _quiet():
            config = read_config(file)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            reading = _Reading(file, config, getattr(torch, dtype))
            _write_small_files(file, config, unfinished)
            write_shards(unfinished, reading.plans, reading.read, progress)
        manifest = read_base_model(str(unfinished), "model")
        os.rename(unfinished, directory)
    except (ArtifactError, MemoryError):
        raise
    except OSError as error:
        raise ArtifactError(str(directory), f"cannot be written: {error.strerror or error}") from error
    except Exception as error:  # whatever transformers raises, which reads what anybody may have written
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ArtifactError(file.name, f"cannot be imported by transformers: {reason}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return manifest


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' bars and warnings from the terminal: what matters is checked here, and raised."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def _write_small_files(file: GgufFile, config: PreTrainedConfig, out: Path) -> None:
    """Write tokenizer and chat template, configuration, and the tokens that end an answer as llama.cpp has them."""
    _read_tokenizer(file, config).save_pretrained(out)
    config.save_pretrained(out)
    ends = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = list(dict.fromkeys(end for end in ends if end is not None))
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=known[0] if len(known) == 1 else known or None,
        pad_token_id=file.get("tokenizer.ggml.padding_token_id"),
    )
    generation.save_pretrained(out)


def _read_tokenizer(file: GgufFile, config: PreTrainedConfig) -> Any:
    """Read the tokenizer as AutoTokenizer does, which would read the configuration again. Raises ArtifactError."""
    if not file.get("tokenizer.ggml.tokens"):
        raise ArtifactError(
            file.name, "has no tokenizer (tokenizer.ggml.tokens); convert the model with its vocabulary"
        )
    kind: Any = TOKENIZER_MAPPING.get(type(config), TokenizersBackend)
    # A link in a folder of its own: files beside the GGUF are not this model's.
    with tempfile.TemporaryDirectory(prefix="loraplex-gguf-") as folder:
        os.symlink(file.paths[0].resolve(), Path(folder) / "model.gguf")
        return kind.from_pretrained(folder, gguf_file="model.gguf")


class _Reading:
    """Reads tensors by the names that transformers gives them; `plans` are those of the model."""

    def __init__(self, file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        model, self._processor, self._names = named_tensors(config, file.architecture, dtype=dtype)
        config.architectures, config.dtype = [type(model).__name__], dtype
        self._file = file
        self._dtype = dtype
        tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
        self.plans = [
            TensorPlan(name, tuple(tensor.shape), dtype)
            for name, tensor in model.state_dict().items()
            if name not in tied
        ]
        self._sources = self._find_sources()

    def _find_sources(self) -> dict[str, list[TensorEntry]]:
        """Return the file's tensors for each of the model's.

        Raises ArtifactError for one that is missing, and for one that the model has no place for.
        """
        tensors, sources = self._file.tensors, dict[str, list[TensorEntry]]()
        stored_names: dict[str, list[str]] = {plan.name: [] for plan in self.plans}
        for source, name in self._names.items():
            # Of experts' tensors transformers' table has the names without the last part.
            full = source if source.endswith((".weight", ".bias")) else f"{source}.weight"
            stored_names.setdefault(name, []).append(full)
        for name in [plan.name for plan in self.plans]:
            stored = stored_names[name]
            if missing := [source for source in stored if source not in tensors] or ([] if stored else [name]):
                raise ArtifactError(self._file.name, f"lacks tensor {missing[0]}, which {self._what} has")
            sources[name] = [tensors[source] for source in stored]
        placed = {tensor.name for of_one in sources.values() for tensor in of_one}
        if unplaced := sorted(set(tensors) - placed - set(UNREAD)):
            raise ArtifactError(
                self._file.name, f"has tensor {unplaced[0]}, which {self._what} has not in transformers"
            )
        return sources

    @property
    def _what(self) -> str:
        return f"a model of architecture {self._file.architecture}"

    def read(self, plan: TensorPlan) -> Tensor:
        """Read a tensor of the model, of one or several of the file. Raises ArtifactError, OSError."""
        placed: dict[str, Tensor] = {}
        for source in self._sources[plan.name]:
            result = self._processor.process(
                weights=self._numbers(source).numpy(),
                name=source.name,
                tensor_key_mapping=self._names,
                parsed_parameters={"tensors": placed},
            )
            if result.name is not None:
                placed[plan.name] = torch.from_numpy(result.weights)
        tensor = placed[plan.name]
        tensor = tensor.view(self._dtype) if tensor.dtype == torch.int16 else tensor.to(self._dtype)
        if [size for size in tensor.shape if size > 1] != [size for size in plan.shape if size > 1]:
            raise ArtifactError(
                self._file.name,
                f"the tensor of {plan.name} is {list(tensor.shape)}, and its keys say {list(plan.shape)}",
            )
        return tensor.view(plan.shape)

    def _numbers(self, source: TensorEntry) -> Tensor:
        """Dequantize a tensor: vectors in float32, since processors add to norms; others, which they only rearrange,
        in the dtype, of which numpy sees the bits.
        """
        if len(source.shape) == 1:
            return torch.from_numpy(source.read())
        values = torch.empty((math.prod(source.shape[:-1]), source.shape[-1]), dtype=self._dtype)
        for place, rows in source.pieces():
            values[place] = torch.from_numpy(rows)
        values = values.view(source.shape)
        return values.view(torch.int16) if self._dtype == torch.bfloat16 else values


def write_shards(
    out: Path, plans: Sequence[TensorPlan], read: Callable[[TensorPlan], Tensor], progress: Callable[[int, int], None]
) -> None:
    """Write the tensors that `read` gives to files of at most SHARD_BYTES, and an index of several. Raises OSError.

    One tensor is in memory at a time; safetensors' own save_file takes all tensors of a file at once. A file is the
    length of its header in 8 bytes, the header in JSON, and the tensors' bytes, one after the other.
    """
    shards = _divide(plans)
    # A model of a single file has its usual name, and no index.
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else ["model.safetensors"]
    done = 0
    for name, shard in zip(names, shards, strict=True):
        with open(out / name, "wb") as file:
            file.write(_header(shard))
            for plan in shard:
                file.write(read(plan).contiguous().view(-1).view(torch.uint8).numpy().data)
                done += 1
                progress(done, len(plans))
    if len(shards) > 1:
        placed = {plan.name: name for name, shard in zip(names, shards, strict=True) for plan in shard}
        index = {"metadata": {"total_size": sum(plan.size for plan in plans)}, "weight_map": placed}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _divide(plans: Sequence[TensorPlan]) -> list[list[TensorPlan]]:
    shards: list[list[TensorPlan]] = [[]]
    size = 0
    for plan in plans:
        if shards[-1] and size + plan.size > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(plan)
        size += plan.size
    return shards


def _header(shard: Sequence[TensorPlan]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for plan in shard:
        end = start + plan.size
        header[plan.name] = {"dtype": _NAMES[plan.dtype], "shape": plan.shape, "data_offsets": (start, end)}
        start = end
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % _ALIGNMENT)
    return struct.pack("<Q", len(data)) + data
