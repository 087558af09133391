"""Hostile uploads: adapters' files and headers, chunks, base models and their small files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.contracts.artifacts.base_model import ModuleShape
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from tests.trials.hostile.cases import STORE, Case

MODULES = tuple(
    ModuleShape(f"model.layers.{layer}.self_attn_{'x' * 40}.{name}_proj", 1, 1)
    for layer in range(80)
    for name in "qkvoudg"
)
BASE = "wide"
_PREFIX = f"base_model.model.{MODULES[0].name}"
_DEEP = "[" * 5_000 + "]" * 5_000


def _tensors(**changes: Any) -> dict[str, Any]:
    """Return the header of a good adapter of one module, with changes of its first tensor."""
    return {
        f"{_PREFIX}.lora_A.weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]} | changes,
        f"{_PREFIX}.lora_B.weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [4, 8]},
    }


def _file(header: bytes | Mapping[str, Any], data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


_GOOD = _file(_tensors())
_WEIGHTS: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": bytes(7),
    "a pickle": b"\x80\x04cos\nsystem\n(S'id'\ntR.",
    "a length of 2^64": b"\xff" * 8 + b"{}",
    "a length beyond the file": _file(_tensors(), length=10_000),
    "a header of 5 MB": _file(b"{" + b" " * 5_000_000 + b"}"),
    "no JSON": _file(b"{x"),
    "a list": _file(b"[]"),
    "bytes that are no text": _file(b'{"\xff": 1}'),
    "a million lists": _file(b'{"a":[' + b"[]," * 1_000_000 + b"[]]}"),
    "lists in lists": _file(b'{"a":' + b"[" * 500_000 + b"]" * 500_000 + b"}"),
    "a million digits": _file(b'{"a":' + b"9" * 1_000_000 + b"}"),
    "a large exponent": _file(b'{"a":1e999999}'),
    "a name twice": _file(b'{"a":1,"a":2}'),
    "a hundred thousand names": _file(json.dumps({f"{i}": 1 for i in range(100_000)}).encode()),
    "an unknown dtype": _file(_tensors(dtype="F128")),
    "a dtype that is a list": _file(_tensors(dtype=["F32"])),
    "a negative shape": _file(_tensors(shape=[-1, -1])),
    "a shape of 2^62": _file(_tensors(shape=[2**62, 2**62])),
    "a shape of floats": _file(_tensors(shape=[1.0, 1.0])),
    "a shape of truths": _file(_tensors(shape=[True, True])),
    "a hundred dimensions": _file(_tensors(shape=[1] * 100)),
    "offsets that overlap": _file(_tensors(data_offsets=[4, 8])),
    "offsets that run back": _file(_tensors(data_offsets=[8, 4])),
    "offsets beyond the file": _file(_tensors(data_offsets=[2**60, 2**60 + 4])),
    "no offsets": _file(_tensors(data_offsets=[])),
    "a hole": _file(_tensors(), bytes(64)),
    "not a number": _file(_tensors(), b"\x00\x00\xc0\x7f" + bytes(4)),
    "a name of lines": _file({"a\nb\x1b[2J": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "a name that is a surrogate": _file(
        b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', bytes(4)
    ),
    "a name of a megabyte": _file({"x" * 1_000_000: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
}
_CONFIGS: dict[str, Any] = {
    "no JSON": b"{",
    "bytes that are no text": b"\xff\xfe",
    "a list": b"[]",
    "NaN": b'{"r": NaN}',
    "lists in lists": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a megabyte of lists": b'{"target_modules":[' + b"[]," * 340_000 + b"[]]}",
    "more than a megabyte": b'{"a":"' + b"x" * 1_100_000 + b'"}',
    "a rank of 0": {"r": 0},
    "a rank of 2^70": {"r": 2**70},
    "a rank that is true": {"r": True},
    "a rank of text": {"r": "1"},
    "an alpha of text": {"lora_alpha": "1"},
    "an alpha of 1e300": {"lora_alpha": 1e300},
    "another type": {"peft_type": "IA3"},
    "a type of a megabyte": {"peft_type": "x" * 900_000},
    "a surrogate": {"task_type": "\ud800"},
    "a field of lines": {"a\nb\x1b[2J": 1},
    "a field that is a surrogate": {"\ud800": 1},
    "patterns that are a list": {"rank_pattern": [1]},
    "five thousand patterns": {"rank_pattern": {f"m{i}": 1 for i in range(5_000)}},
    "257 expressions": {"rank_pattern": {f".*{i}": 1 for i in range(257)}},
    "a pattern in a pattern": {"alpha_pattern": {"(a+)+$": 1}},
    "a pattern that is none": {"alpha_pattern": {"[": 1}},
    "a pattern of a surrogate": {"alpha_pattern": {"\ud800": 1}},
    "a pattern with NaN": b'{"peft_type": "LORA", "r": 1, "alpha_pattern": {"q": NaN}}',
    "pickled modules": {"modules_to_save": ["os.system"]},
    "a chat that is a list": {"loraplex_chat": []},
    "a chat of another key": {"loraplex_chat": {"code": "x"}},
    "a template that is a surrogate": {"loraplex_chat": {"template": "\ud800"}},
    "a template of half a megabyte": {"loraplex_chat": {"template": "x" * 500_000}},
    "labels of lists": {"id2label": [1]},
}


def _upload(config: bytes, weights: bytes, **header: Any) -> tuple[bytes, ...]:
    parts = [pb.UploadRevisionRequest(header=pb.UploadHeader(**({"adapter": "bad", "base_model": BASE} | header)))]
    for name, data in ((CONFIG_FILE, config), (WEIGHTS_FILE, weights)):
        starts = range(0, max(1, len(data)), 1_000_000)
        parts += [_chunk(name, data[start : start + 1_000_000]) for start in starts]
    return tuple(part.SerializeToString() for part in parts)


def _chunk(name: str, data: bytes = b"x") -> pb.UploadRevisionRequest:
    return pb.UploadRevisionRequest(chunk=pb.FileChunk(name=name, data=data))


def bad_uploads() -> Iterator[Case]:
    """Yield uploads of adapters."""
    upload, plain = f"{STORE}UploadRevision", b'{"peft_type": "LORA", "r": 1}'
    for name, weights in _WEIGHTS.items():
        yield Case(f"weights: {name}", upload, _upload(plain, weights))
    for name, config in _CONFIGS.items():
        text = config if isinstance(config, bytes) else json.dumps({"peft_type": "LORA", "r": 1} | config).encode()
        yield Case(f"config: {name}", upload, _upload(text, _GOOD))
    costly = {"peft_type": "LORA", "r": 1, "alpha_pattern": {f".*.*{i}": 1 for i in range(256)}}
    yield Case("config: 256 patterns", upload, _upload(json.dumps(costly).encode(), _file(*all_modules())))
    for name in ("../support", "tenants/acme/adapters/support", "tenants/shared/adapters/support", "", "a" * 129, "\n"):
        yield Case(f"adapter {name!r}", upload, _upload(plain, _GOOD, adapter=name))
    for field in ("alias", "etag", "base_model"):
        yield Case(f"header: {field}", upload, _upload(plain, _GOOD, **{field: "../\n"}))
    header = pb.UploadRevisionRequest(header=pb.UploadHeader(adapter="bad", base_model=BASE))
    for name in ("../../../etc/passwd", "", "x", f"./{CONFIG_FILE}", f"{CONFIG_FILE}\0", "a" * 100_000):
        yield Case(f"file {name[:20]!r}", upload, (header.SerializeToString(), _chunk(name).SerializeToString()))
    yield Case("no header", upload, (_chunk(CONFIG_FILE).SerializeToString(),))
    yield Case("nothing", upload, ())
    yield Case("two headers", upload, (header.SerializeToString(),) * 2)
    yield Case("a thousand empty messages", upload, (header.SerializeToString(), *[b""] * 1_000))


def all_modules() -> tuple[dict[str, Any], bytes]:
    """Return header and bytes of an adapter of every module."""
    header: dict[str, Any] = {}
    for module in MODULES:
        for part in ("A", "B"):
            tensor = {"dtype": "F32", "shape": [1, 1], "data_offsets": [4 * len(header), 4 * len(header) + 4]}
            header[f"base_model.model.{module.name}.lora_{part}.weight"] = tensor
    return header, bytes(4 * len(header))


def bad_models() -> Iterator[Case]:
    """Yield registrations of base models."""
    good: dict[str, Any] = {
        "name": "x",
        "digest": "sha256:" + "0" * 64,
        "architecture": "llama",
        "context_length": 9,
        "vocab_size": 9,
    }
    changes: dict[str, dict[str, Any]] = {
        "a path": {"name": "../x"},
        "a name of lines": {"name": "a\nb"},
        "no digest": {"digest": "sha256:0"},
        "an architecture of lines": {"architecture": "a\nb"},
        "no context": {"context_length": 0},
        "no vocabulary": {"vocab_size": 0},
        "an end beyond it": {"end_token_ids": [9]},
        "an unknown task": {"tasks": ["rm -rf"]},
        "an unknown pooling": {"pooling": "x" * 1_000_000},
        "an unknown scheme": {"quantization": "../x"},
        "a module without a size": {"modules": [pb.Module(name="a")]},
        "a module twice": {"modules": [pb.Module(name="a", in_features=1, out_features=1)] * 2},
        "a module of lines": {"modules": [pb.Module(name="a\nb", in_features=1, out_features=1)]},
        "a hundred thousand modules": {
            "modules": [pb.Module(name=f"model.layers.{i}.q", in_features=1, out_features=1) for i in range(100_000)]
        },
        "files that do not come": {"files": [pb.FileInfo(name="a", size=1, sha256="sha256:" + "0" * 64)]},
    }
    register = f"{STORE}RegisterBaseModel"
    for name, change in changes.items():
        request = pb.RegisterBaseModelRequest(model=pb.BaseModel(**(good | change)))
        yield Case(f"model: {name}", register, (request.SerializeToString(),))
    model = pb.RegisterBaseModelRequest(model=pb.BaseModel(**good)).SerializeToString()
    for file in ("../x", "", ".hidden", "a/b", "a\0b", "a" * 200):
        chunk = pb.RegisterBaseModelRequest(chunk=pb.FileChunk(name=file, data=b"x")).SerializeToString()
        yield Case(f"model: file {file[:10]!r}", register, (model, chunk))
    many = [pb.RegisterBaseModelRequest(chunk=pb.FileChunk(name=f"f{i}", data=b"x")) for i in range(100)]
    yield Case("model: a hundred files", register, (model, *(part.SerializeToString() for part in many)))
